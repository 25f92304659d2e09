"""Axis 8: KL, entropy and value terms, and the controllers that adapt their coefficients."""

from dataclasses import replace
from functools import singledispatch

import torch
from torch import Tensor

from turngym.errors import ConfigError
from turngym.rl.algorithm import BoundAlgorithm
from turngym.rl.axes import KLEstimator
from turngym.rl.state import AlgorithmState
from turngym.rl.surrogates import Tokens
from turngym.rl.terms import (
    KL,
    BehaviorCorrection,
    Entropy,
    KLCov,
    PositiveNLL,
    Regularizer,
    ValueLoss,
)

__all__ = [
    "adapt",
    "has_penalty",
    "kl_penalty",
    "next_entropy_coef",
    "next_kl_coef",
    "penalty",
    "value_loss",
]

LOG_RATIO_LIMIT = 20.0
_WITH_A_PLACE = (KL, Entropy, PositiveNLL, ValueLoss, KLCov, BehaviorCorrection)


@singledispatch
def penalty(term: Regularizer, tokens: Tokens) -> Tensor | None:
    """Loss that a regularizer adds to each token before aggregation, differentiable, (n,).

    Register the function of a new regularizer for its type. None for those of the presets, which
    read references, entropies or critics and have their places in the objective.
    """
    if isinstance(term, _WITH_A_PLACE):
        return None
    raise ConfigError(f"no penalty is registered for {type(term).__name__}; use penalty.register")


def has_penalty(term: Regularizer) -> bool:
    """A function is registered for the regularizer."""
    return penalty.dispatch(type(term)) is not penalty.dispatch(Regularizer)


def kl_penalty(log_ratio: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate of KL(policy || reference), differentiable.

    Args:
        log_ratio: logp_new - logp_ref of the sampled tokens, (N,).
        estimator: see `turngym.rl.terms.KL`; k1, k2, k3 are Schulman's names.
    """
    d = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    match estimator:
        case "k1":
            return d
        case "k2":
            return d.square() / 2
        case "k3":
            return torch.exp(-d) + d - 1
        case "k3_plus":
            k2 = d.square() / 2
            return k2 + (torch.exp(-d) + d - 1 - k2).detach()
        case "abs":
            return d.abs()


def value_loss(values: Tensor, old: Tensor, targets: Tensor, *, clip: float | None) -> Tensor:
    """Per-token 0.5 * max((V - ret)^2, (clipped V - ret)^2), (N,).

    Args:
        values: critic's values now, differentiable.
        old: critic's values when the targets were made.
        targets: returns.
        clip: how far the value may move; None = anywhere.
    """
    error = (values - targets).square()
    if clip is not None:
        clipped = old + (values - old).clamp(-clip, clip)
        error = torch.maximum(error, (clipped - targets).square())
    return 0.5 * error


def next_kl_coef(coef: float, kl: float, *, target: float, horizon: int, count: int) -> float:
    """Steer a KL coefficient: coef * (1 + clip(kl/target - 1, -.2, .2) * count/horizon)."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * count / horizon)


def next_entropy_coef(coef: float, entropy: float, *, target: float, step: float) -> float:
    """Raise the coefficient below the target entropy, lower it above, never below 0."""
    return max(0.0, coef + (step if entropy < target else -step))


def adapt(
    bound: BoundAlgorithm,
    state: AlgorithmState,
    *,
    kl: float | None,
    entropy: float | None,
    count: int,
) -> AlgorithmState:
    """Adapt the coefficients after an update.

    Args:
        bound: the algorithm.
        state: before the update.
        kl: mean KL to the reference over the batch's tokens, the metric `train/kl`; None = not
            measured.
        entropy: mean entropy over the batch's tokens, the metric `train/entropy`; None = not
            measured.
        count: trajectories of the batch.
    """
    term, bonus = bound.algorithm.term(KL), bound.algorithm.term(Entropy)
    if term is not None and term.target is not None and kl is not None:
        coef = term.coef if state.kl_coef is None else state.kl_coef
        coef = next_kl_coef(coef, kl, target=term.target, horizon=term.horizon, count=count)
        state = replace(state, kl_coef=coef)
    if bonus is not None and bonus.target is not None and entropy is not None:
        coef = bonus.coef if state.entropy_coef is None else state.entropy_coef
        coef = next_entropy_coef(coef, entropy, target=bonus.target, step=bonus.step)
        state = replace(state, entropy_coef=coef)
    return state
