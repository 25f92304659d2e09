"""How far the trainer is from the sampler before it has changed anything.

Two programs that run the same weights disagree a little, and weights that have moved on since the
tokens were drawn disagree more. Both show here before they show in the reward.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from turngym.rl.batch import Batch

__all__ = ["joined", "mismatch", "staleness"]


def mismatch(batch: Batch, index: Tensor, logp: Tensor, *, version: int = -1) -> dict[str, float]:
    """Compare log-probabilities taken before the first update with the sampler's.

    Args:
        batch: of N tokens; demonstrations are left out, no sampler drew them.
        index: flat indices of the tokens scored, (n,) int64.
        logp: of the trainer, (n,).
        version: of the trainer's weights; -1 = none that sampled.

    Returns:
        `train/mismatch_kl`, an estimate of KL(sampler || trainer) a token (k3: exp(d) - 1 - d),
        and quantiles of the ratio trainer / sampler; nothing when no sampled token was scored.
        `train/mismatch_kl_fresh` is the first over tokens that weights of this very version
        sampled, where the batch has others too: the engine's noise without the effect of age.
    """
    kept = batch.trainable[index] & ~batch.demo[batch.row[index]]
    d = (logp.cpu().double() - batch.logp_rollout[index].double())[kept].clamp(-20, 20)
    if not len(d):
        return {}
    kl = torch.expm1(d) - d
    fresh = batch.version[index][kept] == version
    mixed = bool(fresh.any()) and not bool(fresh.all())
    low, high = torch.quantile(_thin(d), torch.tensor([0.01, 0.99], dtype=d.dtype)).exp().tolist()
    return {
        "train/mismatch_kl": float(kl.mean()),
        **({"train/mismatch_kl_fresh": float(kl[fresh].mean())} if mixed else {}),
        "train/mismatch_ratio_p01": low,
        "train/mismatch_ratio_p99": high,
        "train/mismatch_ratio_max": float(d.abs().max().exp()),
    }


def _thin(values: Tensor, most: int = 1_000_000) -> Tensor:
    """Evenly take at most `most` values: `torch.quantile` refuses more than 16 million."""
    return values[:: 1 + (len(values) - 1) // most]


def staleness(batch: Batch, version: int) -> dict[str, float]:
    """Optimizer steps between the weights that sampled a token and those that train on it.

    Args:
        batch: with the version of every token; demonstrations have none.
        version: of the trainer before the update.
    """
    sampled = ~batch.demo[batch.row] & (batch.version >= 0)
    lag = (version - batch.version[sampled]).double()
    if not len(lag):
        return {}
    return {"train/staleness_mean": float(lag.mean()), "train/staleness_max": float(lag.max())}


def joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Put (index, logp) parts of several passes together."""
    if not parts:
        return torch.empty(0, dtype=torch.int64), torch.empty(0)
    indices, values = zip(*parts, strict=True)
    return torch.cat(indices), torch.cat(values)
