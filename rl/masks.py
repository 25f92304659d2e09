"""Axis 6: which tokens train and with what factor.

Row filters (`row_filter`) change the denominator of the loss, token rules (`token_factor`) do not.
"""

from functools import singledispatch

import torch
from torch import Tensor

from turngym.errors import TrajectoryError
from turngym.rl.algorithm import BoundAlgorithm
from turngym.rl.batch import Batch
from turngym.rl.terms import (
    ClipCov,
    DropTruncated,
    HighEntropy,
    OffPolicySequenceMask,
    OnlySpan,
    RoleWeight,
    TokenRule,
)
from turngym.rl.trust_region import Clip
from turngym.types import TokenRole

__all__ = ["covariance", "row_filter", "token_factor", "top_tokens"]


@singledispatch
def row_filter(rule: TokenRule, batch: Batch) -> Tensor | None:
    """Tokens that stay in the loss and its denominator, (N,) bool; None = all."""
    return None


@row_filter.register
def _(rule: DropTruncated, batch: Batch) -> Tensor | None:
    return ~batch.truncated[batch.row]


@row_filter.register
def _(rule: OnlySpan, batch: Batch) -> Tensor | None:
    return batch.spans.get(rule.span, torch.zeros_like(batch.trainable))


@singledispatch
def token_factor(
    rule: TokenRule, bound: BoundAlgorithm, batch: Batch, mask: Tensor, advantage: Tensor, seed: int
) -> Tensor | None:
    """Factor of each token's surrogate over one optimizer batch, (N,); None = 1.

    Args:
        rule: dispatches.
        bound: the algorithm.
        batch: with the columns of the pre-pass that the rule needs.
        mask: tokens of the optimizer batch that count, (N,) bool.
        advantage: (N,).
        seed: number of the plan, for whatever is drawn.
    """
    return None


@token_factor.register
def _(
    rule: RoleWeight,
    bound: BoundAlgorithm,
    batch: Batch,
    mask: Tensor,
    advantage: Tensor,
    seed: int,
) -> Tensor | None:
    action = batch.role == TokenRole.ACTION
    weights = torch.where(action, _real(rule.action), _real(rule.reasoning))
    if rule.per == "token":
        return weights
    total = mask.sum()
    actions = (mask & action).sum()
    share = torch.where(action, actions, total - actions)
    return weights * total / share.clamp(min=1)


@token_factor.register
def _(
    rule: HighEntropy,
    bound: BoundAlgorithm,
    batch: Batch,
    mask: Tensor,
    advantage: Tensor,
    seed: int,
) -> Tensor | None:
    entropy = _required(batch.entropy, "entropy", rule)
    if not bool(mask.any()):
        return None
    return (entropy.double() >= quantile(entropy[mask].double(), 1 - rule.frac)).double()


@token_factor.register
def _(
    rule: ClipCov,
    bound: BoundAlgorithm,
    batch: Batch,
    mask: Tensor,
    advantage: Tensor,
    seed: int,
) -> Tensor | None:
    logp = _required(batch.logp_current, "logp_current", rule)
    cov = covariance(advantage, logp, mask)
    candidates = mask & (cov > rule.low) & (cov < rule.high)
    region = bound.algorithm.trust_region
    if isinstance(region, Clip) and batch.logp_old is not None:
        ratio = torch.where(mask, logp - batch.logp_old, 0.0).double().clamp(-20, 20).exp()
        above = (advantage > 0) & (ratio > 1 + region.high)
        below = (advantage < 0) & (ratio < 1 - region.low)
        candidates = candidates & ~(above | below)
    dropped = candidates.nonzero().squeeze(-1)
    if rule.frac is not None:
        count = min(len(dropped), max(1, int(rule.frac * int(mask.sum()))))
        generator = torch.Generator().manual_seed((rule.seed << 32) + seed)
        dropped = dropped[torch.randperm(len(dropped), generator=generator)[:count]]
    return torch.ones(len(mask), dtype=torch.float64).index_fill(0, dropped, 0.0)


@token_factor.register
def _(
    rule: OffPolicySequenceMask,
    bound: BoundAlgorithm,
    batch: Batch,
    mask: Tensor,
    advantage: Tensor,
    seed: int,
) -> Tensor | None:
    # It looks at the policy of the very update, so that the objective applies it.
    return None


def _real(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def covariance(advantage: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
    """(A - mean A)(logp - mean logp) over the masked tokens, 0 elsewhere, (N,) float64."""
    if not bool(mask.any()):
        return torch.zeros(len(mask), dtype=torch.float64)
    a, p = advantage.double(), torch.where(mask, logp, 0.0).double()
    return torch.where(mask, (a - a[mask].mean()) * (p - p[mask].mean()), 0.0)


def top_tokens(values: Tensor, mask: Tensor, frac: float) -> Tensor:
    """The share `frac` of the masked tokens with the largest values, at least one, (N,) bool."""
    total = int(mask.sum())
    chosen = torch.zeros_like(mask)
    if total:
        count = max(1, int(frac * total))
        chosen[torch.where(mask, values, -torch.inf).topk(count).indices] = True
    return chosen


def quantile(values: Tensor, q: float) -> Tensor:
    """Linearly interpolated quantile of (n,), by selection instead of a sort."""
    place = round(q * (len(values) - 1), 9)
    low = int(place)
    below = values.kthvalue(low + 1).values
    if low == place:
        return below
    return below + (place - low) * (values.kthvalue(low + 2).values - below)


def _required(column: Tensor | None, name: str, rule: TokenRule) -> Tensor:
    if column is None:
        raise TrajectoryError(
            f"{type(rule).__name__} reads the column {name!r} of the current policy; make the "
            "plan after a pre-pass (BoundAlgorithm.needs_prepass)"
        )
    return column


def combine_factors(
    bound: BoundAlgorithm, batch: Batch, mask: Tensor, advantage: Tensor, seed: int
) -> Tensor:
    """Product of all token factors over one optimizer batch, (N,) float64."""
    factor = torch.ones(batch.num_tokens, dtype=torch.float64)
    for rule in bound.algorithm.tokens:
        found = token_factor(rule, bound, batch, mask, advantage, seed)
        if found is not None:
            factor = factor * found
    return factor
