"""Sessions in stock: bounded, first come first served, warmed up in advance."""

import asyncio
import collections
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from turngym.errors import ConfigError, SandboxError, SessionLostError
from turngym.sandboxes.base import Limits, PoolConfig

__all__ = ["PoolMetrics", "SessionPool", "Turn"]


class Poolable(Protocol):
    """What the pool needs of a session."""

    @property
    def limits(self) -> Limits:
        """The limits it was started with."""
        ...

    async def ping(self) -> None:
        """Return when alive, raise SessionLostError otherwise."""
        ...

    async def close(self) -> None:
        """End it."""
        ...


S = TypeVar("S", bound=Poolable)
Start = Callable[[Limits, Callable[[S], None]], Awaitable[S]]
"""Starts a session with limits; the second argument is to be called when it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMetrics:
    """Counters of a pool since its start, and its state now."""

    alive: int
    """Sessions alive: in use, idle or starting."""

    idle: int
    waiting: int
    """Requests for a session that wait for another one to end."""

    executing: int
    spawned: int
    reused: int
    """Requests served from stock. Sessions themselves are never used twice."""

    killed: int
    """Sessions ended."""

    unhealthy: int
    """Stocked sessions found dead."""

    failed: int
    """Starts that failed."""

    queued_s: float
    """Seconds requests and cells spent waiting, together."""


class Turn:
    """A place among the executing cells: waits for it on entry, gives it up at the exit."""

    def __init__(self, pool: "SessionPool[Any]") -> None:
        self._pool = pool
        self._held = False
        self.waited_s = 0.0

    async def __aenter__(self) -> "Turn":
        start = time.monotonic()
        await self._pool._slots.acquire()
        self._held = True
        self.waited_s = time.monotonic() - start
        self._pool._queued_s += self.waited_s
        self._pool._executing += 1
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.release()

    def release(self) -> None:
        """Let the next cell start, for example because this one only sleeps. Idempotent."""
        if self._held:
            self._held = False
            self._pool._executing -= 1
            self._pool._slots.release()


class SessionPool(Generic[S]):
    """The sessions of one backend.

    Args:
        config: sizes.
        limits: of the sessions kept in stock.
        start: starts one session.
    """

    def __init__(self, config: PoolConfig, limits: Limits, start: Start[S]) -> None:
        if config.max_sessions < 1 or not 0 <= config.min_idle <= config.max_sessions:
            raise ConfigError(
                "pool needs max_sessions >= 1 and 0 <= min_idle <= max_sessions, got "
                f"max_sessions={config.max_sessions}, min_idle={config.min_idle}"
            )
        if config.max_executing < 0:
            raise ConfigError(f"pool.max_executing must be >= 0, got {config.max_executing}")
        self._config = config
        self._limits = limits
        self._start = start
        self._idle: collections.deque[S] = collections.deque()
        self._used: set[S] = set()
        self._free = asyncio.Semaphore(config.max_sessions)
        self._slots = asyncio.Semaphore(config.max_executing or len(os.sched_getaffinity(0)))
        self._stocking = asyncio.Lock()
        self._refilling: asyncio.Task[None] | None = None
        self._starting = self._waiting = self._executing = 0
        self._spawned = self._reused = self._killed = self._unhealthy = self._failed = 0
        self._queued_s = 0.0
        self._closed = False

    @property
    def metrics(self) -> PoolMetrics:
        """Counters and state."""
        return PoolMetrics(
            alive=len(self._used) + len(self._idle) + self._starting,
            idle=len(self._idle),
            waiting=self._waiting,
            executing=self._executing,
            spawned=self._spawned,
            reused=self._reused,
            killed=self._killed,
            unhealthy=self._unhealthy,
            failed=self._failed,
            queued_s=self._queued_s,
        )

    def slot(self) -> Turn:
        """One of the places for executing cells, to be held with ``async with``."""
        return Turn(self)

    async def acquire(self, limits: Limits | None = None) -> S:
        """Return a fresh session; waits while `max_sessions` are in use.

        Raises:
            SandboxCreateError: it could not be started.
            SandboxError: the pool is closed.
        """
        start = time.monotonic()
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
            self._queued_s += time.monotonic() - start
        try:
            self._check_open()
            session = await self._from_stock(limits or self._limits)
            if session is None:
                session = await self._spawn(limits or self._limits)
            if self._closed:
                await session.close()
                self._check_open()
        except BaseException:
            self._free.release()
            raise
        self._used.add(session)
        self._refill()
        return session

    async def adopt(self, make: Start[S], limits: Limits) -> S:
        """Add a session made from another one; never waits, since the caller holds that one.

        Raises:
            SandboxError: `max_sessions` are in use.
        """
        self._check_open()
        if self._free.locked():
            raise SandboxError(
                f"all {self._config.max_sessions} sessions are in use; a fork needs one more: "
                "raise pool.max_sessions or close sessions first"
            )
        await self._free.acquire()
        try:
            session = await make(limits, self._release)
        except BaseException:
            self._free.release()
            raise
        self._spawned += 1
        self._used.add(session)
        return session

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("the sandbox is closed; create a new one")

    async def _from_stock(self, limits: Limits) -> S | None:
        while self._idle and limits == self._limits:
            session = self._idle.popleft()
            try:
                await session.ping()
            except (SessionLostError, OSError):
                self._unhealthy += 1
                await session.close()
                continue
            except BaseException:
                await session.close()
                raise
            self._reused += 1
            return session
        return None

    async def _spawn(self, limits: Limits) -> S:
        if self.metrics.alive >= self._config.max_sessions and self._idle:
            await self._idle.popleft().close()
        self._starting += 1
        try:
            session = await self._start(limits, self._release)
        except BaseException:
            self._failed += 1
            raise
        finally:
            self._starting -= 1
        self._spawned += 1
        return session

    def _release(self, session: S) -> None:
        self._killed += 1
        if session in self._used:
            self._used.discard(session)
            self._free.release()
        self._refill()

    def _refill(self) -> None:
        """Top the stock up in the background."""
        short = len(self._idle) < self._config.min_idle
        if short and not self._closed and (self._refilling is None or self._refilling.done()):
            self._refilling = asyncio.create_task(self._stock_up())

    async def warm_up(self) -> None:
        """Fill the stock; raises what starting a session raises."""
        # Two that fill it side by side would each add the last one.
        async with self._stocking:
            while len(self._idle) < self._config.min_idle and not self._closed:
                if self.metrics.alive >= self._config.max_sessions:
                    return
                self._idle.append(await self._spawn(self._limits))

    async def _stock_up(self) -> None:
        with contextlib.suppress(SandboxError):
            await self.warm_up()

    async def aclose(self) -> None:
        """End every session. Idempotent."""
        self._closed = True
        if self._refilling is not None:
            self._refilling.cancel()
            await asyncio.gather(self._refilling, return_exceptions=True)
        sessions = [*self._used, *self._idle]
        self._idle.clear()
        await asyncio.gather(*(session.close() for session in sessions), return_exceptions=True)
