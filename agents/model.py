"""What the sampler and the learner share: loading, log-probabilities in chunks, adapters."""

import contextlib
import logging
import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from turngym.errors import ConfigError, MissingDependencyError, TrajectoryError

__all__ = [
    "LogProbs",
    "adapters_disabled",
    "attach_lora",
    "decoder_of",
    "head_of",
    "linear",
    "load_model",
    "policy_logprobs",
    "vocab_size",
]

logger = logging.getLogger(__name__)

Head = Callable[[Tensor], Tensor]
"""Final hidden states (N, d) to fp32 logits (N, V)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogProbs:
    """What the current weights think of given tokens."""

    logp: Tensor
    """Log-probabilities, (N,) float32, differentiable."""

    entropy: Tensor | None
    """Entropy of the distribution each token was drawn from, (N,) float32; None unless asked."""


def load_model(
    path: str | os.PathLike[str], *, dtype: str = "float32", device: str = "auto"
) -> tuple[nn.Module, Any]:
    """Load a causal language model and its tokenizer, dropout switched off.

    Dropout is set to 0 because a policy whose log-probabilities change from call to call has no
    meaningful importance ratio.

    Args:
        path: a folder written by `save_pretrained` (nothing is looked up elsewhere), or a hub id.
        dtype: name of the torch dtype of the weights; "auto" keeps the stored one.
        device: "auto" takes the first accelerator there is; else a torch device.

    Returns:
        The model, in eval mode, and a fast tokenizer.

    Raises:
        ConfigError: nothing loadable is there, the dtype is unknown, or the tokenizer knows more
            ids than the model.
    """
    kind = dtype if dtype == "auto" else getattr(torch, dtype, None)
    if kind != "auto" and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        raise ConfigError(f"dtype must be a torch float type or 'auto', got {dtype!r}")
    local = Path(path).is_dir()
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=local)
        _switch_off_dropout(config)
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=kind, local_files_only=local
        )
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=local)
    except (OSError, ValueError) as error:
        where = "folder" if local else "hub id (no folder of that name exists here)"
        raise ConfigError(f"cannot load a causal LM from {where} {str(path)!r}: {error}") from error
    if len(tokenizer) > vocab_size(model):
        raise ConfigError(
            f"the tokenizer of {str(path)!r} has {len(tokenizer)} ids, its model only "
            f"{vocab_size(model)}; resize the model's embeddings or take its own tokenizer"
        )
    if device == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = str(accelerator or "cpu")
    return model.to(device).eval(), tokenizer


def _switch_off_dropout(config: Any) -> None:
    for name, value in config.to_dict().items():
        if (name.endswith("dropout") or name.endswith("pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)


def vocab_size(model: nn.Module) -> int:
    """Return how many token ids the model can read."""
    return int(cast(Any, model).get_input_embeddings().weight.shape[0])


def decoder_of(model: nn.Module) -> nn.Module:
    """Return the part of a causal LM (or of its peft wrapper) that ends in hidden states."""
    base = cast(Any, model)
    if hasattr(base, "peft_config"):
        base = base.get_base_model()
    return cast(nn.Module, base.get_decoder() if hasattr(base, "get_decoder") else base.base_model)


def policy_logprobs(
    model: nn.Module,
    rows: Sequence[NDArray[np.int32]],
    positions: Sequence[NDArray[np.int64]],
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    with_entropy: bool = False,
) -> LogProbs:
    """Score tokens under the current weights: log p(ids[t] | ids[:t]) at each requested t.

    The only place where predictions are shifted against tokens. Rows are run as one right-padded
    batch (sort and bucket them before calling): causal attention never sees what comes after a
    token, so the filler needs no mask and its id is never looked at. Logits exist for
    `chunk_tokens` tokens at a time and are recomputed in the backward pass.

    Args:
        model: a causal LM, or a peft model around one.
        rows: token ids of each context.
        positions: for each row the indices t >= 1 of the tokens to score, in any order.
        temperature: logits are divided by it; what the sampler used.
        chunk_tokens: most tokens whose logits exist at once.
        with_entropy: also return entropies, in nats, of the tempered distribution.

    Returns:
        One entry per position, row after row, in the order asked.

    Raises:
        ConfigError: `temperature` or `chunk_tokens` is not positive.
        TrajectoryError: rows and positions do not fit each other or the vocabulary.
    """
    if not 0 < temperature < math.inf:
        raise ConfigError(f"temperature must be finite and positive to score, got {temperature}")
    if chunk_tokens < 1:
        raise ConfigError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    _check_rows(rows, positions, vocab_size(model))
    used = [k for k, where in enumerate(positions) if len(where)]
    device = cast(Any, model).get_input_embeddings().weight.device
    if not used:
        empty = torch.zeros(0, device=device)
        return LogProbs(logp=empty, entropy=empty.clone() if with_entropy else None)
    # The last scored token is predicted, never read.
    lengths = [int(positions[k].max()) for k in used]
    ids = np.zeros((len(used), max(lengths)), np.int64)
    for line, k in enumerate(used):
        ids[line, : lengths[line]] = rows[k][: lengths[line]]
    index = np.concatenate(
        [line * ids.shape[1] + positions[k] - 1 for line, k in enumerate(used)]
    ).astype(np.int64)
    target = np.concatenate([rows[k][positions[k]] for k in used]).astype(np.int64)
    head, hidden = _run(model, torch.from_numpy(ids).to(device))
    picked = hidden.flatten(0, 1)[torch.from_numpy(index).to(device)]
    targets = torch.from_numpy(target).to(device)
    outputs = [
        _score_chunk(head, h, t, temperature, with_entropy)
        for h, t in zip(
            torch.split(picked, chunk_tokens), torch.split(targets, chunk_tokens), strict=True
        )
    ]
    logp = torch.cat([chunk[0] for chunk in outputs])
    entropy = torch.cat([chunk[1] for chunk in outputs]) if with_entropy else None
    return LogProbs(logp=logp, entropy=entropy)


def _check_rows(
    rows: Sequence[NDArray[np.int32]], positions: Sequence[NDArray[np.int64]], vocab: int
) -> None:
    if len(rows) != len(positions):
        raise TrajectoryError(
            f"rows and positions must pair up, got {len(rows)} rows and {len(positions)} positions"
        )
    for k, (ids, where) in enumerate(zip(rows, positions, strict=True)):
        if len(where) and not (int(where.min()) >= 1 and int(where.max()) < len(ids)):
            raise TrajectoryError(
                f"row {k}: positions must lie in 1..{len(ids) - 1} (the first token is never "
                f"predicted), got {int(where.min())}..{int(where.max())}"
            )
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < vocab):
            bad = int(ids.max()) if int(ids.max()) >= vocab else int(ids.min())
            raise TrajectoryError(
                f"row {k} holds token id {bad}, outside the model's vocabulary of {vocab}"
            )


def _run(model: nn.Module, ids: Tensor) -> tuple[Head, Tensor]:
    """Return a head and what it takes: hidden states, or logits where the head is opaque."""
    head = head_of(model)
    if head is None:
        return Tensor.float, cast(Any, model)(input_ids=ids, use_cache=False).logits
    return head, _hidden(model, ids)


def _hidden(model: nn.Module, ids: Tensor) -> Tensor:
    return cast(Tensor, decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state)


def _score_chunk(
    head: Head, hidden: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    def score(hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(hidden) / temperature
        total = logits.logsumexp(-1)
        logp = logits.gather(-1, targets[:, None]).squeeze(-1) - total
        if not with_entropy:
            return logp, logp
        mean = ((logits - total[:, None]).exp() * logits).sum(-1)
        return logp, total - mean

    if not torch.is_grad_enabled():
        return score(hidden)
    return cast(tuple[Tensor, Tensor], checkpoint(score, hidden, use_reentrant=False))


_HAS_ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise")
_ONEDNN_ROWS = 64
"""Rows from which oneDNN's product beats torch's own (MKL) on the CPUs measured, up to twofold."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `F.linear`; where no gradient is asked, by the faster of torch's CPU libraries."""
    is_fp32_cpu = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    rows = x.numel() // x.shape[-1]
    if is_fp32_cpu and _HAS_ONEDNN and rows >= _ONEDNN_ROWS and not torch.is_grad_enabled():
        product = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return cast(Tensor, product)
    return F.linear(x, weight, bias)


