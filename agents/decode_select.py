"""Choosing the decoder of a model, and checking it against the model before it is trusted."""

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from turngym.agents.decode import Decoder, make_step
from turngym.agents.decode_fast import FastDecoder, has_fast_path
from turngym.agents.decode_generic import GenericDecoder, RecomputeDecoder, has_row_cache
from turngym.agents.model import vocab_size

__all__ = ["agrees_with_model", "select_decoder"]

logger = logging.getLogger(__name__)


def select_decoder(model: nn.Module, max_context: int, *, fast: bool = True) -> Decoder:
    """Return the fastest decoder whose logits are the model's own.

    Args:
        model: a causal LM.
        max_context: most tokens of a context.
        fast: allow the functional decoder.
    """
    choices: list[tuple[str, Callable[[], Decoder]]] = []
    if fast and has_fast_path(model):
        choices.append(("functional", lambda: FastDecoder(model, max_context)))
    if has_row_cache(model):
        choices.append(("cached", lambda: GenericDecoder(model)))
    for name, make in choices:
        decoder = make()
        if agrees_with_model(decoder, model, max_context):
            return decoder
        logger.warning(
            "the %s decoder does not reproduce %s and is not used", name, type(model).__name__
        )
    logger.warning(
        "%s keeps state that is not plain key-value attention: every token recomputes its whole "
        "context",
        type(model).__name__,
    )
    return RecomputeDecoder(model)


@torch.inference_mode()
def agrees_with_model(decoder: Decoder, model: nn.Module, max_context: int) -> bool:
    """Compare a decoder with the model itself on two rows fed in uneven pieces."""
    outer = cast(Any, model)
    device = outer.get_input_embeddings().weight.device
    length = min(7, max_context)
    ids = (torch.arange(2 * length, device=device).view(2, -1) * 7919 + 1) % vocab_size(model)
    decoder.reserve(2, length + 2)
    fed = [0, 0]
    found: Tensor = torch.empty(0)
    try:
        for counts in ((min(3, length), 1), (1, length - 1), (length - 4, 0)):
            wanted = [min(max(c, 0), length - f) for c, f in zip(counts, fed, strict=True)]
            if not any(wanted):
                continue
            chunk = torch.zeros(2, max(wanted), dtype=torch.int64, device=device)
            for row, count in enumerate(wanted):
                chunk[row, :count] = ids[row, fed[row] : fed[row] + count]
            step = make_step(
                torch.arange(2, device=device),
                chunk,
                torch.tensor(fed, device=device),
                torch.tensor(wanted, device=device),
                is_prefix=True,
                span=max(f + c for f, c in zip(fed, wanted, strict=True)),
                capacity=length + 2,
                max_context=max_context,
            )
            logits = decoder.head(decoder.forward(step))
            found = (
                logits
                if not len(found)
                else torch.where(torch.tensor(wanted, device=device)[:, None] > 0, logits, found)
            )
            fed = [f + c for f, c in zip(fed, wanted, strict=True)]
        training = model.training
        model.eval()
        want = outer(input_ids=ids, use_cache=False).logits[:, -1].float()
        model.train(training)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError) as error:
        logger.debug("decoder probe failed", exc_info=error)
        return False
    tolerance = 1e-4 if outer.dtype == torch.float32 else 5e-2
    return bool((found - want).abs().max() <= tolerance * want.abs().max().clamp(min=1.0))
