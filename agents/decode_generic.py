"""Decoders for any causal language model: through its own modules, with or without a cache."""

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from turngym.agents.decode import KVBuffers, Step
from turngym.agents.model import decoder_of, head_of

__all__ = ["GenericDecoder", "RecomputeDecoder", "has_row_cache"]

_KINDS = ("full_attention", "sliding_attention")
_MASKED_ATTENTION = ("sdpa", "eager")


def has_row_cache(model: nn.Module) -> bool:
    """Tell whether all layers are key-value attention that takes a prepared additive mask."""
    config = cast(Any, decoder_of(model)).config
    kinds = getattr(config, "layer_types", None) or _KINDS
    attention = getattr(config, "_attn_implementation", None)
    return set(kinds) <= set(_KINDS) and attention in _MASKED_ATTENTION


class _RowCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """A transformers cache whose rows stand at different positions."""

    def __init__(self, buffers: KVBuffers, step: Step) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self._buffers = buffers
        self._step = step

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write this step's keys and values; return all its rows may attend to."""
        return self._buffers.store(layer_idx, self._step, key_states, value_states)


class _Runner:
    """Runs a model's own modules in evaluation mode."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._head = head_of(model)

    def head(self, hidden: Tensor) -> Tensor:
        """Return fp32 logits, (B, V)."""
        return hidden.float() if self._head is None else self._head(hidden)

    def last(self, ids: Tensor, last: Tensor, **inputs: Any) -> Tensor:
        """Return hidden states, or logits without a plain head, of one token a row."""
        module = self._model if self._head is None else decoder_of(self._model)
        training = self._model.training
        self._model.eval()
        try:
            output = cast(Any, module)(input_ids=ids, **inputs)
        finally:
            self._model.train(training)
        states = output.logits if self._head is None else output.last_hidden_state
        return cast(Tensor, states[torch.arange(len(ids), device=ids.device), last])


class GenericDecoder:
    """Decodes any model made of key-value attention, sliding windows included.

    Args:
        model: a model for which `has_row_cache` holds.
    """

    mode = torch.no_grad

    def __init__(self, model: nn.Module) -> None:
        self._decoder = decoder_of(model)
        self._runner = _Runner(model)
        self.head = self._runner.head
        self._buffers = KVBuffers()
        self.reserve, self.move = self._buffers.reserve, self._buffers.move
        names = inspect.signature(self._decoder.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._takes_positions = "position_ids" in names

    @property
    def token_bytes(self) -> int:
        """Bytes one token of one slot takes in the buffers."""
        return self._buffers.token_bytes

    def refresh(self) -> None:
        """Do nothing: the modules are read anew at every step."""

    def forward(self, step: Step) -> Tensor:
        """Run the tokens of a step; return the state of each row's last one, (B, d)."""
        inputs: dict[str, Any] = {
            self._cache_name: _RowCache(self._buffers, step),
            "attention_mask": self._masks(step),
            "use_cache": True,
        }
        if self._takes_positions:
            inputs["position_ids"] = step.positions
        return self._runner.last(step.ids, step.last, **inputs)

    def _masks(self, step: Step) -> Tensor | dict[str, Tensor]:
        decoder = cast(Any, self._decoder)
        window = getattr(decoder.config, "sliding_window", None)
        kinds = getattr(decoder.config, "layer_types", None)
        kinds = sorted(set(kinds)) if kinds else [_KINDS[window is not None]]
        masks = {
            kind: step.bias(decoder.dtype, window if kind == "sliding_attention" else None)[:, None]
            for kind in kinds
        }
        return masks[kinds[0]] if len(kinds) == 1 else masks


class RecomputeDecoder:
    """Decodes any causal model by running whole contexts anew: right for all, fast for none."""

    mode = torch.no_grad

    def __init__(self, model: nn.Module) -> None:
        self._runner = _Runner(model)
        self.head = self._runner.head
        device = cast(Any, model).get_input_embeddings().weight.device
        self._ids = torch.zeros(0, 0, dtype=torch.int64, device=device)

    @property
    def token_bytes(self) -> int:
        """Bytes one token of one slot takes: its id."""
        return self._ids.element_size()

    def reserve(self, slots: int, capacity: int) -> None:
        """Resize the token store, keeping what fits."""
        new = self._ids.new_zeros(slots, capacity)
        rows, columns = (min(a, b) for a, b in zip(new.shape, self._ids.shape, strict=True))
        new[:rows, :columns] = self._ids[:rows, :columns]
        self._ids = new

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy the first `length` columns of source slots onto target slots, all at once."""
        self._ids[targets, :length] = self._ids[sources, :length]

    def refresh(self) -> None:
        """Do nothing: the modules are read anew at every step."""

    def forward(self, step: Step) -> Tensor:
        """Run the contexts up to the step's tokens; return the state of each last one, (B, d)."""
        self._ids[step.slots[:, None], step.columns] = step.ids
        rows = torch.arange(len(step.slots), device=step.slots.device)
        last = step.positions[rows, step.last].clamp(max=step.span - 1)
        return self._runner.last(self._ids[step.slots, : step.span], last, use_cache=False)
