"""Axis 7: one weight per token over the optimizer batch, the only normaliser of the loss.

Weights are made before the batch is split, so that micro-batches, gradient accumulation and data
parallelism are exact: each part sums its own `weight * loss`.
"""

import torch
from torch import Tensor

from turngym.errors import ConfigError
from turngym.rl.axes import Aggregate
from turngym.rl.batch import Batch
from turngym.rl.segments import lengths_of

__all__ = ["aggregate_weights"]


def aggregate_weights(
    spec: Aggregate, batch: Batch, mask: Tensor, *, rows: Tensor | None = None
) -> Tensor:
    """Weight of each token, 0 outside the mask, (N,) float64.

    Args:
        spec: how the loss is averaged.
        batch: the generation batch.
        mask: tokens that count, all of one optimizer batch, (N,) bool.
        rows: rows of that optimizer batch, (B,) bool; None = all.
    """
    kept = mask.double()
    lengths = lengths_of(batch.row, batch.num_rows, mask).double()
    members = lengths > 0
    if spec.count == "all":
        members = torch.ones_like(members) if rows is None else rows
    num_rows = members.sum().clamp(min=1)
    match spec.mode:
        case "token_sum":
            return kept
        case "token_mean":
            return kept / kept.sum().clamp(min=1)
        case "seq_mean_token_mean":
            return kept / (num_rows * lengths.clamp(min=1)[batch.row])
        case "seq_mean_token_sum":
            return kept / num_rows
        case "seq_mean_token_sum_norm":
            if spec.length is None:
                raise ConfigError("aggregate has no constant L; bind the algorithm or set length")
            return kept / (num_rows * spec.length)
        case "prompt_mean":
            per_group = torch.zeros(batch.num_groups, dtype=torch.float64)
            per_group = per_group.index_add(0, batch.group, lengths)
            num_groups = (per_group > 0).sum().clamp(min=1)
            return kept / (num_groups * per_group.clamp(min=1)[batch.group][batch.row])
