"""Groups on their way from the task stream to the trainer, for every mode of training.

    draw -> in flight -> finished -> a batch; who may pass when is for `Admission` to say

With staleness 0 a whole generation batch is asked for when the trainer wants one, and comes back
complete and in order. Otherwise every group is asked for by itself, as soon as there is room and
a free seat, also while the trainer is busy; what has finished waits its turn.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turngym.agents.rollout import RolloutEngine
from turngym.errors import EngineError, WeightSyncError
from turngym.rl.admission import Admission
from turngym.types import Group, Trajectory

__all__ = ["Arrival", "Pipeline", "Taken", "Ticket"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What was settled when a task was admitted."""

    number: int
    """Place in the order of admission."""

    due: int
    """Batch in which its group trains at the latest."""

    version: int
    """Policy version of the sampler then: the group holds no token of an older one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrival:
    """A complete group that has not trained."""

    ticket: Ticket
    group: Group
    keep: bool = True
    """Selection wants it; the others only fill up a batch in which nothing is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """One batch."""

    groups: list[Group]
    """Those that train; at least one."""

    sampled: list[Group]
    """All that are done with: those that train, and those that selection dropped."""

    kept: int
    """Sampled groups that selection wanted."""

    batches: int
    """Generation batches begun to fill this one."""

    metrics: Mapping[str, float]


