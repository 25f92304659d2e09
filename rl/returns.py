"""From named reward components to returns: shaping, missing values, reward-to-go over turns."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from turngym.errors import ConfigError, TrajectoryError
from turngym.rl.algorithm import BoundAlgorithm
from turngym.rl.axes import (
    Conditioned,
    Gate,
    MajorityVote,
    NegativeEntropy,
    SelfCertainty,
    Shaping,
    SoftOverlong,
)
from turngym.rl.batch import Batch
from turngym.rl.labels import majority_rewards
from turngym.rl.segments import discounted_to_go, lengths_of, segment_mean, segment_sum
from turngym.rl.terms import KL

__all__ = ["Components", "Returns", "returns_of", "shape", "soft_overlong"]


@dataclass(frozen=True)
class Components:
    """Reward components before they are combined."""

    outcome: dict[str, Tensor]
    """(B,) by name, NaN where missing."""

    turn: dict[str, Tensor]
    """(B, K) by name, NaN where missing."""

    weights: dict[str, float]

    def add(self, name: str, values: Tensor, weight: float, *, alone: bool = False) -> "Components":
        """Return the components with one more outcome, or with it `alone`.

        A row in which every other component abstained stays without a reward.
        """
        if alone or not self.weights:
            return Components({name: values}, {}, {name: weight})
        if name in self.weights:
            raise ConfigError(f"the environment already has a reward called {name!r}; rename it")
        known = [column.unsqueeze(-1) for column in self.outcome.values()] + [*self.turn.values()]
        scored = torch.cat([~column.isnan() for column in known], -1).any(-1)
        values = values.masked_fill(~scored, float("nan"))
        return replace(
            self,
            outcome=self.outcome | {name: values},
            weights=self.weights | {name: weight},
        )


@dataclass(frozen=True)
class Returns:
    """Components on a common shape."""

    weights: Tensor
    """(C,)."""

    steps: Tensor
    """Reward of each turn, outcomes on the last one, 0 where missing, (C, B, K)."""

    valid: Tensor
    """The component did not abstain in the row, (C, B) bool."""

    reached: Tensor
    """The row has that turn; rows without any have turn 0, (B, K) bool."""

    live: Tensor
    """The row takes part in the statistics, (B,) bool."""

    kl: Tensor | None = None
    """KL penalty of each token, to be added to its reward, (N,)."""

    def to_go(self, gamma: float) -> Tensor:
        """Discounted sum of the rewards from each turn on, (C, B, K)."""
        return discounted_to_go(self.steps, gamma)

    def filled(self, group: Tensor, num_groups: int) -> Tensor:
        """Weighted reward of each turn, (B, K).

        An abstaining component is worth its mean in the group, paid on the last turn: it neither
        rewards nor punishes the row.
        """
        present = self.valid & self.live
        mean = segment_mean(self.steps.sum(-1), group, num_groups, present)
        last = self.reached.sum(-1).clamp(min=1) - 1
        missing = torch.where(present, 0.0, mean[:, group])
        steps = self.steps.scatter_add(
            -1, last.expand(len(self.weights), -1).unsqueeze(-1), missing.unsqueeze(-1)
        )
        return torch.einsum("c,cbk->bk", self.weights, steps)


def returns_of(
    bound: BoundAlgorithm, batch: Batch, *, keep: Tensor | None = None, kl_coef: float | None = None
) -> Returns:
    """Shape the rewards of a batch and bring them on one form.

    Args:
        bound: the algorithm.
        batch: the generation batch.
        keep: rows that selection kept, (B,) bool; None = all.
        kl_coef: coefficient of a KL in the reward; None = the algorithm's.
    """
    parts = Components(dict(batch.rewards), dict(batch.turn_rewards), dict(bound.weights))
    for item in bound.algorithm.reward.shaping:
        parts = shape(item, parts, batch)
    names = [*parts.outcome, *parts.turn]
    unknown = [name for name in names if name not in parts.weights]
    if unknown:
        raise TrajectoryError(f"rewards {unknown} of the batch are not in the run's rubric")
    steps = (
        torch.stack([_steps(parts, name, batch) for name in names]) if names else _nothing(batch)
    )
    valid = ~torch.isnan(steps).all(-1)
    valid_rows = valid.any(0) if bound.algorithm.reward.missing == "component" else valid.all(0)
    reached = torch.arange(batch.max_turns) < batch.num_turns.clamp(min=1).unsqueeze(-1)
    return Returns(
        weights=torch.tensor([parts.weights[name] for name in names], dtype=torch.float64),
        steps=torch.nan_to_num(steps, nan=0.0),
        valid=valid,
        reached=reached,
        live=valid_rows if keep is None else valid_rows & keep,
        kl=_kl_in_reward(bound, batch, kl_coef),
    )


def _nothing(batch: Batch) -> Tensor:
    return torch.empty((0, batch.num_rows, batch.max_turns), dtype=torch.float64)


def _steps(parts: Components, name: str, batch: Batch) -> Tensor:
    if name in parts.turn:
        return parts.turn[name].to(torch.float64)
    steps = torch.full((batch.num_rows, batch.max_turns), float("nan"), dtype=torch.float64)
    last = batch.num_turns.clamp(min=1) - 1
    return steps.scatter(-1, last.unsqueeze(-1), parts.outcome[name].double().unsqueeze(-1))


def _kl_in_reward(bound: BoundAlgorithm, batch: Batch, coef: float | None) -> Tensor | None:
    term = bound.algorithm.term(KL)
    if term is None or term.where != "reward":
        return None
    if batch.logp_old is None or batch.logp_ref is None:
        raise TrajectoryError("KL in the reward reads logp_old and logp_ref; add them to the batch")
    log_ratio = (batch.logp_old - batch.logp_ref).double().clamp(-20, 20)
    return torch.where(batch.trainable, -(term.coef if coef is None else coef) * log_ratio, 0.0)


def turn_sums(values: Tensor, batch: Batch) -> Tensor:
    """Sum a token column over turns, (N,) into (B, K)."""
    width = batch.max_turns
    sums = segment_sum(values, batch.row * width + batch.turn, batch.num_rows * width)
    return sums.reshape(batch.num_rows, width)


@singledispatch
def shape(item: Shaping, parts: Components, batch: Batch) -> Components:
    """Apply one kind of shaping; register the function of a new kind for its type."""
    raise ConfigError(f"no shaping is registered for {type(item).__name__}; use shape.register")


def soft_overlong(lengths: Tensor, *, max_tokens: int, cache_tokens: int) -> Tensor:
    """Return the soft overlong punishment, in [-1, 0] (DAPO, arXiv:2503.14476, equation 13).

    >>> soft_overlong(torch.tensor([15, 18, 20, 99]), max_tokens=20, cache_tokens=5).tolist()
    [0.0, -0.6, -1.0, -1.0]
    """
    over = lengths.double() - (max_tokens - cache_tokens)
    if cache_tokens == 0:
        return -(lengths > max_tokens).double()
    return -(over / cache_tokens).clamp(0, 1) + 0.0


@shape.register
def _(item: SoftOverlong, parts: Components, batch: Batch) -> Components:
    if item.max_tokens is None or item.cache_tokens is None:
        raise ConfigError("SoftOverlong has no limit; bind the algorithm first")
    penalty = soft_overlong(
        lengths_of(batch.row, batch.num_rows),
        max_tokens=item.max_tokens,
        cache_tokens=item.cache_tokens,
    )
    return parts.add("overlong", penalty, item.weight)


@shape.register
def _(item: Gate, parts: Components, batch: Batch) -> Components:
    if not parts.outcome:
        raise ConfigError("Gate looks at outcome rewards, and the environment has none; drop it")
    outcomes = torch.stack([*parts.outcome.values()]).double()
    weights = torch.tensor([parts.weights[name] for name in parts.outcome], dtype=torch.float64)
    total = weights @ outcomes.nan_to_num(0.0)
    factor = (total > item.threshold).double().masked_fill(outcomes.isnan().all(0), float("nan"))
    return replace(parts, turn={n: v * factor[:, None] for n, v in parts.turn.items()})


@shape.register
def _(item: Conditioned, parts: Components, batch: Batch) -> Components:
    if item.on is None:
        raise ConfigError("Conditioned has no component to look at; bind the algorithm first")
    gate = parts.outcome[item.on] if item.on in parts.outcome else parts.turn[item.on].nansum(-1)
    factor = torch.where(gate.isnan(), gate, (gate >= item.threshold).to(gate))
    behind: Callable[[str], bool] = set(item.components).__contains__
    return replace(
        parts,
        outcome={n: v * factor if behind(n) else v for n, v in parts.outcome.items()},
        turn={n: v * factor[:, None] if behind(n) else v for n, v in parts.turn.items()},
    )


@shape.register
def _(item: MajorityVote, parts: Components, batch: Batch) -> Components:
    if len(batch.answers) != batch.num_rows:
        raise TrajectoryError("MajorityVote reads the answer of every row; set Batch.answers")
    rewards = torch.full((batch.num_rows,), float("nan"), dtype=torch.float64)
    for p in range(batch.num_groups):
        rows = (batch.group == p).nonzero().squeeze(-1)
        votes = majority_rewards([batch.answers[int(i)] for i in rows])
        rewards[rows] = torch.tensor(votes, dtype=torch.float64)
    return parts.add("majority", rewards, item.weight, alone=item.replace)


@shape.register
def _(item: SelfCertainty, parts: Components, batch: Batch) -> Components:
    mean = _row_mean(batch, batch.certainty, "certainty")
    return parts.add("self_certainty", mean, item.weight, alone=item.replace)


@shape.register
def _(item: NegativeEntropy, parts: Components, batch: Batch) -> Components:
    mean = _row_mean(batch, batch.entropy, "entropy")
    return parts.add("negative_entropy", -mean, item.weight, alone=item.replace)


def _row_mean(batch: Batch, column: Any, name: str) -> Tensor:
    if column is None:
        raise TrajectoryError(f"this reward reads the column {name!r}; add it to the batch")
    mean = segment_mean(column.double(), batch.row, batch.num_rows, batch.trainable)
    empty = lengths_of(batch.row, batch.num_rows, batch.trainable) == 0
    return mean.masked_fill(empty, float("nan"))
