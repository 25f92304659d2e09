"""The rollout engine: many episodes at once, delivered as complete groups.

One coroutine per trajectory; nothing waits for the slowest of a batch of turns. Environment code
runs on pool threads. What the model does wrong is data; what the world does wrong is retried in a
fresh environment, then the whole group is dropped, counted and replaced by another task.
"""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from turngym.agents.agent import AgentFactory, DemoAgent, MessageAgent, TokenAgent
from turngym.agents.config import RolloutConfig
from turngym.agents.episode import Seat, run_episode
from turngym.agents.lag import LoopMonitor
from turngym.agents.mixed_source import MixedSource
from turngym.agents.seats import Seats, Shared
from turngym.agents.source import EnvHandle, EnvSource
from turngym.agents.stats import CircuitBreaker, RolloutStats
from turngym.agents.threads import BlockingPool, LoopThread
from turngym.errors import ConfigError, EngineError
from turngym.types import Group, Trajectory, is_world_fault

__all__ = [
    "DemoAgent",
    "EnvSource",
    "MessageAgent",
    "MixedSource",
    "RolloutEngine",
    "TokenAgent",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")
Progress = Callable[[int, int], None]

_TRUNCATED_WARNING = 0.2


class RolloutEngine:
    """Rolls out episodes of a source of environments with one kind of agent.

    Use as a context manager, or call `close`.

    Args:
        source: makes the environments.
        agent: makes the agent of each episode.
        config: sizes, budgets, deadlines.
        seed: run seed; every draw is derived from it and its address, so that results do not
            depend on concurrency.
        refill: gives the ordinal of the task that replaces a dropped one; by default the one after
            the largest seen.
        progress: called with (episodes done, episodes asked) after each; must return at once.
    """

    def __init__(
        self,
        source: EnvSource | MixedSource,
        agent: AgentFactory,
        config: RolloutConfig | None = None,
        *,
        seed: int,
        refill: Callable[[int], int] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.source = source
        self.config = config or RolloutConfig()
        self.stats = RolloutStats()
        """Sums since the engine was made, or since a fresh `RolloutStats` was put here."""

        self.progress = progress
        self.agent = agent
        """Makes the agents of the episodes that begin from now on."""

        self.seed = seed
        self.refill: Callable[[int], int] = refill or self._next_ordinal
        """Gives the ordinal of the task that replaces a dropped one."""

        self._largest = -1
        self._has_warned = False
        self._breaker = CircuitBreaker(self.config.failure_rate)
        self._pool = BlockingPool(
            self.config.threads or self.config.concurrency, name="turngym-env"
        )
        self._idle: dict[EnvSource, list[EnvHandle]] = {}
        self._loop: LoopThread | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._seats = Seats(self.config.concurrency)
        self._monitor = Shared(lambda: LoopMonitor(self.config.lag_s))
        self._closed = False

    def __enter__(self) -> "RolloutEngine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(self, ordinals: Sequence[int]) -> list[Group]:
        """Do what `collect` does, for callers that are not coroutines; Ctrl-C cancels it.

        Raises:
            concurrent.futures.CancelledError: `cancel` was called.
        """
        return self.wait(self.collect(ordinals))

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's own event loop."""
        return self._own_loop(coroutine).run(coroutine)

    def submit(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Begin a coroutine on the engine's own event loop; it must deal with its own errors."""
        self._own_loop(coroutine).submit(coroutine)

    def _own_loop(self, coroutine: Coroutine[Any, Any, Any]) -> LoopThread:
        if self._closed:
            coroutine.close()
            raise EngineError("the rollout engine is closed")
        if self._loop is None:
            self._loop = LoopThread("turngym-rollout")
        return self._loop

    @property
    def unfinished(self) -> int:
        """Episodes asked for that have not ended, waiting ones included."""
        return self._seats.unfinished

    @property
    def seat_s(self) -> float:
        """Seconds that seats were taken, summed over the `concurrency` seats, until now."""
        return self._seats.taken_s

    async def collect(self, ordinals: Sequence[int]) -> list[Group]:
        """Roll out `group_size` episodes for each task.

        Args:
            ordinals: positions in the source's endless task stream, each once.

        Returns:
            As many complete groups as asked, in the order asked; a group that was dropped is
            replaced by one of another task (see `Group.ordinal`).

        Raises:
            CircuitBreakerError: too many episodes failed for the world's fault.
            ConfigError: a setting is wrong, or an ordinal is asked twice.
            asyncio.CancelledError: `cancel` was called.
        """
        wanted = list(ordinals)
        if len(set(wanted)) != len(wanted):
            raise ConfigError(f"each ordinal may be asked once, got {wanted}")
        self._largest = max([self._largest, *wanted])
        groups: dict[int, Group] = {}
        open_slots = list(range(len(wanted)))
        while open_slots:
            found = await self._groups([wanted[slot] for slot in open_slots])
            groups.update(
                (slot, found[wanted[slot]]) for slot in open_slots if wanted[slot] in found
            )
            open_slots = [slot for slot in open_slots if slot not in groups]
            self.stats.dropped_groups += len(open_slots)
            for slot in open_slots:
                wanted[slot] = self._fresh_ordinal(wanted[slot], wanted)
        if len(groups) != len(wanted):
            raise EngineError(f"asked for {len(wanted)} groups, got {len(groups)}")
        self._warn_if_truncated(groups.values())
        return [groups[slot] for slot in range(len(wanted))]

    async def _groups(self, ordinals: Sequence[int]) -> dict[int, Group]:
        """Roll out groups; those with a failed member are missing from the result."""
        size = self.config.group_size
        members: dict[int, list[Trajectory]] = {ordinal: [] for ordinal in ordinals}
        failed: set[int] = set()

        def seats() -> Iterator[Seat]:
            for ordinal in ordinals:
                for sample in range(size):
                    if ordinal not in failed:
                        yield self.seat(ordinal, sample)

        def deliver(seat: Seat, trajectory: Trajectory) -> None:
            members[seat.ordinal].append(trajectory)
            if is_world_fault(trajectory.status):
                failed.add(seat.ordinal)

        await self.play(seats(), deliver, total=len(ordinals) * size)
        return {
            ordinal: self.group(ordinal, found)
            for ordinal, found in members.items()
            if ordinal not in failed
        }

    def group(self, ordinal: int, members: Sequence[Trajectory]) -> Group:
        """Put the episodes of a task together."""
        source = self.source.at(ordinal)
        return Group(
            id=members[0].group_id,
            task_id=members[0].task_id,
            env_id=source.env_id,
            trajectories=tuple(sorted(members, key=lambda trajectory: trajectory.sample)),
            rubric=source.reward_specs,
            ordinal=ordinal,
        )

    def seat(self, ordinal: int, sample: int) -> Seat:
        """Return the place of a sample of a task in this run."""
        self._largest = max(self._largest, ordinal)
        task = self.source.task(ordinal)
        return Seat(
            run_seed=self.seed,
            ordinal=ordinal,
            sample=sample,
            task=task,
            group_id=f"{ordinal}/{task.id}",
        )

    def _fresh_ordinal(self, dropped: int, taken: Sequence[int]) -> int:
        ordinal = self.refill(dropped)
        if ordinal in taken:
            raise ConfigError(f"refill gave ordinal {ordinal}, which was asked already: {taken}")
        return ordinal

    def _next_ordinal(self, dropped: int) -> int:
        self._largest += 1
        return self._largest

    async def play(
        self,
        seats: Iterable[Seat],
        deliver: Callable[[Seat, Trajectory], None],
        *,
        total: int,
    ) -> None:
        """Play one episode a seat and deliver each as it ends.

        At most `concurrency` episodes of the engine run at once, whichever call they belong to; who
        asked first begins first. Episodes that failed for the world's fault, retries included, are
        delivered too.

        Args:
            seats: taken one by one, when an episode can start.
            deliver: called in the event loop; must return at once.
            total: number of seats, for the progress.

        Raises:
            CircuitBreakerError: too many episodes failed for the world's fault.
            ConfigError: a setting is wrong.
        """
        if self._closed:
            raise EngineError("the rollout engine is closed")
        queue = iter(seats)
        done = 0

        async def work() -> None:
            nonlocal done
            for seat in queue:
                async with self._seats:
                    trajectory = await self._play(seat)
                self.stats.add(trajectory)
                deliver(seat, trajectory)
                done += 1
                self._seats.unfinished -= 1
                if self.progress is not None:
                    self.progress(done, total)

        self._seats.unfinished += total
        workers = [asyncio.create_task(work()) for _ in range(min(self.config.concurrency, total))]
        self._running.update(workers)
        try:
            with self._monitor:
                await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            self._running.difference_update(workers)
            self._seats.unfinished -= total - done

    async def _play(self, seat: Seat) -> Trajectory:
        """Play one episode, with retries."""
        for attempt in range(self.config.retries + 1):
            if attempt:
                self.stats.retries += 1
            trajectory = await self._attempt(seat)
            self._breaker.note(trajectory)
            if not is_world_fault(trajectory.status):
                break
            logger.warning(
                "task %r, sample %d, attempt %d: %s: %s",
                trajectory.task_id,
                trajectory.sample,
                attempt + 1,
                trajectory.status,
                trajectory.error,
            )
        return trajectory

    async def _attempt(self, seat: Seat) -> Trajectory:
        source = self.source.at(seat.ordinal)
        idle = self._idle.setdefault(source, [])
        env = idle.pop() if idle else self._new_env(source)
        try:
            trajectory = await run_episode(
                env,
                self.agent,
                seat,
                self.config,
                source.reward_specs,
                env_id=source.env_id,
            )
        except BaseException:
            env.discard()
            raise
        if is_world_fault(trajectory.status):
            env.discard()
        else:
            idle.append(env)
        return trajectory

    def _new_env(self, source: EnvSource) -> EnvHandle:
        return EnvHandle(source, self._pool, timeout_s=self.config.env_timeout_s)

    def _warn_if_truncated(self, groups: Iterable[Group]) -> None:
        """Warn of the first batch of which a limit ended many episodes."""
        episodes = [one for group in groups for one in group.trajectories]
        limits = Counter(one.status for one in episodes if one.truncated)
        if not self._has_warned and limits.total() > _TRUNCATED_WARNING * len(episodes):
            self._has_warned = True
            logger.warning(
                "%d of %d episodes were truncated (%s): raise max_tokens, max_context or the "
                "turn limit, or shorten the task; said once, see rollout/truncated_frac",
                limits.total(),
                len(episodes),
                ", ".join(f"{status} {count}" for status, count in limits.most_common()),
            )

    def cancel(self) -> None:
        """Cancel every running `collect`; thread-safe, returns at once."""
        for worker in tuple(self._running):
            worker.get_loop().call_soon_threadsafe(worker.cancel)

    def close(self) -> None:
        """Close the environments and end the threads. Idempotent."""
        if self._closed:
            return
        self._closed = True
        closer = threading.Thread(target=self._close_envs, name="turngym-close", daemon=True)
        closer.start()
        closer.join(self.config.env_timeout_s)
        self._pool.close()
        if self._loop is not None:
            self._loop.close()

    def _close_envs(self) -> None:
        for idle in self._idle.values():
            while idle:
                idle.pop().close()
        self.source.close()
