"""Decoding with a KV cache whose rows stand at different positions: buffers and their seam.

A decoder owns buffers with one line per *slot* and runs some of the slots a few tokens forward.
Three decoders share the seam: `decode_fast` (Llama-type models, as a function of their weights),
`decode_generic` (any model with key-value attention, through its own modules) and, for whatever
is neither, recomputation.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Decoder", "KVBuffers", "Step", "make_step"]


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """A few tokens of some slots: B rows of T tokens, the last ones of a row possibly filler."""

    slots: Tensor
    """Slot of each row, (B,)."""

    is_prefix: bool
    """The slots are 0..B-1, so that buffers can be read in place."""

    ids: Tensor
    """Token ids, (B, T)."""

    positions: Tensor
    """Position of each token in its context, (B, T)."""

    columns: Tensor
    """Column of the buffers each token is written to, (B, T); filler goes to the last one."""

    last: Tensor
    """Index of each row's last real token, (B,)."""

    span: int
    """Columns of the buffers to attend to; more than the largest position of a real token."""

    _lines: dict[int, Tensor] = field(default_factory=dict)

    def lines(self, heads: int, capacity: int) -> Tensor:
        """Return where (B, heads, T) vectors go in a buffer seen as a list of vectors."""
        if heads not in self._lines:
            head = torch.arange(heads, device=self.slots.device)
            line = (self.slots[:, None] * heads + head)[:, :, None] * capacity
            self._lines[heads] = (line + self.columns[:, None]).flatten()
        return self._lines[heads]

    def bias(self, dtype: torch.dtype, window: int | None = None) -> Tensor:
        """Return 0 where a token may attend to a column and a huge negative number elsewhere.

        Args:
            dtype: type of the attention scores.
            window: how many columns back a token sees, itself included; None = all.

        Returns:
            An additive mask, (B, T, span).
        """
        columns = torch.arange(self.span, device=self.ids.device)
        positions = self.positions[:, :, None]
        hidden = columns > positions
        if window is not None:
            hidden |= columns <= positions - window
        zero = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        return zero.masked_fill_(hidden, torch.finfo(dtype).min)


def make_step(
    slots: NDArray[np.int64],
    ids: NDArray[np.int64],
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    *,
    is_prefix: bool,
    span: int,
    capacity: int,
    max_context: int,
    device: torch.device,
) -> Step:
    """Lay out a step in which row b feeds `counts[b]` of its ids (B, T) from `starts[b]` on.

    A row with a count of 0 computes filler: it is cheaper to carry along than to cut out.
    """
    offsets = np.arange(ids.shape[1])
    positions = starts[:, None] + offsets
    columns = np.where(offsets < counts[:, None], positions, capacity - 1)
    positions = np.minimum(positions, min(capacity - 1, max_context) - 1)
    last = np.maximum(counts - 1, 0)

    def tensor(array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Step(
        slots=tensor(slots),
        is_prefix=is_prefix,
        ids=tensor(ids),
        positions=tensor(positions),
        columns=tensor(columns),
        last=tensor(last),
        span=span,
    )


class Decoder(Protocol):
    """Runs slots forward."""

    @property
    def mode(self) -> Callable[[], AbstractContextManager[Any]]:
        """Context for every call: `torch.no_grad` or, without foreign modules, inference mode."""
        ...

    @property
    def token_bytes(self) -> int:
        """Bytes one token of one slot takes in the buffers."""
        ...

    def reserve(self, slots: int, capacity: int) -> None:
        """Resize to so many slots of so many columns, keeping what fits."""
        ...

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy the first `length` columns of source slots onto target slots, all at once."""
        ...

    def forward(self, step: Step) -> Tensor:
        """Run the tokens; return what the head takes after each row's last real one, (B, d)."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Return fp32 logits, (B, V)."""
        ...

    def refresh(self) -> None:
        """Take up changed weights."""
        ...


class KVBuffers:
    """Keys and values of every layer, (slots, heads, capacity, head_dim), sized by `reserve`.

    The last column is never attended to: filler is written there.
    """

    def __init__(self) -> None:
        self.slots = 0
        self.capacity = 0
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    @property
    def token_bytes(self) -> int:
        """Bytes one token takes in all layers; 0 before anything was stored."""
        return sum(
            buffer.shape[1] * buffer.shape[3] * buffer.element_size()
            for buffer in (*self._keys.values(), *self._values.values())
        )

    def reserve(self, slots: int, capacity: int) -> None:
        """Resize to `slots` slots of `capacity` columns, keeping what fits."""
        if (slots, capacity) == (self.slots, self.capacity):
            return
        rows, columns = min(self.slots, slots), min(self.capacity, capacity) - 1
        for layers in (self._keys, self._values):
            for layer, old in layers.items():
                new = old.new_zeros(slots, old.shape[1], capacity, old.shape[3])
                new[:rows, :, :columns] = old[:rows, :, :columns]
                layers[layer] = new
        self.slots, self.capacity = slots, capacity

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy the first `length` columns of source slots onto target slots, all at once."""
        for buffer in (*self._keys.values(), *self._values.values()):
            buffer[targets, :, :length] = buffer[sources, :, :length]

    def store(self, layer: int, step: Step, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write a step's keys and values, (B, heads, T, d), and return all there is to attend to.

        Returns:
            Keys and values, (B, heads, span, d), of the step's rows; views where they are a prefix.
        """
        found = []
        for layers, new in ((self._keys, keys), (self._values, values)):
            heads, width = new.shape[1], new.shape[3]
            buffer = layers.get(layer)
            if buffer is None:
                buffer = layers[layer] = new.new_zeros(self.slots, heads, self.capacity, width)
            lines = step.lines(heads, self.capacity)
            buffer.view(-1, width).index_copy_(0, lines, new.reshape(-1, width))
            rows = buffer[: len(step.slots)] if step.is_prefix else buffer[step.slots]
            found.append(rows[:, :, : step.span])
        return found[0], found[1]
