"""What the sampler and the learner share: loading, log-probabilities in chunks, adapters."""

import contextlib
import logging
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from turngym.agents.adapters import find_base, import_peft, is_adapter, merge_adapter, quiet_peft
from turngym.agents.head import Head, decoder_of, head_of, linear, vocab_size
from turngym.errors import ConfigError, TrajectoryError

__all__ = [
    "LogProbs",
    "adapters_disabled",
    "attach_lora",
    "decoder_of",
    "head_of",
    "linear",
    "load_model",
    "policy_logprobs",
    "states_before",
    "vocab_size",
]

logger = logging.getLogger(__name__)

_CHUNK_LOGITS = {"cpu": 1 << 21}
"""Most logits of a chunk, by device. Measured at V = 32,768: half the time of 2**25."""


_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogProbs:
    """What the current weights think of given tokens."""

    logp: Tensor
    """Log-probabilities, (N,) float32, differentiable."""

    entropy: Tensor | None
    """Entropy of the distribution each token was drawn from, (N,) float32; None unless asked."""

    certainty: Tensor | None = None
    """KL(uniform || that distribution), (N,) float32; None unless asked."""

    topk: Tensor | None = None
    """Log-probabilities of the ids asked for at each place, (N, K) float32; None unless asked."""


def load_model(
    path: str | os.PathLike[str], *, dtype: str = "float32", device: str = "auto"
) -> tuple[nn.Module, Any]:
    """Load a causal language model and its tokenizer, dropout switched off.

    Dropout is set to 0 because a policy whose log-probabilities change from call to call has no
    meaningful importance ratio.

    Args:
        path: a folder written by `save_pretrained` (nothing is looked up elsewhere), or a hub id
            of the form `owner/name`. In a folder that holds a peft adapter it is merged into its
            base (see `find_base`).
        dtype: name of the torch dtype of the weights; "auto" keeps the stored one.
        device: "auto" takes the first accelerator there is; else a torch device.

    Returns:
        The model, in eval mode, and a fast tokenizer.

    Raises:
        ConfigError: the path is neither, nothing loadable is there, the dtype is unknown, or the
            tokenizer knows more ids than the model.
        MissingDependencyError: the folder holds an adapter and peft is not installed.
    """
    kind = dtype if dtype == "auto" else getattr(torch, dtype, None)
    if kind != "auto" and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        raise ConfigError(f"dtype must be a torch float type or 'auto', got {dtype!r}")
    if not Path(path).is_dir() and not _HUB_ID.fullmatch(str(path)):
        raise ConfigError(
            f"cannot load a model: there is no folder {str(path)!r} here, and ids of the hub have "
            "the form owner/name"
        )
    model, tokenizer = _load(path, kind)
    if len(tokenizer) > vocab_size(model):
        raise ConfigError(
            f"the tokenizer of {str(path)!r} has {len(tokenizer)} ids, its model only "
            f"{vocab_size(model)}; resize the model's embeddings or take its own tokenizer"
        )
    if device == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = str(accelerator or "cpu")
    return model.to(device).eval(), tokenizer


def _load(path: str | os.PathLike[str], dtype: Any) -> tuple[nn.Module, Any]:
    local = Path(path).is_dir()
    if local and is_adapter(path):
        return _load_merged(path, dtype)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=local)
        _switch_off_dropout(config)
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, local_files_only=local
        )
        return model, AutoTokenizer.from_pretrained(path, local_files_only=local)
    except (OSError, ValueError) as error:
        where = "folder" if local else "hub id (no folder of that name exists here)"
        raise ConfigError(f"cannot load a causal LM from {where} {str(path)!r}: {error}") from error


def _load_merged(folder: str | os.PathLike[str], dtype: Any) -> tuple[nn.Module, Any]:
    base = find_base(folder)
    try:
        model, tokenizer = _load(base, dtype)
    except ConfigError as error:
        raise ConfigError(
            f"{str(folder)!r} holds an adapter of {base!r}, which is not to be had: put that model "
            f"into a folder `base` beside it, or mend base_model_name_or_path ({error})"
        ) from error
    if any(Path(folder).glob("tokenizer*.json")):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return merge_adapter(model, folder), tokenizer


