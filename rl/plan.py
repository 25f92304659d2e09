"""From a generation batch to one weight, one advantage and one factor per token.

`assign` credits the whole generation batch; `plan` weighs it, each optimizer batch by its own
totals. Nothing here sees a model: `objective` combines a plan with log-probabilities.
"""

import logging
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

import turngym.rl.advantages
import turngym.rl.gae
import turngym.rl.passk
import turngym.rl.preference
import turngym.rl.trees
import turngym.rl.turn_credit  # noqa: F401 - the estimators register themselves
from turngym.errors import TrajectoryError
from turngym.rl.aggregate import aggregate_weights
from turngym.rl.algorithm import BoundAlgorithm
from turngym.rl.batch import Batch
from turngym.rl.corrections import behavior_weight
from turngym.rl.credit import Case, Estimate, estimate
from turngym.rl.filters import correct_rows, keep_members, seen_difficulties
from turngym.rl.masks import combine_factors, covariance, row_filter, top_tokens
from turngym.rl.regularizers import has_penalty
from turngym.rl.returns import returns_of
from turngym.rl.segments import lengths_of, segment_sum
from turngym.rl.state import AlgorithmState
from turngym.rl.terms import KL, BehaviorCorrection, Entropy, KLCov, PositiveNLL

__all__ = ["Credit", "Plan", "assign", "plan"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Credit:
    """What every token of a generation batch earned."""

    advantage: Tensor
    """(N,) float64, 0 on tokens that earned nothing."""

    live: Tensor
    """Rows with a reward, kept by selection, (B,) bool."""

    mask: Tensor
    """Tokens in the loss and its denominator, (N,) bool."""

    value_targets: Tensor | None
    pairs: Tensor | None
    state: AlgorithmState
    """For the next batch."""

    def variety(self, batch: Batch) -> dict[str, float]:
        """How much the groups of the batch have to teach; nothing where pairs are compared.

        Returns:
            `train/idle_groups_frac`, groups in which every advantage is 0, and
            `train/distinct_advantages`, different advantages in a group, rounded to 1e-6.
        """
        if self.pairs is not None or not batch.num_groups:
            return {}
        group = batch.group[batch.row]
        moved = lengths_of(group, batch.num_groups, self.advantage != 0) > 0
        values = (self.advantage[self.mask] * 1e6).round().long()
        distinct = torch.unique((group[self.mask] << 40) + values)
        return {
            "train/idle_groups_frac": 1 - float(moved.double().mean()),
            "train/distinct_advantages": len(distinct) / batch.num_groups,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Everything a loss needs except the model; token columns in the batch's dtype."""

    advantage: Tensor
    """(N,)."""

    weight: Tensor
    """Aggregation weight, 0 outside the mask, (N,)."""

    mask: Tensor
    """Tokens in the loss and its denominator, (N,) bool."""

    factor: Tensor
    """Token rules: selection and role weights, (N,)."""

    correction: Tensor
    """Behaviour correction, (N,)."""

    has_penalties: bool = False
    """A regularizer with a function of its own may move every token in the loss."""

    kl_coef: float | None = None
    entropy_coef: float | None = None
    entropy_weight: Tensor | None = None
    """Weight of each token in the entropy bonus, (N,)."""

    nll_weight: Tensor | None = None
    """Weight of each token in the imitation of correct rows, coefficient included, (N,)."""

    drift_weight: Tensor | None = None
    """KL-Cov: weight of |logp_new - anchor|, coefficient and aggregation included, (N,)."""

    value_targets: Tensor | None = None
    pairs: Tensor | None = None
    """Rows (chosen, rejected), (M, 2) int64."""

    pair_weight: Tensor | None = None
    """(M,)."""

    live: Tensor
    """Rows with a reward, kept by selection, (B,) bool."""

    state: AlgorithmState
    """For the next batch; a checkpoint holds it."""

    @cached_property
    def policy_weight(self) -> Tensor:
        """Product of weight, factor and correction, (N,)."""
        return self.weight * self.factor * self.correction

    def moving_rows(self, batch: Batch) -> Tensor:
        """Rows whose tokens can move the policy: the others may skip the forward pass, (B,) bool.

        A row matters when an advantage, or any term beside the surrogate, reaches one of its
        tokens.
        """
        moves = self.policy_weight * self.advantage != 0
        if self.kl_coef is not None or self.has_penalties:
            moves = moves | (self.weight != 0)
        for extra in (self.entropy_weight, self.nll_weight, self.drift_weight):
            if extra is not None:
                moves = moves | (extra != 0)
        rows = lengths_of(batch.row, batch.num_rows, moves) > 0
        if self.pairs is not None:
            rows[self.pairs.flatten()] = True
        return rows


def assign(bound: BoundAlgorithm, batch: Batch, state: AlgorithmState | None = None) -> Credit:
    """Credit every token of a generation batch, before it is split.

    Args:
        bound: the algorithm.
        batch: the whole generation batch: group and batch statistics are taken over it.
        state: from the previous batch's credit or plan.
    """
    state = state or AlgorithmState()
    returns = returns_of(bound, batch, kl_coef=state.kl_coef)
    total = returns.filled(batch.group, batch.num_groups).sum(-1)
    keep, in_denominator = keep_members(bound, batch, total, returns.live, state)
    state = seen_difficulties(bound, batch, total, returns.live, state)
    returns = replace(returns, live=returns.live & keep)
    if bound.algorithm.advantage.compares_groups:
        _warn_of_lone_rows(batch, returns.live)
    case = Case(bound, batch, returns, state)
    found: Estimate = estimate(bound.algorithm.advantage, case)
    mask = batch.trainable & in_denominator[batch.row]
    for rule in bound.algorithm.tokens:
        kept = row_filter(rule, batch)
        mask = mask if kept is None else mask & kept
    return Credit(
        advantage=torch.where(mask & returns.live[batch.row], found.advantage, 0.0),
        live=returns.live,
        mask=mask,
        value_targets=found.value_targets,
        pairs=found.pairs,
        state=state if found.state is None else found.state,
    )


def _warn_of_lone_rows(batch: Batch, live: Tensor) -> None:
    lone = int((lengths_of(batch.group, batch.num_groups, live) == 1).sum())
    if lone:
        logger.warning(
            "%d of %d groups have only one rewarded trajectory, whose advantage is 0: nothing can "
            "be compared with it",
            lone,
            batch.num_groups,
        )


def plan(
    bound: BoundAlgorithm,
    batch: Batch,
    *,
    state: AlgorithmState | None = None,
    step: Tensor | None = None,
    credit: Credit | None = None,
) -> Plan:
    """Weigh a generation batch for its optimizer steps.

    Args:
        bound: the algorithm.
        batch: the generation batch, with the columns `bound` needs.
        state: from the previous batch.
        step: optimizer step of each row, -1 for rows left out, (B,) int64; None = one step. Every
            step is normalised by its own totals.
        credit: result of `assign`, when it was called before; `state` is then its own.

    Raises:
        TrajectoryError: a column that the algorithm reads is missing.
    """
    credit = assign(bound, batch, state) if credit is None else credit
    step = torch.zeros_like(batch.group) if step is None else step
    if bound.needs_old_logp and batch.logp_old is None:
        raise TrajectoryError("the algorithm reads logp_old; add it to the batch")
    columns = _Columns(batch.num_tokens)
    for number in torch.unique(step[step >= 0]).tolist():
        _weigh_step(bound, batch, credit, step == number, columns)
    state, dtype = credit.state, batch.dtype
    kl, bonus = bound.algorithm.term(KL), bound.algorithm.term(Entropy)
    in_loss = kl is not None and kl.where == "loss"
    imitates = bound.algorithm.term(PositiveNLL) is not None
    penalizes = bound.algorithm.term(KLCov) is not None
    return Plan(
        advantage=credit.advantage.to(dtype),
        weight=columns.weight.to(dtype),
        mask=credit.mask & (step >= 0)[batch.row],
        factor=columns.factor.to(dtype),
        correction=_correction(bound, batch, credit.mask).to(dtype),
        has_penalties=any(map(has_penalty, bound.algorithm.regularize)),
        kl_coef=_coef(kl.coef, state.kl_coef) if kl is not None and in_loss else None,
        entropy_coef=_coef(bonus.coef, state.entropy_coef) if bonus is not None else None,
        entropy_weight=columns.entropy.to(dtype) if bonus is not None else None,
        nll_weight=columns.nll.to(dtype) if imitates else None,
        drift_weight=columns.drift.to(dtype) if penalizes else None,
        value_targets=None if credit.value_targets is None else credit.value_targets.to(dtype),
        pairs=credit.pairs,
        pair_weight=None if credit.pairs is None else _pair_weights(credit.pairs, step).to(dtype),
        live=credit.live,
        state=replace(state, step=state.step + 1),
    )


def _correction(bound: BoundAlgorithm, batch: Batch, mask: Tensor) -> Tensor:
    spec = bound.algorithm.term(BehaviorCorrection)
    if spec is None:
        return torch.ones(batch.num_tokens, dtype=torch.float64)
    return behavior_weight(spec, batch, mask)


class _Columns:
    """Token columns under construction, one optimizer step after the other."""

    def __init__(self, num_tokens: int) -> None:
        self.weight, self.entropy, self.nll, self.drift = torch.zeros(
            4, num_tokens, dtype=torch.float64
        )
        self.factor = torch.ones(num_tokens, dtype=torch.float64)


def _weigh_step(
    bound: BoundAlgorithm, batch: Batch, credit: Credit, rows: Tensor, columns: _Columns
) -> None:
    mask = credit.mask & rows[batch.row]
    weight = aggregate_weights(bound.algorithm.aggregate, batch, mask, rows=rows)
    factor = combine_factors(bound, batch, mask, credit.advantage, credit.state.step)
    columns.weight += weight
    columns.factor = torch.where(mask, factor, columns.factor)
    trained = mask & (factor != 0)
    columns.entropy += trained.double() / trained.sum().clamp(min=1)
    imitate = bound.algorithm.term(PositiveNLL)
    if imitate is not None:
        correct = mask & correct_rows(bound, batch)[batch.row]
        columns.nll += imitate.coef * correct.double() / correct.sum().clamp(min=1)
    drift = bound.algorithm.term(KLCov)
    if drift is not None:
        if batch.logp_current is None:
            raise TrajectoryError("KLCov reads logp_current; make the plan after a pre-pass")
        cov = covariance(credit.advantage, batch.logp_current, mask)
        columns.drift += torch.where(top_tokens(cov, mask, drift.frac), drift.coef * weight, 0.0)


def _coef(default: float, adapted: float | None) -> float:
    return default if adapted is None else adapted


def _pair_weights(pairs: Tensor, step: Tensor) -> Tensor:
    """1 / pairs of the optimizer step; a pair must not be split between steps."""
    chosen, rejected = step[pairs[:, 0]], step[pairs[:, 1]]
    if bool((chosen != rejected).any()):
        raise TrajectoryError("an optimizer step must hold whole groups: it would split a pair")
    if not len(pairs):
        return torch.zeros(0, dtype=torch.float64)
    number = chosen.clamp(min=0)
    count = segment_sum(torch.ones(len(pairs), dtype=torch.float64), number, int(number.max()) + 1)
    return torch.where(chosen >= 0, 1 / count[number], 0.0)
