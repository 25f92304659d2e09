import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from turngym.errors import ConfigError, RewardError
from turngym.rewards.workers import WorkerPool

TARGET = """
import os, signal, time

def act(do="echo", value=None):
    if do == "sleep":
        time.sleep(value)
    if do == "ignore everything and sleep":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(value)
    if do == "allocate":
        bytearray(value)
    if do == "die":
        os._exit(3)
    if do == "raise":
        raise ValueError(value)
    if do == "pid":
        return os.getpid()
    return value
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path with the functions that the workers run."""
    (tmp_path / "acting.py").write_text(TARGET)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def pool(folder: Path) -> Iterator[WorkerPool]:
    pool = WorkerPool("acting:act", size=2, memory_mb=256, probe={"value": 1})
    yield pool
    pool.close()


def test_a_call_returns_the_result_and_its_times(pool: WorkerPool) -> None:
    outcome = pool.run({"value": ["é", 1, None]}, deadline_s=5)
    assert (outcome.status, outcome.result) == ("done", ["é", 1, None])
    assert 0 <= outcome.seconds < 5
    assert outcome.queued_s > 0


def test_a_call_that_takes_too_long_is_killed_whatever_it_ignores(pool: WorkerPool) -> None:
    for do in ("sleep", "ignore everything and sleep"):
        start = time.monotonic()
        outcome = pool.run({"do": do, "value": 60}, deadline_s=0.3)
        assert outcome.status == "timeout"
        assert 0.3 <= outcome.seconds <= 0.6
        assert time.monotonic() - start <= outcome.queued_s + 0.6


def test_a_call_that_takes_too_much_memory_fails_alone(pool: WorkerPool) -> None:
    assert pool.run({"do": "allocate", "value": 2**30}, deadline_s=5).status == "memory"
    assert pool.run({"value": 1}, deadline_s=5).result == 1


def test_a_worker_that_dies_or_raises_is_an_error_of_that_call_only(pool: WorkerPool) -> None:
    died = pool.run({"do": "die"}, deadline_s=5)
    raised = pool.run({"do": "raise", "value": "no"}, deadline_s=5)
    assert (died.status, died.detail) == ("error", "the worker died on the call")
    assert (raised.status, raised.detail) == ("error", "ValueError: no")
    assert pool.run({"value": 1}, deadline_s=5).result == 1


def test_a_worker_killed_while_idle_is_replaced(pool: WorkerPool) -> None:
    first = pool.run({"do": "pid"}, deadline_s=5).result
    os.kill(first, signal.SIGKILL)
    second = pool.run({"do": "pid"}, deadline_s=5)
    assert second.status == "done"
    assert second.result != first


def test_the_pool_recovers_when_the_process_that_forks_is_killed(pool: WorkerPool) -> None:
    first = pool.run({"do": "pid"}, deadline_s=5).result
    parent = int(Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)
    end = time.monotonic() + 5
    while Path(f"/proc/{first}").exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert pool.run({"do": "pid"}, deadline_s=5).status == "done"


def test_workers_are_reused_and_recycled(folder: Path) -> None:
    pool = WorkerPool("acting:act", size=1, recycle_after=2)
    pids = [pool.run({"do": "pid"}, deadline_s=5).result for _ in range(4)]
    pool.close()
    assert pids[0] == pids[1] != pids[2] == pids[3]


def test_no_more_workers_run_than_the_size_allows(pool: WorkerPool) -> None:
    async def burst() -> list[int]:
        calls = [pool.arun({"do": "pid"}, deadline_s=5) for _ in range(20)]
        return [outcome.result for outcome in await asyncio.gather(*calls)]

    assert 1 <= len(set(asyncio.run(burst()))) <= 2


def test_waiting_for_a_worker_is_told_apart_from_working(folder: Path) -> None:
    pool = WorkerPool("acting:act", size=1)
    pool.run({}, deadline_s=5)

    async def both() -> list[tuple[str, float, float]]:
        call = {"do": "sleep", "value": 0.4}
        outcomes = await asyncio.gather(*[pool.arun(call, deadline_s=0.7) for _ in range(2)])
        return [(outcome.status, outcome.seconds, outcome.queued_s) for outcome in outcomes]

    first, second = asyncio.run(both())
    pool.close()
    assert first[0] == second[0] == "done"
    assert second[2] >= 0.39


def test_the_event_loop_keeps_turning(pool: WorkerPool) -> None:
    async def ticks() -> int:
        call = asyncio.create_task(pool.arun({"do": "sleep", "value": 0.5}, deadline_s=5))
        count = 0
        while not call.done():
            await asyncio.sleep(0.02)
            count += 1
        return count

    assert asyncio.run(ticks()) >= 5


def test_a_pool_outlives_the_thread_that_started_it(pool: WorkerPool) -> None:
    pids: list[int] = []
    thread = threading.Thread(
        target=lambda: pids.append(pool.run({"do": "pid"}, deadline_s=5).result)
    )
    thread.start()
    thread.join()
    time.sleep(0.1)
    assert pool.run({"do": "pid"}, deadline_s=5).result == pids[0]


def test_a_closed_pool_starts_again(pool: WorkerPool) -> None:
    pool.run({}, deadline_s=5)
    pool.close()
    assert pool.run({"value": 2}, deadline_s=5).result == 2


def test_a_target_that_cannot_be_imported_is_named(folder: Path) -> None:
    pool = WorkerPool("no_such_module:act", size=1)
    with pytest.raises(RewardError, match=r"cannot import no_such_module:act: No module named"):
        pool.run({}, deadline_s=5)


def test_a_worker_that_fails_its_self_test_is_never_used(folder: Path) -> None:
    pool = WorkerPool("acting:act", size=1, probe={"do": "raise", "value": "unfit"})
    with pytest.raises(RewardError, match=r"self-test: error ValueError: unfit"):
        pool.run({}, deadline_s=5)
    pool.close()


def test_limits_that_are_not_positive_are_refused(pool: WorkerPool) -> None:
    with pytest.raises(ConfigError, match="deadline_s must be positive, got 0"):
        pool.run({}, deadline_s=0)
    with pytest.raises(ConfigError, match="size must be at least 1, got 0"):
        WorkerPool("acting:act", size=0)
