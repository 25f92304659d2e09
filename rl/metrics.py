"""Metrics that carry their reduction, so that parts of unequal size combine rightly."""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

__all__ = ["Metric", "largest", "mean_of", "merge", "part_of_sum"]


class Metric(NamedTuple):
    """One part of a metric: tensors, so that nothing waits for the device before `merge`."""

    reduction: Literal["sum", "mean", "max"]
    total: Tensor
    """Sum of the items, or the largest."""

    items: Tensor | None = None
    """Number of items of a mean."""

    def combine(self, other: "Metric") -> "Metric":
        """Join another part of the same metric."""
        if self.reduction != other.reduction:
            raise TypeError(f"a {self.reduction} does not combine with a {other.reduction}")
        if self.reduction == "max":
            return Metric("max", torch.maximum(self.total, other.total))
        items = None if self.items is None or other.items is None else self.items + other.items
        return Metric(self.reduction, self.total + other.total, items)

    def value(self) -> float:
        """The number; NaN for a mean over nothing."""
        return float(self.total if self.items is None else self.total / self.items)


def part_of_sum(total: Tensor) -> Metric:
    """Part of a sum, such as a loss."""
    return Metric("sum", total.detach())


def mean_of(values: Tensor, mask: Tensor) -> Metric:
    """Mean of the masked values."""
    kept = mask.to(values.dtype)
    return Metric("mean", (values.detach() * kept).sum(), kept.sum())


def largest(values: Tensor, mask: Tensor) -> Metric:
    """Largest masked value; minus infinity when there is none."""
    found = torch.where(mask, values.detach(), -torch.inf)
    return Metric("max", found.amax() if found.numel() else values.new_tensor(-torch.inf))


def merge(parts: Iterable[Mapping[str, Metric]], *, steps: int = 1) -> dict[str, float]:
    """Combine the metrics of all parts of some optimizer steps into numbers.

    Args:
        parts: metrics of the parts.
        steps: optimizer steps they belong to; sums become means over them.

    Raises:
        TypeError: one name with two reductions.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].combine(metric) if name in merged else metric
    return {
        name: metric.value() / (steps if metric.reduction == "sum" else 1)
        for name, metric in merged.items()
    }
