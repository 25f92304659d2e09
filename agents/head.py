"""The two halves of a causal language model: the decoder, and the head that gives logits."""

import logging
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

__all__ = ["Head", "decoder_of", "head_of", "linear", "vocab_size"]

logger = logging.getLogger(__name__)

Head = Callable[[Tensor], Tensor]
"""Final hidden states (N, d) to fp32 logits (N, V)."""


def vocab_size(model: nn.Module) -> int:
    """Return how many token ids the model can read."""
    return int(cast(Any, model).get_input_embeddings().weight.shape[0])


def decoder_of(model: nn.Module) -> nn.Module:
    """Return the part of a causal LM (or of its peft wrapper) that ends in hidden states."""
    base = cast(Any, model)
    if hasattr(base, "peft_config"):
        base = base.get_base_model()
    return cast(nn.Module, base.get_decoder() if hasattr(base, "get_decoder") else base.base_model)


def _hidden(model: nn.Module, ids: Tensor) -> Tensor:
    return cast(Tensor, decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state)


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
