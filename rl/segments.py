"""Sums, means and scans over ragged segments: rows, turns and groups of flat tokens."""

import torch
from torch import Tensor

TINY = 1e-12
"""Differences at or below it are rounding: a spread this small is no spread."""


def segment_sum(values: Tensor, ids: Tensor, num: int) -> Tensor:
    """Sum `values` (..., N) by `ids` (N,) into (..., num)."""
    out = values.new_zeros((*values.shape[:-1], num))
    return out.index_add(-1, ids, values)


def segment_mean(values: Tensor, ids: Tensor, num: int, mask: Tensor) -> Tensor:
    """Mean of `values` (..., N) over the `mask`ed entries of each segment; 0 for empty ones."""
    kept = mask.to(values.dtype)
    count = segment_sum(kept, ids, num)
    return segment_sum(values * kept, ids, num) / count.clamp(min=1)


def lengths_of(ids: Tensor, num: int, mask: Tensor | None = None) -> Tensor:
    """Number of (masked) entries of each segment, (num,), int64."""
    return torch.bincount(ids if mask is None else ids[mask], minlength=num)


class Rows:
    """Layout of flat tokens as a dense (B, T) array, rows left-aligned, in token order.

    Args:
        row: row of each token, not decreasing, (N,).
        num: number of rows, B.
    """

    def __init__(self, row: Tensor, num: int) -> None:
        self.row = row
        self.lengths = lengths_of(row, num)
        starts = self.lengths.cumsum(0) - self.lengths
        self.position = torch.arange(len(row), device=row.device) - starts[row]
        self.shape = (num, int(self.lengths.max()) if num else 0)
        self.last = starts + self.lengths - 1
        """Flat index of the last token of each row; meaningless for rows without tokens."""

    def dense(self, values: Tensor) -> Tensor:
        """Lay out (N,) as (B, T), zeros after the end of a row."""
        out = values.new_zeros(self.shape)
        return out.index_put((self.row, self.position), values)

    def flat(self, values: Tensor) -> Tensor:
        """Gather (B, T) back to (N,)."""
        return values[self.row, self.position]


def discounted_to_go(values: Tensor, factor: Tensor | float) -> Tensor:
    """Reverse discounted sums along the last axis: y[t] = x[t] + factor * y[t+1].

    Doubling instead of a loop over T: log2(T) vector operations.

    Args:
        values: (..., T).
        factor: one number, or one per row broadcastable against `values`, (..., 1).
    """
    total, power, shift = values, factor, 1
    while shift < values.shape[-1]:
        total = total + power * torch.nn.functional.pad(total[..., shift:], (0, shift))
        power, shift = power * power, 2 * shift
    return total
