import asyncio
import signal
import subprocess
import sys
import threading
import time

import pytest

from turngym.agents.threads import BlockingPool, CallTimeoutError
from turngym.errors import EngineError


def test_a_call_gives_its_value_or_its_error() -> None:
    async def main() -> None:
        pool = BlockingPool(1, name="test-pool")
        assert await pool.call(lambda: threading.current_thread().name) == "test-pool"
        with pytest.raises(ZeroDivisionError):
            await pool.call(lambda: 1 // 0)
        pool.close()
        with pytest.raises(EngineError, match="closed"):
            await pool.call(lambda: 1)

    asyncio.run(main())


def test_waiting_for_a_free_thread_does_not_count_as_running() -> None:
    async def main() -> None:
        pool = BlockingPool(1, name="test-pool")
        calls = (pool.call(lambda: time.sleep(0.2), timeout_s=0.3) for _ in range(4))
        started = time.monotonic()
        await asyncio.gather(*calls)
        assert time.monotonic() - started >= 0.8
        pool.close()

    asyncio.run(main())


def test_a_hung_call_is_abandoned_and_its_thread_replaced() -> None:
    async def main() -> None:
        pool = BlockingPool(1, name="test-pool")
        release = threading.Event()
        with pytest.raises(CallTimeoutError, match=r"still running after 0\.1 s"):
            await pool.call(release.wait, timeout_s=0.1)
        assert pool.abandoned == 1
        assert await pool.call(lambda: 5, timeout_s=1.0) == 5
        release.set()
        while pool.abandoned:
            await asyncio.sleep(0.01)
        pool.close()

    asyncio.run(main())


def test_a_pool_full_of_hung_threads_refuses_instead_of_growing() -> None:
    async def main() -> None:
        pool = BlockingPool(1, name="test-pool", max_abandoned=2)
        release = threading.Event()
        for _ in range(2):
            with pytest.raises(CallTimeoutError):
                await pool.call(release.wait, timeout_s=0.05)
        with pytest.raises(EngineError, match=r"2 calls .* hang"):
            await pool.call(lambda: 1)
        release.set()
        pool.close()

    asyncio.run(main())


def test_a_cancelled_call_that_has_not_begun_never_runs() -> None:
    ran: list[int] = []

    async def main() -> None:
        pool = BlockingPool(1, name="test-pool")
        first = asyncio.create_task(pool.call(lambda: time.sleep(0.2)))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(pool.call(lambda: ran.append(1)))
        await asyncio.sleep(0)
        second.cancel()
        await first
        assert await pool.call(lambda: 7) == 7
        pool.close()

    asyncio.run(main())
    assert ran == []


def test_no_call_is_lost_in_a_crowd_of_short_long_failing_and_cancelled_ones() -> None:
    async def one(pool: BlockingPool, number: int) -> int:
        if number % 7 == 0:
            task = asyncio.create_task(pool.call(lambda: number))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return number
        if number % 5 == 0:
            with pytest.raises(ZeroDivisionError):
                await pool.call(lambda: 1 // 0, timeout_s=5.0)
            return number

        def work() -> int:
            time.sleep(0.002 if number % 3 == 0 else 0.0)
            return number

        return await pool.call(work, timeout_s=5.0)

    async def main() -> None:
        pool = BlockingPool(8, name="test-pool")
        for _ in range(5):
            numbers = await asyncio.gather(*(one(pool, number) for number in range(300)))
            assert numbers == list(range(300))
        pool.close()

    asyncio.run(main())


def test_blocking_calls_run_side_by_side() -> None:
    async def main() -> None:
        pool = BlockingPool(32, name="test-pool")
        barrier = threading.Barrier(32)
        await asyncio.gather(*(pool.call(lambda: barrier.wait(10)) for _ in range(32)))
        pool.close()

    asyncio.run(main())


INTERRUPTED = """
import asyncio, sys
from turngym.agents.threads import LoopThread

async def main():
    try:
        print("running", flush=True)
        await asyncio.sleep(60)
    finally:
        print("cleaned up", flush=True)

loop = LoopThread("test-loop")
try:
    loop.run(main())
except KeyboardInterrupt:
    print("interrupted", flush=True)
loop.close()
"""


def test_ctrl_c_cancels_the_coroutine_waits_for_its_clean_up_and_comes_through() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
    assert out == "cleaned up\ninterrupted\n"
    assert process.returncode == 0