class Pipeline:
    """Keeps an engine busy within the bound on staleness, and forms batches.

    Args:
        engine: rolls out groups on its own event loop; all methods here are for the trainer's
            thread.
        admission: the rules.
        draw: gives the ordinals of that many further tasks, or this process's share of them.
        replace: gives the ordinal of the task that replaces a dropped one.
        keep: tells which groups selection wants.
        wants_more: `(kept, generation batches) -> bool`: fill up a batch that is not full?
        exchange: puts together what several processes rolled out; with staleness 0 only.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        admission: Admission,
        *,
        draw: Callable[[int], list[int]],
        replace: Callable[[], int],
        keep: Callable[[Sequence[Group]], list[bool]],
        wants_more: Callable[[int, int], bool],
        exchange: Callable[[list[Arrival]], list[Arrival]],
    ) -> None:
        self.engine = engine
        self.admission = admission
        self._draw = draw
        self._replace = replace
        self._keep = keep
        self._wants_more = wants_more
        self._exchange = exchange
        self._changed = threading.Condition()
        self._left: int | None = 0
        self._version = 0
        self._admitted = 0
        self._again: list[int] = []
        self._in_flight: dict[int, Ticket] = {}
        self._starting = 0
        self._arrived: list[Arrival] = []
        self._finished: list[Arrival] = []
        self._news = 0
        self._failure: Exception | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        engine.refill = self._refill
        if self._runs_ahead:
            engine.progress = lambda *_: self._go_ahead()

    @property
    def _runs_ahead(self) -> bool:
        return self.admission.staleness > 0

    def take(self, *, left: int | None = None) -> Taken:
        """Wait for a batch and take it; the sampler must have the trainer's weights.

        Args:
            left: batches that the run still wants, this one included; None = no end in sight.

        Raises:
            CircuitBreakerError: too many episodes failed for the world's fault.
            ConfigError: a setting is wrong.
            EngineError: the rollouts were cancelled.
            WeightSyncError: a group holds tokens of older weights than it began with.
        """
        begun, seat_s = time.monotonic(), self.engine.seat_s
        with self._changed:
            self._left = left
            self.admission.pushed = self.admission.formed
            while (chosen := self._choose()) is None:
                self._admit()
                self._wait()
                if not self._runs_ahead:
                    self._absorb(self._exchange(self._arrived))
            waited, used = time.monotonic() - begun, self.engine.seat_s - seat_s
            return self._form(chosen, straggler_s=max(0.0, waited - used / self._seats))

    def _wait(self) -> None:
        """Wait until something arrives; the lock is held before and after."""
        seen = self._news
        self._changed.wait_for(lambda: self._news > seen or self._failure is not None)
        if self._failure is not None:
            raise self._failure

    @property
    def _seats(self) -> int:
        """Episodes that could run at once."""
        config, rules = self.engine.config, self.admission
        wanted = rules.prompts * config.group_size * (rules.staleness + 1)
        return min(config.concurrency, wanted)

    def synced(self, version: int) -> None:
        """Take note that the sampler has the trainer's weights, of this policy version."""
        with self._changed:
            self._version = version
            self.admission.pushed = self.admission.formed
            if self._runs_ahead:
                self._go_ahead()

    def _choose(self) -> list[Arrival] | None:
        """Return the groups of the next batch, when it may be formed."""
        prompts = self.admission.prompts
        chosen = [one for one in self._finished if one.keep][:prompts]
        if len(chosen) < prompts and not self._is_exhausted:
            return None
        chosen = chosen or self._finished[-prompts:]
        behind = [*self._in_flight.values(), *(one.ticket for one in self._spare(chosen))]
        return chosen if self.admission.fits(ticket.due for ticket in behind) else None

    @property
    def _is_exhausted(self) -> bool:
        """So many groups were sampled for the next batch that it makes do with what is kept."""
        batches = len(self._finished) // self.admission.prompts
        kept = sum(one.keep for one in self._finished)
        return batches > 0 and not self._wants_more(kept, batches)

    def _spare(self, chosen: Sequence[Arrival]) -> list[Arrival]:
        """Wanted groups that a batch leaves to later ones: those it need not train itself."""
        left = (one for one in self._finished if one.keep and one not in chosen)
        return list(left) if self._runs_ahead else []

    def _form(self, chosen: Sequence[Arrival], *, straggler_s: float) -> Taken:
        spare = self._spare(chosen)
        done = [one for one in self._finished if one not in spare]
        self._finished = spare
        self.admission.formed += 1
        self._left = None if self._left is None else self._left - 1
        if self._runs_ahead:
            self._go_ahead()
        return Taken(
            groups=[one.group for one in chosen],
            sampled=[one.group for one in done],
            kept=sum(one.keep for one in done),
            batches=-(-len(done) // self.admission.prompts),
            metrics={
                "rollout/queue": len(spare),
                "rollout/in_flight": len(self._in_flight),
                "time/straggler_s": straggler_s,
            },
        )

    def _go_ahead(self) -> None:
        """Begin what may begin; thread-safe."""
        with self._changed:
            if self._left != 0 and self._failure is None:
                self._admit()

    def _admit(self) -> None:
        kept = sum(one.keep for one in self._finished)
        if self._is_exhausted:  # places that stay empty cannot be given away
            kept = max(kept, self.admission.prompts)
        outstanding = len(self._in_flight) + kept
        room = self.admission.room(outstanding, left=self._left)
        if not self._runs_ahead:
            if room and not self._in_flight:
                self._begin(self.admission.prompts)
            return
        config = self.engine.config
        for _ in range(room):
            if self.engine.unfinished + self._starting * config.group_size >= config.concurrency:
                break
            self._begin(1)

    def _begin(self, count: int) -> None:
        again, self._again = self._again[:count], self._again[count:]
        ordinals = again + self._draw(count - len(again))
        for place, ordinal in enumerate(ordinals):
            self._in_flight[ordinal] = Ticket(
                number=self._admitted + place, due=self.admission.due, version=self._version
            )
        self._admitted += count
        self._starting += 1
        self.engine.submit(self._run(ordinals))

    async def _run(self, ordinals: Sequence[int]) -> None:
        task = asyncio.current_task()
        assert task is not None
        with self._changed:
            self._starting -= 1
            self._tasks.add(task)
        try:
            groups = await self.engine.collect(ordinals)
            with self._changed:
                self._arrived += [
                    Arrival(ticket=self._in_flight.pop(group.ordinal), group=group)
                    for group in groups
                ]
                if self._runs_ahead:
                    self._absorb(self._arrived)
                    self._go_ahead()
        except asyncio.CancelledError:
            self._failure = EngineError("the rollouts were cancelled")
            raise
        except Exception as error:
            self._failure = error
        finally:
            with self._changed:
                self._tasks.discard(task)
                self._news += 1
                self._changed.notify_all()

    def _absorb(self, arrivals: Sequence[Arrival]) -> None:
        """Take over what has arrived, the first admitted first."""
        self._arrived = []
        for one in arrivals:
            _check_versions(one)
        wanted = self._keep([one.group for one in arrivals])
        fresh = (
            Arrival(ticket=one.ticket, group=one.group, keep=keep)
            for one, keep in zip(arrivals, wanted, strict=True)
        )
        self._finished = sorted([*self._finished, *fresh], key=lambda one: one.ticket.number)

    def _refill(self, dropped: int) -> int:
        """Let another task take the place of a dropped one; called on the engine's loop."""
        with self._changed:
            ordinal = self._replace()
            self._in_flight[ordinal] = self._in_flight.pop(dropped)
            return ordinal

    @contextlib.contextmanager
    def still(self) -> Any:
        """Let nothing begin or arrive during the block, so that it sees one moment."""
        with self._changed:
            yield

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resume needs besides `waiting`, JSON-able."""
        with self._changed:
            flying = sorted(self._in_flight, key=lambda ordinal: self._in_flight[ordinal].number)
            return {
                "formed": self.admission.formed,
                "again": [*flying, *self._again],
                "finished": [
                    {
                        "ordinal": one.group.ordinal,
                        "size": len(one.group.trajectories),
                        "due": one.ticket.due,
                        "version": one.ticket.version,
                    }
                    for one in self._finished
                ],
            }

    @property
    def waiting(self) -> list[Trajectory]:
        """Trajectories that have finished and not trained."""
        with self._changed:
            return [t for one in self._finished for t in one.group.trajectories]

    def load_state_dict(self, state: Mapping[str, Any], waiting: Iterable[Trajectory]) -> None:
        """Restore what `state_dict` and `waiting` returned; what was in flight begins anew."""
        trajectories = iter(waiting)
        arrivals = []
        for number, row in enumerate(state["finished"]):
            members = [next(trajectories) for _ in range(row["size"])]
            ticket = Ticket(number=number, due=row["due"], version=row["version"])
            group = self.engine.group(row["ordinal"], members)
            arrivals.append(Arrival(ticket=ticket, group=group))
        with self._changed:
            self.admission.formed = self.admission.pushed = state["formed"]
            self._again = list(state["again"])
            self._admitted = len(arrivals)
            self._absorb(arrivals)

    def close(self) -> None:
        """Cancel what is in flight. Idempotent."""
        with self._changed:
            self._left = 0
            tasks = list(self._tasks)

        async def cancel() -> None:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        if tasks:
            self.engine.wait(cancel())


def _check_versions(arrival: Arrival) -> None:
    """Refuse a group sampled by other weights than those it was admitted under, or later ones."""
    for trajectory in arrival.group.trajectories:
        versions = trajectory.version[trajectory.sampled]
        if len(versions) and (oldest := int(versions.min())) < arrival.ticket.version:
            raise WeightSyncError(
                f"group {arrival.group.id} holds tokens of policy version {oldest}, but version "
                f"{arrival.ticket.version} was in use before it began: the sampler fell back"
            )
