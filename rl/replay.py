"""A store of verified successes that join fresh groups (RLEP, arXiv:2507.07451)."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from turngym.errors import ConfigError
from turngym.rl.algorithm import BoundAlgorithm
from turngym.rl.filters import group_metric
from turngym.types import Group, Trajectory

__all__ = ["ReplayBuffer"]


@dataclass
class ReplayBuffer:
    """The latest successes of every task.

    Replayed rows keep the log-probabilities of the sampler that made them; their `logp_old` is
    computed under the current policy, like everyone's.
    """

    per_task: int = 8
    """Successes kept of one task; the oldest are forgotten."""

    successes: dict[str, tuple[Trajectory, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.per_task < 1:
            raise ConfigError(f"per_task must be at least 1, got {self.per_task}")

    def __len__(self) -> int:
        return sum(len(kept) for kept in self.successes.values())

    def __iter__(self) -> Iterator[Trajectory]:
        for kept in self.successes.values():
            yield from kept

    def add(self, bound: BoundAlgorithm, group: Group) -> None:
        """Keep the sampled members of a group that the metric calls correct."""
        correct_at = bound.algorithm.selection.correct_at
        metric = group_metric(bound, group)
        found = [
            trajectory
            for trajectory, value in zip(group.trajectories, metric, strict=True)
            if value is not None and value >= correct_at and trajectory.source == "policy"
        ]
        known = {id(trajectory) for trajectory in self.successes.get(group.task_id, ())}
        fresh = tuple(trajectory for trajectory in found if id(trajectory) not in known)
        if fresh:
            kept = (*self.successes.get(group.task_id, ()), *fresh)
            self.successes[group.task_id] = kept[-self.per_task :]

    def join(self, group: Group, count: int, rng: random.Random) -> Group:
        """Return the group with up to `count` stored successes of its task as further members.

        Args:
            group: freshly sampled.
            count: how many to add; fewer where fewer are stored.
            rng: draws them.
        """
        stored = self.successes.get(group.task_id, ())
        drawn = rng.sample(stored, min(count, len(stored)))
        if not drawn:
            return group
        size = len(group.trajectories)
        replayed = tuple(
            replace(trajectory, group_id=group.id, sample=size + n)
            for n, trajectory in enumerate(drawn)
        )
        return replace(group, trajectories=(*group.trajectories, *replayed))

    @classmethod
    def restored(
        cls, per_task: int, successes: Mapping[str, tuple[Trajectory, ...]]
    ) -> "ReplayBuffer":
        """Rebuild the buffer of a checkpoint."""
        return cls(per_task, {task: kept[-per_task:] for task, kept in successes.items()})