_heads: "weakref.WeakKeyDictionary[nn.Module, bool]" = weakref.WeakKeyDictionary()


def head_of(model: nn.Module) -> Head | None:
    """Return the map from final hidden states to fp32 logits, None where it is not a plain one.

    Reads the post-processing that configurations declare (`final_logit_softcapping`,
    `logits_scaling`, `logit_scale`) and then checks the result against the model itself once, so
    that a family with undeclared post-processing is never scored wrongly: it takes the slower path
    through the model's own logits.
    """
    outer = cast(Any, model)
    module = outer.get_output_embeddings()
    config = getattr(outer.config, "get_text_config", lambda: outer.config)()
    cap = getattr(config, "final_logit_softcapping", None)
    factor = float(getattr(config, "logit_scale", None) or 1.0)
    factor /= float(getattr(config, "logits_scaling", None) or 1.0)

    def head(hidden: Tensor) -> Tensor:
        if type(module) is nn.Linear:
            bias = cast(Tensor | None, module.bias)
            logits = linear(
                hidden.float(), module.weight.float(), None if bias is None else bias.float()
            )
        else:
            logits = module(hidden).float()
        if factor != 1.0:
            logits = logits * factor
        return logits if cap is None else torch.tanh(logits / cap) * cap

    if model not in _heads:
        _heads[model] = module is not None and _head_agrees(model, head)
        if not _heads[model]:
            logger.warning(
                "%s post-processes its logits in a way its configuration does not declare: "
                "log-probabilities go through full logits, which takes more memory",
                type(model).__name__,
            )
    return head if _heads[model] else None


