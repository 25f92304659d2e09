"""What joins fresh samples: stored successes (RLEP, arXiv:2507.07451) and demonstrations."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from turngym.errors import ConfigError
from turngym.rl.algorithm import BoundAlgorithm
from turngym.rl.filters import metric_of
from turngym.types import Group, Trajectory, is_world_fault

__all__ = ["ReplayBuffer", "join"]


def join(group: Group, more: Sequence[Trajectory]) -> Group:
    """Return the group with further trajectories of its task, numbered after its own."""
    size = len(group.trajectories)
    guests = (replace(t, group_id=group.id, sample=size + n) for n, t in enumerate(more))
    return replace(group, trajectories=(*group.trajectories, *guests)) if more else group


@dataclass
class ReplayBuffer:
    """The latest successes of every task.

    Replayed rows keep the log-probabilities of the sampler that made them; their `logp_old` is
    computed under the current policy, like everyone's.
    """

    per_task: int = 8
    """Successes kept of one task; the oldest are forgotten."""

    tasks: int = 4096
    """Tasks remembered; those that gained nothing for longest are forgotten."""

    successes: dict[str, tuple[Trajectory, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("per_task", "tasks"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")

    def __len__(self) -> int:
        return sum(len(kept) for kept in self.successes.values())

    def __iter__(self) -> Iterator[Trajectory]:
        """Everything, so that `put` in this order restores the buffer."""
        for kept in self.successes.values():
            yield from kept

    def add(self, bound: BoundAlgorithm, trajectory: Trajectory) -> None:
        """Keep a trajectory if it was sampled and the metric calls it correct."""
        if trajectory.source != "policy" or not trajectory.has_tokens:
            return
        value = None if is_world_fault(trajectory.status) else metric_of(bound, trajectory)
        if value is not None and value >= bound.algorithm.selection.correct_at:
            self.put(trajectory)

    def put(self, trajectory: Trajectory) -> None:
        """Keep a success, once."""
        kept = self.successes.pop(trajectory.task_id, ())
        if not any(trajectory is known for known in kept):
            kept = (*kept, trajectory)[-self.per_task :]
        self.successes[trajectory.task_id] = kept
        if len(self.successes) > self.tasks:
            del self.successes[next(iter(self.successes))]

    def draw(self, group: Group, count: int, rng: random.Random) -> list[Trajectory]:
        """Draw up to `count` different successes of a group's task."""
        stored = self.successes.get(group.task_id, ())
        return rng.sample(stored, min(count, len(stored)))