def _switch_off_dropout(config: Any) -> None:
    for name, value in config.to_dict().items():
        if (name.endswith("dropout") or name.endswith("pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)


def policy_logprobs(
    model: nn.Module,
    rows: Sequence[NDArray[np.int32]],
    positions: Sequence[NDArray[np.int64]],
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    with_entropy: bool = False,
    with_certainty: bool = False,
    topk_ids: Tensor | None = None,
) -> LogProbs:
    """Score tokens under the current weights: log p(ids[t] | ids[:t]) at each requested t.

    Rows are run as one right-padded batch (sort and bucket them before calling). Logits exist for
    `chunk_tokens` tokens at a time and are recomputed in the backward pass.

    Args:
        model: a causal LM, or a peft model around one.
        rows: token ids of each context.
        positions: for each row the indices t >= 1 of the tokens to score, in any order.
        temperature: logits are divided by it; what the sampler used.
        chunk_tokens: most tokens whose logits exist at once; None = at most 1024 and few enough
            for the cache of a CPU or a fraction of an accelerator's memory.
        with_entropy: also return entropies, in nats, of the tempered distribution.
        with_certainty: also return its self-certainty (Intuitor, arXiv:2505.19590, equation 3).
        topk_ids: also score these alternatives at each place, (N, K) int64.

    Returns:
        One entry per position, row after row, in the order asked.

    Raises:
        ConfigError: `temperature` or `chunk_tokens` is not positive.
        TrajectoryError: rows and positions do not fit each other or the vocabulary.
    """
    if not 0 < temperature < math.inf:
        raise ConfigError(f"temperature must be finite and positive to score, got {temperature}")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ConfigError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    vocab = vocab_size(model)
    _check_rows(rows, positions, vocab, past_end=0)
    score = _Scorer(temperature, with_entropy, with_certainty)
    device = cast(Any, model).get_input_embeddings().weight.device
    target = [ids[where] for ids, where in zip(rows, positions, strict=True)]
    targets = torch.from_numpy(np.concatenate([*target, np.empty(0)]).astype(np.int64)).to(device)
    if not len(targets):
        empty = torch.zeros(0, device=device)
        width = 0 if topk_ids is None else topk_ids.shape[1]
        return score.collect([(empty, empty, empty, empty.view(0, width))], topk_ids is not None)
    head, states = _head_and_states(model, rows, positions)
    others = torch.empty(len(targets), 0, dtype=torch.int64, device=device)
    if topk_ids is not None:
        others = topk_ids.to(device)
    count = chunk_tokens or min(1024, max(32, _CHUNK_LOGITS.get(device.type, 1 << 27) // vocab))
    parts = (torch.split(column, count) for column in (states, targets, others))
    chunks = [score(head, h, t, o) for h, t, o in zip(*parts, strict=True)]
    return score.collect(chunks, topk_ids is not None)


def _head_and_states(
    model: nn.Module, rows: Sequence[NDArray[np.int32]], positions: Sequence[NDArray[np.int64]]
) -> tuple[Head, Tensor]:
    """Return a head and what it takes: hidden states, or logits where the head is opaque."""
    head = head_of(model)
    if head is not None:
        return head, states_before(decoder_of(model), rows, positions)
    outer = cast(Any, model)
    device = outer.get_input_embeddings().weight.device
    logits = _gather(
        lambda ids: outer(input_ids=ids, use_cache=False).logits, rows, positions, device
    )
    return Tensor.float, logits


def states_before(
    decoder: nn.Module,
    rows: Sequence[NDArray[np.int32]],
    positions: Sequence[NDArray[np.int64]],
) -> Tensor:
    """Return the final hidden state from which each requested token is predicted, (N, d).

    The only place where predictions are shifted against tokens: the state before `ids[t]` is that
    of position t - 1, which has read `ids[:t]`. Causal attention never sees what comes after a
    token, so the right padding needs no mask and its id is never looked at.

    Args:
        decoder: ends in hidden states, see `decoder_of`.
        rows: token ids of each context.
        positions: for each row the indices t >= 1, in any order; t = len(ids) asks for the state
            after the last token.

    Raises:
        TrajectoryError: rows and positions do not fit each other or the vocabulary.
    """
    weight = cast(Any, decoder).get_input_embeddings().weight
    _check_rows(rows, positions, int(weight.shape[0]), past_end=1)
    if not sum(map(len, positions)):
        return cast(Tensor, weight.new_zeros((0, weight.shape[1])))
    return _gather(
        lambda ids: cast(Any, decoder)(input_ids=ids, use_cache=False).last_hidden_state,
        rows,
        positions,
        weight.device,
    )


def _gather(
    run: Callable[[Tensor], Tensor],
    rows: Sequence[NDArray[np.int32]],
    positions: Sequence[NDArray[np.int64]],
    device: torch.device,
) -> Tensor:
    """Run right-padded rows and take the output at t - 1 for each requested t, (N, ...)."""
    used = [k for k, where in enumerate(positions) if len(where)]
    # What follows the last place asked for is never read.
    lengths = [int(positions[k].max()) for k in used]
    ids = np.zeros((len(used), max(lengths)), np.int64)
    for line, k in enumerate(used):
        ids[line, : lengths[line]] = rows[k][: lengths[line]]
    index = np.concatenate(
        [line * ids.shape[1] + positions[k] - 1 for line, k in enumerate(used)]
    ).astype(np.int64)
    output = run(torch.from_numpy(ids).to(device))
    return output.flatten(0, 1)[torch.from_numpy(index).to(device)]


def _check_rows(
    rows: Sequence[NDArray[np.int32]],
    positions: Sequence[NDArray[np.int64]],
    vocab: int,
    *,
    past_end: int,
) -> None:
    if len(rows) != len(positions):
        raise TrajectoryError(
            f"rows and positions must pair up, got {len(rows)} rows and {len(positions)} positions"
        )
    for k, (ids, where) in enumerate(zip(rows, positions, strict=True)):
        last = len(ids) - 1 + past_end
        if len(where) and not (int(where.min()) >= 1 and int(where.max()) <= last):
            raise TrajectoryError(
                f"row {k}: positions must lie in 1..{last} (the first token is never "
                f"predicted), got {int(where.min())}..{int(where.max())}"
            )
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < vocab):
            bad = int(ids.max()) if int(ids.max()) >= vocab else int(ids.min())
            raise TrajectoryError(
                f"row {k} holds token id {bad}, outside the model's vocabulary of {vocab}"
            )


_Scores = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class _Scorer:
    """Turns hidden states into what was asked for; what was not asked for is an empty tensor."""

    temperature: float
    with_entropy: bool
    with_certainty: bool

    def __call__(self, head: Head, hidden: Tensor, targets: Tensor, others: Tensor) -> _Scores:
        """Score one chunk."""

        def score(hidden: Tensor) -> _Scores:
            logits = head(hidden) / self.temperature
            total = logits.logsumexp(-1)
            logp = logits.gather(-1, targets[:, None]).squeeze(-1) - total
            entropy = certainty = logits.new_empty(0)
            if self.with_entropy:
                entropy = total - ((logits - total[:, None]).exp() * logits).sum(-1)
            if self.with_certainty:
                certainty = total - logits.mean(-1) - math.log(logits.shape[-1])
            return logp, entropy, certainty, logits.gather(-1, others) - total[:, None]

        if not torch.is_grad_enabled():
            return score(hidden)
        return cast(_Scores, checkpoint(score, hidden, use_reentrant=False))

    def collect(self, chunks: Sequence[_Scores], with_topk: bool) -> LogProbs:
        """Put the chunks together."""
        logp, entropy, certainty, topk = (torch.cat(part) for part in zip(*chunks, strict=True))
        return LogProbs(
            logp=logp,
            entropy=entropy if self.with_entropy else None,
            certainty=certainty if self.with_certainty else None,
            topk=topk if with_topk else None,
        )


def attach_lora(
    model: nn.Module,
    rank: int,
    *,
    alpha: float | None = None,
    targets: Sequence[str] | str = "all-linear",
    seed: int = 0,
) -> nn.Module:
    """Wrap a model with trainable low-rank adapters and freeze everything else.

    LoRA, arXiv:2106.09685. The adapter starts as the identity, so the wrapped policy is the old
    one until the first update.

    Args:
        model: a causal LM.
        rank: rank of the update, at least 1.
        alpha: the update is scaled by alpha / rank; None = 2 * rank.
        targets: names of the modules to adapt, or "all-linear".
        seed: of the adapters' first weights, which must be the same in every process.

    Raises:
        ConfigError: the rank is below 1 or no module has such a name.
        MissingDependencyError: peft is not installed.
    """
    if rank < 1:
        raise ConfigError(f"lora rank must be at least 1, got {rank}")
    peft = import_peft()
    device = cast(Any, model).get_input_embeddings().weight.device
    devices = [] if device.type == "cpu" else [device]
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        lora_dropout=0.0,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            quiet_peft()
            return cast(nn.Module, peft.get_peft_model(model, config))
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
