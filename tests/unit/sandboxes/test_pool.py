import asyncio
from collections.abc import Callable

import pytest

from turngym.errors import ConfigError, SandboxCreateError, SandboxError, SessionLostError
from turngym.sandboxes import Limits, PoolConfig
from turngym.sandboxes.pool import SessionPool


class FakeSession:
    def __init__(self, limits: Limits, on_close: Callable[["FakeSession"], None]) -> None:
        self.limits = limits
        self._on_close = on_close
        self.dead = self.closed = False

    async def ping(self) -> None:
        if self.dead:
            raise SessionLostError("dead")

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._on_close(self)


class Factory:
    def __init__(self) -> None:
        self.made: list[FakeSession] = []
        self.fail = False

    async def __call__(
        self, limits: Limits, on_close: Callable[[FakeSession], None]
    ) -> FakeSession:
        await asyncio.sleep(0)
        if self.fail:
            raise SandboxCreateError("no")
        self.made.append(FakeSession(limits, on_close))
        return self.made[-1]


def new_pool(factory: Factory, **sizes: int) -> SessionPool[FakeSession]:
    return SessionPool(PoolConfig(**sizes), Limits(), factory)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_requests_beyond_the_bound_wait_first_come_first_served() -> None:
    async def scenario() -> None:
        pool = new_pool(factory := Factory(), max_sessions=2)
        held = [await pool.acquire() for _ in range(2)]
        order: list[int] = []

        async def ask(number: int) -> FakeSession:
            session = await pool.acquire()
            order.append(number)
            return session

        tasks = [asyncio.create_task(ask(n)) for n in range(3)]
        await settle()
        assert (order, pool.metrics.waiting, pool.metrics.alive) == ([], 3, 2)
        for session in held:
            await session.close()
            await settle()
        assert order == [0, 1]
        await (await tasks[0]).close()
        await tasks[2]
        assert (order, len(factory.made), pool.metrics.killed) == ([0, 1, 2], 5, 3)

    asyncio.run(scenario())


def test_stocked_sessions_are_used_checked_and_replaced() -> None:
    async def scenario() -> None:
        pool = new_pool(factory := Factory(), min_idle=2, max_sessions=4)
        await pool.warm_up()
        assert (pool.metrics.idle, pool.metrics.spawned) == (2, 2)
        factory.made[0].dead = True
        assert await pool.acquire() is factory.made[1]
        await settle()
        metrics = pool.metrics
        assert (metrics.unhealthy, metrics.reused, metrics.idle) == (1, 1, 2)
        assert factory.made[0].closed

    asyncio.run(scenario())


def test_warming_up_beside_the_background_refill_stocks_no_more_than_asked() -> None:
    async def scenario() -> None:
        pool = new_pool(factory := Factory(), min_idle=2, max_sessions=8)
        await (await pool.acquire()).close()
        await asyncio.gather(pool.warm_up(), pool.warm_up())
        await settle()
        assert (pool.metrics.idle, pool.metrics.spawned, len(factory.made)) == (2, 3, 3)

    asyncio.run(scenario())


def test_a_session_with_limits_of_its_own_is_never_taken_from_stock() -> None:
    async def scenario() -> None:
        pool = new_pool(factory := Factory(), min_idle=1, max_sessions=1)
        await pool.warm_up()
        session = await pool.acquire(Limits(memory_mb=7))
        assert (session.limits.memory_mb, factory.made[0].closed) == (7, True)
        assert pool.metrics.alive == 1

    asyncio.run(scenario())


def test_a_failed_or_cancelled_start_gives_its_place_back() -> None:
    async def scenario() -> None:
        pool = new_pool(factory := Factory(), max_sessions=1)
        factory.fail = True
        with pytest.raises(SandboxCreateError):
            await pool.acquire()
        factory.fail = False
        task = asyncio.create_task(pool.acquire())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.wait_for(pool.acquire(), 1)
        assert pool.metrics.failed == 2

    asyncio.run(scenario())


def test_a_fork_is_refused_rather_than_made_to_wait() -> None:
    async def scenario() -> None:
        pool = new_pool(factory := Factory(), max_sessions=1)
        await pool.acquire()
        with pytest.raises(SandboxError, match=r"raise pool\.max_sessions"):
            await pool.adopt(factory, Limits())

    asyncio.run(scenario())


def test_cells_share_a_bounded_number_of_slots() -> None:
    async def scenario() -> None:
        pool = new_pool(Factory(), max_executing=2)
        peak = 0

        async def cell() -> None:
            nonlocal peak
            async with pool.slot():
                peak = max(peak, pool.metrics.executing)
                await asyncio.sleep(0.001)

        await asyncio.gather(*(cell() for _ in range(20)))
        assert (peak, pool.metrics.executing) == (2, 0)

    asyncio.run(scenario())


def test_a_sleeping_cell_gives_its_slot_away_and_only_once() -> None:
    async def scenario() -> None:
        pool = new_pool(Factory(), max_executing=1)
        async with pool.slot() as first:
            first.release()
            first.release()
            async with pool.slot() as second:
                assert (second.waited_s < 1.0, pool.metrics.executing) == (True, 1)
        assert pool.metrics.executing == 0
        async with pool.slot():
            assert pool.metrics.executing == 1

    asyncio.run(scenario())


def test_closing_ends_every_session_and_refuses_new_ones() -> None:
    async def scenario() -> None:
        pool = new_pool(factory := Factory(), min_idle=1, max_sessions=3)
        await pool.warm_up()
        await pool.acquire()
        await pool.aclose()
        await pool.aclose()
        assert all(session.closed for session in factory.made)
        with pytest.raises(SandboxError, match="closed"):
            await pool.acquire()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "sizes", [{"max_sessions": 0}, {"min_idle": 3, "max_sessions": 2}, {"max_executing": -1}]
)
def test_impossible_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="pool"):
        new_pool(Factory(), **sizes)
