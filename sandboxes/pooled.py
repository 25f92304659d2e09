"""What backends that speak the driver's protocol share: sessions from a pool, one-shot programs."""

from typing import Generic, TypeVar

from turngym.sandboxes.base import ExecResult, Limits, PoolConfig
from turngym.sandboxes.driver_session import DriverSession
from turngym.sandboxes.pool import PoolMetrics, SessionPool, Start

__all__ = ["PooledSandbox"]

D = TypeVar("D", bound=DriverSession)


class PooledSandbox(Generic[D]):
    """A `Sandbox` without its guarantees and its end.

    Args:
        limits: defaults of every session.
        pool: sizes.
        start: starts one session.
    """

    def __init__(self, limits: Limits, pool: PoolConfig, start: Start[D]) -> None:
        self._limits = limits
        self._pool = SessionPool(pool, limits, start)

    @property
    def limits(self) -> Limits:
        """Defaults of new sessions."""
        return self._limits

    @property
    def metrics(self) -> PoolMetrics:
        """Counters of the pool."""
        return self._pool.metrics

    async def session(self, *, limits: Limits | None = None) -> D:
        """Return a fresh session; waits while the pool is exhausted."""
        return await self._pool.acquire(limits)

    async def run(
        self,
        code: str,
        *,
        files: dict[str, bytes] | None = None,
        argv: tuple[str, ...] = (),
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> ExecResult:
        """Run a program in a fresh one-shot session; see `Sandbox.run`."""
        session = await self._pool.acquire(limits)
        try:
            for path, data in (files or {}).items():
                await session.write_file(path, data)
            return await session.run_program(code, argv, stdin, session.limits.wall_s)
        finally:
            await session.close()
