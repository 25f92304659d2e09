"""Which groups train: draws tasks until an optimizer batch is full, within the algorithm's cap."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turngym.agents.rollout import RolloutEngine
from turngym.rl.algorithm import BoundAlgorithm
from turngym.rl.filters import PassRates, keep_groups, retired, wants_more
from turngym.rl.parallel import Ranks
from turngym.rl.stream import TaskStream
from turngym.types import Group

__all__ = ["Collected", "Collector"]

_RETIRED_TRIES = 64
"""Tasks looked at for one that is not retired before a retired one is taken after all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """One rollout batch."""

    groups: list[Group]
    """Those that train; at least one."""

    sampled: list[Group]
    """All that were rolled out."""

    batches: int
    """Generation batches drawn."""

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
        ranks: the processes that train together; each rolls out its share.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        stream: TaskStream,
        bound: BoundAlgorithm,
        *,
        prompts: int,
        ranks: Ranks | None = None,
    ) -> None:
        self.engine = engine
        self.stream = stream
        self.bound = bound
        self.prompts = prompts
        self.rates = PassRates({}, {})
        self._ranks = ranks or Ranks()

    def collect(self) -> Collected:
        """Roll out one batch."""
        kept: list[Group] = []
        sampled: list[Group] = []
        batches = 0
        while not batches or wants_more(
            self.bound, wanted=self.prompts, kept=len(kept), batches=batches
        ):
            mine = self._ranks.share(self._ordinals(self.prompts))
            fresh = self._ranks.gather(self.engine.run(mine))
            batches += 1
            self.stream.position = max(self._ranks.gather([self.stream.position]))
            sampled += fresh
            chosen = keep_groups(self.bound, fresh)
            kept += [group for group, keep in zip(fresh, chosen, strict=True) if keep]
            self._note(fresh)
        groups = kept[: self.prompts] or sampled[-self.prompts :]
        return Collected(
            groups=groups,
            sampled=sampled,
            batches=batches,
            metrics={
                "rollout/batches": batches,
                "rollout/kept_groups_frac": len(kept) / len(sampled),
                "rollout/retired_tasks": len(self._retired()),
            },
        )

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
        chosen: list[int] = []
        for _ in range(count):
            for _ in range(_RETIRED_TRIES):
                (ordinal,) = self.stream.take(1)
                if not gone or self.engine.source.task(ordinal).id not in gone:
                    break
            chosen.append(ordinal)
        return chosen

    def _note(self, groups: Sequence[Group]) -> None:
        if self.bound.algorithm.selection.retire_pass_rate is not None:
            for group in groups:
                self.rates = self.rates.updated(self.bound, group)

    def state_dict(self) -> dict[str, Any]:
        """Position in the stream and pass rates, JSON-able."""
        return {
            "stream": self.stream.state_dict(),
            "solved": dict(self.rates.solved),
            "tried": dict(self.rates.tried),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.stream.load_state_dict(state["stream"])
        self.rates = PassRates(state["solved"], state["tried"])
