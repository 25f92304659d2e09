"""Axis 2: which groups, members and tasks train, as pure decisions on plain numbers.

The trainer asks `keep_groups` after every generation batch, `wants_more` whether to draw another
one, and `retired` and `priorities` when it picks tasks. `keep_members` works inside the plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from turngym.errors import ConfigError
from turngym.rl.algorithm import BoundAlgorithm
from turngym.rl.axes import AdaptiveK, KeepGroups, TopK
from turngym.rl.batch import Batch
from turngym.rl.segments import TINY, lengths_of, segment_mean
from turngym.rl.state import AlgorithmState
from turngym.types import Group, Trajectory

__all__ = [
    "PassRates",
    "adaptive_k",
    "correct_rows",
    "group_metric",
    "keep_group",
    "keep_groups",
    "keep_members",
    "metric_column",
    "metric_of",
    "priorities",
    "retired",
    "wants_more",
]

HISTORY = 4096
"""Group means that AdaptiveK remembers; the oldest are forgotten."""


def keep_group(
    metric: Sequence[float | None], kind: KeepGroups, *, correct_at: float = 1.0
) -> bool:
    """Decide whether a group has something to teach.

    Args:
        metric: of each member, unshaped; None where it abstained.
        kind: `mixed`: some but not all are correct (DAPO, ScaleRL); `not_all_correct` (NGRPO);
            `nonzero_spread`: not all equal; `all`.
        correct_at: metric from which a member is correct.
    """
    known = [value for value in metric if value is not None]
    correct = sum(value >= correct_at for value in known)
    match kind:
        case "all":
            return True
        case "mixed":
            return 0 < correct < len(known)
        case "not_all_correct":
            return correct < len(known)
        case "nonzero_spread":
            return len(known) > 1 and max(known) - min(known) > TINY


def group_metric(bound: BoundAlgorithm, group: Group) -> list[float | None]:
    """Return the metric of each member: an outcome, or the sum of a turn component."""
    return [metric_of(bound, trajectory) for trajectory in group.trajectories]


def metric_of(bound: BoundAlgorithm, trajectory: Trajectory) -> float | None:
    """Return a trajectory's metric, None where it abstained.

    Raises:
        ConfigError: no metric tells right from wrong.
    """
    name = bound.algorithm.selection.metric
    if name is None:
        raise ConfigError("no metric tells right from wrong; set selection.metric")
    found = [trajectory.rewards.get(name), *(turn.rewards.get(name) for turn in trajectory.turns)]
    known = [value for value in found if value is not None]
    return sum(known) if known else None


def metric_column(bound: BoundAlgorithm, batch: Batch) -> Tensor:
    """Metric of each row, NaN where it abstained, (B,).

    Raises:
        ConfigError: no metric tells right from wrong.
    """
    metric = bound.algorithm.selection.metric
    if metric is None:
        raise ConfigError("no metric tells right from wrong; set selection.metric")
    if metric in batch.rewards:
        return batch.rewards[metric]
    by_turn = batch.turn_rewards[metric]
    return by_turn.nansum(-1).masked_fill(by_turn.isnan().all(-1), float("nan"))


def correct_rows(bound: BoundAlgorithm, batch: Batch) -> Tensor:
    """Rows whose metric says right, (B,) bool."""
    return metric_column(bound, batch) >= bound.algorithm.selection.correct_at


def keep_groups(bound: BoundAlgorithm, groups: Sequence[Group]) -> list[bool]:
    """Decide for every group of a generation batch whether it trains."""
    selection = bound.algorithm.selection
    if selection.keep_groups == "all":
        return [True] * len(groups)
    return [
        keep_group(
            group_metric(bound, group), selection.keep_groups, correct_at=selection.correct_at
        )
        for group in groups
    ]


def wants_more(bound: BoundAlgorithm, *, wanted: int, kept: int, batches: int) -> bool:
    """Decide whether to draw another generation batch to fill up an optimizer batch.

    Never more than `selection.max_batches`: at the cap the learner trains on what there is.

    Args:
        bound: the algorithm.
        wanted: groups the batch should hold.
        kept: groups kept so far.
        batches: generation batches drawn so far.
    """
    return kept < wanted and batches < bound.algorithm.selection.max_batches


@dataclass(frozen=True, slots=True)
class PassRates:
    """How often each task was solved so far; plain data for checkpoints."""

    solved: Mapping[str, int]
    tried: Mapping[str, int]

    def updated(self, bound: BoundAlgorithm, group: Group) -> "PassRates":
        """Count the members of one more group."""
        selection = bound.algorithm.selection
        known = [value for value in group_metric(bound, group) if value is not None]
        correct = sum(value >= selection.correct_at for value in known)
        task = group.task_id
        return PassRates(
            {**self.solved, task: self.solved.get(task, 0) + correct},
            {**self.tried, task: self.tried.get(task, 0) + len(known)},
        )

    def rates(self) -> dict[str, float]:
        """Pass rate of every task tried."""
        return {task: self.solved[task] / n for task, n in self.tried.items() if n}


def retired(rates: Mapping[str, float], threshold: float | None) -> set[str]:
    """Return the tasks that are not sampled again: no-positive-resampling (ScaleRL)."""
    return (
        set() if threshold is None else {task for task, rate in rates.items() if rate >= threshold}
    )


def priorities(
    tasks: Sequence[str], rates: Mapping[str, float], *, floor: float = 0.1
) -> list[float]:
    """Return sampling probabilities of a curriculum: tasks solved half of the time come most.

    Args:
        tasks: candidates.
        rates: pass rates so far; a task never tried counts as half solved.
        floor: smallest weight, so that no task is forgotten.
    """
    weights = [max(floor, 4 * (p := rates.get(task, 0.5)) * (1 - p)) for task in tasks]
    total = sum(weights)
    return [weight / total for weight in weights]


def adaptive_k(spec: AdaptiveK, mean: float, history: Sequence[float]) -> int:
    """Return how many members of a group to keep, by the difficulty of its task.

    Args:
        spec: sizes by quartile.
        mean: mean return of the group.
        history: mean returns of the groups seen before.
    """
    if len(history) < spec.warmup:
        return spec.ks[0]
    quartiles = np.quantile(np.asarray(history), [0.25, 0.5, 0.75])
    return spec.ks[int(np.searchsorted(quartiles, mean, side="right"))]


def keep_members(
    bound: BoundAlgorithm, batch: Batch, total: Tensor, live: Tensor, state: AlgorithmState
) -> tuple[Tensor, Tensor]:
    """Choose the members of every group that train.

    Args:
        bound: the algorithm.
        batch: the generation batch.
        total: return of each row, (B,).
        live: rows with a reward, (B,) bool.
        state: difficulties seen before.

    Returns:
        Rows that train, and rows that count in the denominator of the loss, (B,) bool each.
    """
    spec = bound.algorithm.selection.keep_in_group
    everyone = torch.ones_like(live)
    if spec is None:
        return everyone, everyone
    means = segment_mean(total, batch.group, batch.num_groups, live)
    if isinstance(spec, TopK):
        sizes = torch.full((batch.num_groups,), spec.k)
    elif isinstance(spec, AdaptiveK):
        ks = [adaptive_k(spec, mean, state.group_means) for mean in means.tolist()]
        sizes = torch.tensor(ks, dtype=torch.int64)
    else:
        raise ConfigError(f"no rule is known for {type(spec).__name__}")
    order = _ranking(spec.metric, batch, total, live)
    keep = live & (order < sizes[batch.group])
    return keep, keep if spec.denominator == "kept" else everyone


def _ranking(metric: str, batch: Batch, total: Tensor, live: Tensor) -> Tensor:
    """Place of each row in its group, the best first, ties by index, (B,)."""
    lengths = lengths_of(batch.row, batch.num_rows).double()
    key = torch.zeros_like(lengths) if metric == "first" else lengths
    if metric == "token_efficiency":
        key = -total / lengths.clamp(min=1)
    key = torch.where(live, key, torch.inf)
    order = key.argsort(stable=True)
    order = order[batch.group[order].argsort(stable=True)]
    sizes = torch.bincount(batch.group, minlength=batch.num_groups)
    starts = sizes.cumsum(0) - sizes
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order)) - starts[batch.group[order]]
    return place


def seen_difficulties(
    bound: BoundAlgorithm, batch: Batch, total: Tensor, live: Tensor, state: AlgorithmState
) -> AlgorithmState:
    """Remember the mean returns of the groups of a batch, where AdaptiveK asks for them."""
    if not isinstance(bound.algorithm.selection.keep_in_group, AdaptiveK):
        return state
    means = segment_mean(total, batch.group, batch.num_groups, live).tolist()
    return replace(state, group_means=(*state.group_means, *means)[-HISTORY:])
