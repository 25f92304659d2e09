"""Behaviour corrections: the weight exp(logp_old - logp_rollout), and how far the engine is off."""

import torch
from torch import Tensor

from turngym.errors import TrajectoryError
from turngym.rl.batch import Batch
from turngym.rl.segments import segment_mean, segment_sum
from turngym.rl.terms import BehaviorCorrection

__all__ = ["behavior_weight", "mismatch", "staleness"]

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


def mismatch(batch: Batch) -> dict[str, float]:
    """Compare trainer and sampler on the weights that sampled, before the first update.

    Args:
        batch: needs `logp_old`.

    Returns:
        Quantiles of exp(logp_old - logp_rollout) and the k3 estimate of KL(rollout || old) over
        the sampled tokens; empty when there are none.
    """
    log_ratio, sampled = _log_mismatch(batch, batch.trainable)
    log_ratio = log_ratio[sampled].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if not len(log_ratio):
        return {}
    ordered = log_ratio.exp().sort().values
    names = {"min": 0.0, "p01": 0.01, "p50": 0.5, "p99": 0.99, "max": 1.0}
    found = {
        f"mismatch/ratio_{name}": float(ordered[round(q * (len(ordered) - 1))])
        for name, q in names.items()
    }
    return found | {"mismatch/kl": float((log_ratio.exp() - 1 - log_ratio).mean())}


def staleness(batch: Batch, version: int) -> dict[str, float]:
    """Mean and largest number of optimizer steps between sampling and now, demonstrations apart."""
    sampled = batch.version[batch.version >= 0]
    if not len(sampled):
        return {}
    behind = (version - sampled).double()
    return {"staleness/mean": float(behind.mean()), "staleness/max": float(behind.max())}
