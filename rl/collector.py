"""Which tasks are rolled out and which groups train, within the algorithm's cap."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turngym.agents.rollout import RolloutEngine
from turngym.errors import ConfigError, EngineError
from turngym.rl.admission import Admission
from turngym.rl.algorithm import BoundAlgorithm
from turngym.rl.filters import PassRates, keep_groups, priorities, retired, wants_more
from turngym.rl.parallel import Ranks
from turngym.rl.pipeline import Arrival, Pipeline
from turngym.rl.replay import ReplayBuffer, join
from turngym.rl.stream import MixedStream, TaskStream
from turngym.types import Group, Trajectory

__all__ = ["Collected", "Collector"]

_RETIRED_TRIES = 64
"""Tasks looked at for one that is not retired before a retired one is taken after all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """One rollout batch."""

    groups: list[Group]
    """Those that train, with what joined them; at least one."""

    sampled: list[Group]
    """All that were rolled out."""

    batches: int
    """Generation batches drawn."""

    greedy: Mapping[str, Trajectory] = field(default_factory=dict)
    """One greedy episode by group id, where the algorithm needs it as a baseline."""

    metrics: Mapping[str, float] = field(default_factory=dict)


class Collector:
    """Rolls out tasks and keeps the groups that the algorithm's selection wants.

    Never loops for ever and never raises for want of good groups: at `selection.max_batches` the
    learner trains on what there is, and where nothing is left, on the last batch as it came.

    Args:
        engine: rolls out groups.
        stream: which task comes next.
        bound: the algorithm.
        prompts: groups wanted.
        greedy: plays one greedy episode a task (ReMax); never trained on.
        demos: has the expert play each task (LUFFY).
        replay: successes to join to groups (RLEP), where `selection.replay` asks for them.
        curriculum: tasks looked at for each one taken, see `priorities`; 1 = every task in turn.
        staleness: batches that rollouts may run ahead of training, see `Admission`.
        ranks: the processes that train together; each rolls out its share.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        stream: TaskStream | MixedStream,
        bound: BoundAlgorithm,
        *,
        prompts: int,
        greedy: RolloutEngine | None = None,
        demos: RolloutEngine | None = None,
        replay: ReplayBuffer | None = None,
        curriculum: int = 1,
        staleness: int = 0,
        ranks: Ranks | None = None,
    ) -> None:
        selection = bound.algorithm.selection
        if curriculum > 1 and selection.metric is None:
            raise ConfigError(
                "a curriculum needs pass rates; set algorithm.selection.metric to the reward that "
                "says right or wrong"
            )
        if selection.replay and replay is None:
            replay = ReplayBuffer()
        self.stream = stream
        self.bound = bound
        self.rates = PassRates({}, {})
        self.replay = replay
        self._greedy = greedy
        self._demos = demos
        self._curriculum = curriculum
        self._ranks = ranks or Ranks()
        self.pipeline = Pipeline(
            engine,
            Admission(prompts, staleness),
            draw=lambda count: self._ranks.share(self._ordinals(count)),
            replace=self.refill,
            keep=self._look,
            wants_more=lambda kept, batches: wants_more(
                bound, wanted=prompts, kept=kept, batches=batches
            ),
            exchange=self._exchange,
        )

    def collect(self, *, left: int | None = None) -> Collected:
        """Wait for one batch.

        Args:
            left: batches that the run still wants, this one included; None = no end in sight.
        """
        taken = self.pipeline.take(left=left)
        chosen = taken.groups
        greedy = self._alongside(self._greedy, chosen)
        if self._greedy is not None:
            chosen = [group for group in chosen if group.id in greedy]
            if not chosen:
                raise EngineError("no greedy episode could be played; see the warnings above")
        groups = self._join(chosen)
        if self.replay is not None:
            for trajectory in (one for group in taken.sampled for one in group.trajectories):
                self.replay.add(self.bound, trajectory)
        return Collected(
            groups=groups,
            sampled=taken.sampled,
            batches=taken.batches,
            greedy={name: group.trajectories[0] for name, group in greedy.items()},
            metrics={
                "rollout/batches": taken.batches,
                "rollout/kept_groups_frac": taken.kept / len(taken.sampled),
                "rollout/retired_tasks": len(self._retired()),
                "rollout/joined": sum(len(g.trajectories) for g in groups)
                - sum(len(g.trajectories) for g in chosen),
                **taken.metrics,
            },
        )

    def _exchange(self, arrivals: list[Arrival]) -> list[Arrival]:
        """Put together what every process rolled out of a generation batch."""
        found = self._ranks.gather(arrivals)
        self.stream.position = max(self._ranks.gather([self.stream.position]))
        return found

    def _look(self, groups: Sequence[Group]) -> list[bool]:
        """Remember how well tasks were solved, and decide which groups train."""
        self._note(groups)
        return keep_groups(self.bound, groups)

    def _alongside(self, engine: RolloutEngine | None, groups: Sequence[Group]) -> dict[str, Group]:
        """Have another engine play the groups' tasks from the same states; by group id.

        A task it could not play is missing.
        """
        if engine is None:
            return {}
        mine = [group.ordinal for group in self._ranks.share(groups)]
        found = self._ranks.gather(engine.run(mine))
        wanted = {group.id for group in groups}
        return {group.id: group for group in found if group.id in wanted}

    def _join(self, groups: Sequence[Group]) -> list[Group]:
        """Add demonstrations and replayed successes to the groups that train."""
        demos = self._alongside(self._demos, groups)
        count = self.bound.algorithm.selection.replay
        joined = []
        for group in groups:
            more = [*demos[group.id].trajectories] if group.id in demos else []
            if self.replay is not None:
                rng = random.Random(f"{self.stream.seed}/{group.id}")
                more += self.replay.draw(group, count, rng)
            joined.append(join(group, more))
        return joined

    def refill(self) -> int:
        """Ordinal of the task that replaces a dropped group; no two processes draw the same."""
        while True:
            (ordinal,) = self._ordinals(1)
            if self._ranks.owns(self.stream.position):
                return ordinal

    def _retired(self) -> set[str]:
        return retired(self.rates.rates(), self.bound.algorithm.selection.retire_pass_rate)

    def _ordinals(self, count: int) -> list[int]:
        gone = self._retired()
        candidates = [self._next_ordinal(gone) for _ in range(count * self._curriculum)]
        if self._curriculum == 1:
            return candidates
        tasks = [self.pipeline.engine.source.task(ordinal).id for ordinal in candidates]
        weights = priorities(tasks, self.rates.rates())
        rng = random.Random(f"{self.stream.seed}/{self.stream.position}")
        # Weighted sampling without replacement (Efraimidis and Spirakis 2006).
        keys = [rng.random() ** (1 / weight) for weight in weights]
        best = sorted(range(len(keys)), key=keys.__getitem__, reverse=True)[:count]
        return [candidates[place] for place in sorted(best)]

    def _next_ordinal(self, gone: set[str]) -> int:
        for _ in range(_RETIRED_TRIES):
            (ordinal,) = self.stream.take(1)
            if not gone or self.pipeline.engine.source.task(ordinal).id not in gone:
                break
        return ordinal

    def _note(self, groups: Sequence[Group]) -> None:
        retires = self.bound.algorithm.selection.retire_pass_rate is not None
        if retires or self._curriculum > 1:
            for group in groups:
                self.rates = self.rates.updated(self.bound, group)

    def synced(self, version: int) -> None:
        """Take note that the sampler has the trainer's weights, of this policy version."""
        self.pipeline.synced(version)

    def close(self) -> None:
        """Cancel what is in flight. Idempotent."""
        self.pipeline.close()

    def snapshot(self) -> tuple[dict[str, Any], list[Trajectory]]:
        """Return what a resume needs, of one moment.

        Returns:
            Position in the stream, what is under way, pass rates, JSON-able; and the trajectories
            that have finished and not trained.
        """
        with self.pipeline.still():
            state = {
                "stream": self.stream.state_dict(),
                "pipeline": self.pipeline.state_dict(),
                "solved": dict(self.rates.solved),
                "tried": dict(self.rates.tried),
            }
            return state, self.pipeline.waiting

    def restore(self, state: Mapping[str, Any], waiting: Iterable[Trajectory]) -> None:
        """Go on from what `snapshot` returned; tasks that were in flight begin anew."""
        self.stream.load_state_dict(state["stream"])
        self.pipeline.load_state_dict(state["pipeline"], waiting)
        self.rates = PassRates(state["solved"], state["tried"])
