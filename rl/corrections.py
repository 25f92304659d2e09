"""Behaviour corrections: the weight exp(logp_old - logp_rollout)."""

import torch
from torch import Tensor

from turngym.errors import TrajectoryError
from turngym.rl.batch import Batch
from turngym.rl.segments import segment_mean, segment_sum
from turngym.rl.terms import BehaviorCorrection

__all__ = ["behavior_weight"]

LOG_RATIO_LIMIT = 20.0


def behavior_weight(spec: BehaviorCorrection, batch: Batch, mask: Tensor) -> Tensor:
    """Detached weight of each token, 1 outside the mask and on demonstrations, (N,) float64.

    Args:
        spec: level, mode and bounds.
        batch: needs `logp_old`.
        mask: tokens that count, (N,) bool.

    Raises:
        TrajectoryError: `logp_old` is missing.
    """
    log_ratio, sampled = _log_mismatch(batch, mask)
    if spec.level == "sequence":
        log_ratio = segment_sum(log_ratio, batch.row, batch.num_rows)[batch.row]
    elif spec.level == "geometric":
        log_ratio = segment_mean(log_ratio, batch.row, batch.num_rows, sampled)[batch.row]
    weight = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if spec.mode == "truncate":
        weight = weight.clamp(max=spec.high)
    else:
        weight = torch.where((weight >= spec.low) & (weight <= spec.high), weight, 0.0)
    return torch.where(sampled, weight, 1.0)


def _log_mismatch(batch: Batch, mask: Tensor) -> tuple[Tensor, Tensor]:
    if batch.logp_old is None:
        raise TrajectoryError("the correction reads logp_old; add it to the batch")
    sampled = mask & ~batch.demo[batch.row]
    difference = (batch.logp_old - batch.logp_rollout).double()
    return torch.where(sampled, difference, 0.0), sampled
