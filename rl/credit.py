"""Axis 3: from returns to an advantage for every token. The estimators register here."""

from dataclasses import dataclass
from functools import singledispatch

import torch
from torch import Tensor

from turngym.errors import ConfigError
from turngym.rl.algorithm import BoundAlgorithm
from turngym.rl.batch import Batch
from turngym.rl.estimators import Estimator
from turngym.rl.returns import Returns
from turngym.rl.segments import TINY
from turngym.rl.state import AlgorithmState

__all__ = ["Case", "Estimate", "estimate", "paint", "whiten_tokens"]

TOKEN_WHITEN_EPS = 1e-8


@dataclass(frozen=True)
class Case:
    """Everything an estimator may look at."""

    bound: BoundAlgorithm
    batch: Batch
    returns: Returns
    state: AlgorithmState


@dataclass(frozen=True)
class Estimate:
    """What an estimator found."""

    advantage: Tensor
    """(N,) float64."""

    value_targets: Tensor | None = None
    """Returns the critic regresses on, (N,) float64."""

    pairs: Tensor | None = None
    """Rows (chosen, rejected) of a preference loss, (M, 2) int64."""

    state: AlgorithmState | None = None
    """What to remember; None = what was remembered before."""


@singledispatch
def estimate(estimator: Estimator, case: Case) -> Estimate:
    """Compute the advantages of a batch; register the function of a new estimator for its type."""
    raise ConfigError(
        f"no estimator is registered for {type(estimator).__name__}; use estimate.register"
    )


def paint(values: Tensor, batch: Batch) -> Tensor:
    """Give every token the value of its row (B, 1) or of its turn (B, K); returns (N,)."""
    if values.shape[-1] == 1:
        return values[batch.row, 0]
    return values[batch.row, batch.turn]


def whiten_tokens(values: Tensor, mask: Tensor, *, ddof: int = 1) -> Tensor:
    """Bring the masked tokens to mean 0 and variance 1 over the batch; others become 0.

    Args:
        values: (N,).
        mask: tokens that take part, (N,) bool.
        ddof: 1 = unbiased variance (verl), 0 = population (OpenRLHF).
    """
    kept = values[mask]
    if len(kept) <= ddof:
        return torch.zeros_like(values)
    mean, variance = kept.mean(), kept.var(correction=ddof)
    if float(variance.sqrt()) <= TINY:
        return torch.zeros_like(values)
    return torch.where(mask, (values - mean) * torch.rsqrt(variance + TOKEN_WHITEN_EPS), 0.0)