@torch.no_grad()
def _head_agrees(model: nn.Module, head: Head) -> bool:
    outer = cast(Any, model)
    size = vocab_size(model)
    ids = torch.arange(1, 9, device=outer.get_input_embeddings().weight.device)[None] * 7919 % size
    training = model.training
    model.eval()
    try:
        want = outer(input_ids=ids, use_cache=False).logits
        got = head(_hidden(model, ids)[0])[None]
    finally:
        model.train(training)
    if got.shape != want.shape:
        return False
    tolerance = 1e-4 if want.dtype == torch.float32 else 5e-2
    return bool((got - want).abs().max() <= tolerance * want.abs().max().clamp(min=1.0))


def attach_lora(
    model: nn.Module,
    rank: int,
    *,
    alpha: float | None = None,
    targets: Sequence[str] | str = "all-linear",
) -> nn.Module:
    """Wrap a model with trainable low-rank adapters and freeze everything else.

    LoRA, arXiv:2106.09685. The adapter starts as the identity, so the wrapped policy is the old
    one until the first update.

    Args:
        model: a causal LM.
        rank: rank of the update, at least 1.
        alpha: the update is scaled by alpha / rank; None = 2 * rank.
        targets: names of the modules to adapt, or "all-linear".

    Raises:
        ConfigError: the rank is below 1 or no module has such a name.
        MissingDependencyError: peft is not installed.
    """
    if rank < 1:
        raise ConfigError(f"lora rank must be at least 1, got {rank}")
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingDependencyError(
            "LoRA needs peft: install it with `pip install turngym[peft]`"
        ) from error
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        lora_dropout=0.0,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            # peft reads an attribute that transformers has renamed.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            return cast(nn.Module, get_peft_model(cast(Any, model), config))
    except ValueError as error:
        raise ConfigError(f"cannot attach LoRA to {targets!r}: {error}") from error


@contextlib.contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Run the block with the model as it was before `attach_lora`: the reference policy.

    Raises:
        ConfigError: the model has no adapters, so its base is not a reference.
    """
    if not hasattr(model, "disable_adapter"):
        raise ConfigError(
            f"{type(model).__name__} has no adapters to disable; attach_lora it first, or keep a "
            "copy of the model as the reference"
        )
    with cast(Any, model).disable_adapter():
        yield
