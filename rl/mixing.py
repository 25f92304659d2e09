"""What joins a group of fresh samples: stored successes (RLEP) and demonstrations (LUFFY)."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

from turngym.rl.algorithm import BoundAlgorithm
from turngym.rl.filters import metric_of
from turngym.types import Group, Trajectory, is_world_fault

__all__ = ["ReplayPool", "join"]


def join(group: Group, more: Sequence[Trajectory]) -> Group:
    """Return the group with further trajectories of its task, numbered after its own."""
    start = len(group.trajectories)
    guests = (replace(t, group_id=group.id, sample=start + i) for i, t in enumerate(more))
    return replace(group, trajectories=(*group.trajectories, *guests))


class ReplayPool:
    """Verified successes by task, the latest few of each (RLEP, arXiv:2507.07451).

    Args:
        per_task: most trajectories kept of a task.
        tasks: most tasks kept; those that gained nothing for longest go first.
        seed: of the draws.
    """

    def __init__(self, *, per_task: int = 8, tasks: int = 4096, seed: int = 0) -> None:
        self._per_task = per_task
        self._tasks = tasks
        self._seed = seed
        self._pool: dict[str, list[Trajectory]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._pool.values()))

    def add(self, bound: BoundAlgorithm, trajectories: Iterable[Trajectory]) -> None:
        """Keep the trajectories whose metric says right."""
        for trajectory in trajectories:
            if trajectory.has_tokens and not is_world_fault(trajectory.status):
                value = metric_of(bound, trajectory)
                if value is not None and value >= bound.algorithm.selection.correct_at:
                    self.put(trajectory)

    def put(self, trajectory: Trajectory) -> None:
        """Keep one success."""
        known = self._pool.pop(trajectory.task_id, [])
        self._pool[trajectory.task_id] = [*known, trajectory][-self._per_task :]
        if len(self._pool) > self._tasks:
            del self._pool[next(iter(self._pool))]

    def draw(self, group: Group, count: int) -> list[Trajectory]:
        """Draw up to `count` different successes of a group's task."""
        known = self._pool.get(group.task_id, [])
        rng = random.Random(f"{self._seed}/{group.id}")
        return rng.sample(known, min(count, len(known)))

    def all(self) -> list[Trajectory]:
        """Return everything, so that `put` in this order restores it."""
        return [trajectory for known in self._pool.values() for trajectory in known]
