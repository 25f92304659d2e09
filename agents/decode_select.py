"""Choosing the decoder of a model, and checking it against the model before it is trusted."""

import logging
from collections.abc import Callable
from typing import Any, cast

import numpy as np
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


def agrees_with_model(decoder: Decoder, model: nn.Module, max_context: int) -> bool:
    """Compare a decoder with the model itself on two rows fed in uneven pieces."""
    outer = cast(Any, model)
    device = outer.get_input_embeddings().weight.device
    length = min(7, max_context)
    ids = (torch.arange(2 * length, device=device).view(2, -1) * 7919 + 1) % vocab_size(model)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            want = outer(input_ids=ids, use_cache=False).logits[:, -1].float()
        with decoder.mode():
            found = _feed_unevenly(decoder, ids, max_context)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError) as error:
        logger.debug("the decoder failed on %s", type(model).__name__, exc_info=error)
        return False
    finally:
        model.train(training)
    tolerance = 1e-4 if outer.dtype == torch.float32 else 5e-2
    return bool((found - want).abs().max() <= tolerance * want.abs().max().clamp(min=1.0))


def _feed_unevenly(decoder: Decoder, ids: Tensor, max_context: int) -> Tensor:
    """Feed two rows so that they differ in position and count; return their last logits, (2, V)."""
    length = ids.shape[1]
    decoder.reserve(2, length + 2)
    fed = np.zeros(2, np.int64)
    last: list[Tensor] = [torch.empty(0), torch.empty(0)]
    for wanted in ([3, 1], [1, length], [length, 0]):
        counts = np.minimum(wanted, length - fed)
        columns = np.minimum(fed[:, None] + np.arange(counts.max()), length - 1)
        step = make_step(
            np.arange(2),
            np.take_along_axis(ids.cpu().numpy(), columns, axis=1),
            fed,
            counts,
            is_prefix=True,
            span=int((fed + counts).max()),
            capacity=length + 2,
            max_context=max_context,
            device=ids.device,
        )
        logits = decoder.head(decoder.forward(step))
        fed = fed + counts
        last = [logits[row] if counts[row] else last[row] for row in range(2)]
    return torch.stack(last)
