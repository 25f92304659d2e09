import asyncio
import contextlib
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from turngym.errors import SandboxError, SandboxUnavailableError, SessionClosedError
from turngym.sandboxes import (
    ExecResult,
    Limits,
    PoolConfig,
    SandboxDegradedWarning,
    SyncSandbox,
    create,
)
from turngym.sandboxes.checking.leaks import gone_within, marked, open_files, zombies_within

HANGING = {
    "loop": "while True: pass",
    "sleep": "import time; time.sleep(600)",
    "c_loop": "sum(range(10**12))",
    "deaf": "import signal, time\nsignal.signal(2, signal.SIG_IGN)\nwhile True: time.sleep(1)",
}


@pytest.fixture(scope="module")
def mark() -> str:
    return f"turngym-test-{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def sandbox(mark: str, first_in_line: None) -> Iterator[SyncSandbox]:
    with SyncSandbox("local", preload=("numpy",), env={"MARK": mark}) as running:
        yield running
    assert gone_within(mark, 2.0) == {}


def starved_s(mark: str) -> float:
    """Seconds for which this process and those of the sandbox were kept from running, so far."""
    tasks = [f"/proc/self/task/{thread}" for thread in os.listdir("/proc/self/task")]
    total = 0
    for task in (*tasks, *(f"/proc/{pid}" for pid in marked(mark))):
        with contextlib.suppress(OSError):
            total += int(Path(task, "schedstat").read_text().split()[1])
    return total / 1e9


def unhurried(run: object, limit_s: float, mark: str) -> tuple[ExecResult, float]:
    """Repeat a timed call while the machine starves it; then skip.

    A call may be later than allowed by no more than the time for which this process and the
    sandbox's were runnable and not run.
    """
    assert callable(run)
    for pause_s in (0.5, 1.0, 2.0, 4.0, 0.0):
        starved, start = starved_s(mark), time.monotonic()
        result = run()
        took = time.monotonic() - start
        late_s = took - limit_s - 0.3
        if not result.infra_fault and late_s <= 0:
            break
        starved = starved_s(mark) - starved + result.queued_s
        if not result.infra_fault and late_s > starved:
            break
        time.sleep(pause_s)
    else:
        load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
        if load > cores:
            pytest.skip(
                f"too busy a machine to tell: {starved:.2f} s kept waiting, load {load:.0f}"
            )
    return result, took


@pytest.mark.parametrize("kind", HANGING)
def test_time_limits_hold_to_a_third_of_a_second(
    sandbox: SyncSandbox, mark: str, kind: str
) -> None:
    with sandbox.session() as session:
        result, took = unhurried(lambda: session.execute(HANGING[kind], 0.5), 0.5, mark)
        assert (result.status, took <= 0.8) == ("timeout", True), (result, took)
        assert result.state_lost == (kind in ("c_loop", "deaf"))
        assert session.execute("1 + 1").result == "2"


def test_time_limits_hold_in_a_thread_and_under_asyncio(sandbox: SyncSandbox, mark: str) -> None:
    results: list[tuple[ExecResult, float]] = []

    def in_thread() -> None:
        with sandbox.session() as session:
            results.append(unhurried(lambda: session.execute(HANGING["loop"], 0.5), 0.5, mark))

    async def in_asyncio() -> None:
        await asyncio.to_thread(in_thread)

    with ThreadPoolExecutor(1) as executor:
        executor.submit(in_thread).result()  # raises what was raised there
    asyncio.run(in_asyncio())
    assert [(result.status, took <= 0.8) for result, took in results] == [("timeout", True)] * 2


def test_detached_children_die_with_the_cell_that_ran_out_of_time(
    sandbox: SyncSandbox, mark: str
) -> None:
    code = (
        "import subprocess\n"
        "for _ in range(3): subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "while True: pass"
    )
    with sandbox.session() as session:
        result, took = unhurried(lambda: session.execute(code, 1.0), 1.2, mark)
        assert (result.status, took <= 1.5) == ("timeout", True), (result, took)
        seen = session.execute("import os; [n for n in os.listdir('/proc') if n.isdigit()]")
        assert seen.result == "['1', '2']"


def test_a_child_that_holds_stdout_does_not_hold_the_result(
    sandbox: SyncSandbox, mark: str
) -> None:
    code = "import subprocess\nsubprocess.Popen(['sleep', '60'])\nprint('kept')"
    result, took = unhurried(lambda: sandbox.run(code), 0.2, mark)
    assert (result.status, result.stdout, took <= 0.5) == ("ok", "kept\n", True), took


@pytest.mark.parametrize("hard_mb", [64, 4096])
def test_a_gigabyte_of_output_stays_out_of_this_process(sandbox: SyncSandbox, hard_mb: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code = "print('head')\nfor _ in range(1024): print('x' * (1 << 20))\nprint('tail')"
    with sandbox.session(limits=Limits(output_hard_mb=hard_mb)) as session:
        result = session.execute(code, 60.0)
        assert session.execute("1 + 1").result == "2"
    assert len(result.stdout) < 70_000
    assert result.stdout.startswith("head\n")
    assert result.status == ("output_limit" if hard_mb == 64 else "ok")
    if hard_mb > 64:
        assert (result.stdout_bytes > 1 << 30, result.stdout[-5:]) == (True, "tail\n")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_two_interpreters_used_from_two_threads_never_mix(sandbox: SyncSandbox) -> None:
    stdout, found = sys.stdout, {}

    def talk(word: str) -> None:
        with sandbox.session() as session:
            text = "".join(session.execute(f"print('{word}')").stdout for _ in range(300))
            found[word] = (text.count("A"), text.count("B"))

    threads = [threading.Thread(target=talk, args=(word,)) for word in "AB"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"A": (300, 0), "B": (0, 300)}
    assert sys.stdout is stdout


def test_warnings_on_stderr_do_not_hide_stdout(sandbox: SyncSandbox) -> None:
    result = sandbox.run("import warnings; warnings.warn('careful'); print(7)")
    assert (result.status, result.stdout) == ("ok", "7\n")
    assert "careful" in result.stderr


def test_nothing_of_this_process_reaches_a_session(
    sandbox: SyncSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNGYM_TEST_SECRET", "1")
    code = "import os, sys; (sorted(os.environ), 'turngym' in sys.modules, os.getcwd())"
    with SyncSandbox("local", preload=()) as fresh, fresh.session() as session:
        environment, modules, folder = eval(session.execute(code).result or "")
    assert not {name for name in environment if "TURNGYM" in name or "PYTEST" in name}
    assert (modules, folder) == (False, "/workspace")


def test_sessions_draw_different_random_numbers(sandbox: SyncSandbox) -> None:
    drawn = set()
    for _ in range(4):
        with sandbox.session() as session:
            drawn.add(session.execute("import random, numpy\nrandom.random()").result)
            drawn.add(session.execute("float(numpy.random.rand())").result)
    assert len(drawn) == 8


def test_using_a_sandbox_leaves_this_process_as_it_was(mark: str) -> None:
    def state() -> tuple[object, ...]:
        handlers = [signal.getsignal(number) for number in signal.valid_signals()]
        return handlers, os.getcwd(), sys.stdout, sys.stderr, signal.getitimer(signal.ITIMER_REAL)

    before, files = state(), open_files()
    with SyncSandbox("local", preload=(), env={"MARK": mark + "x"}) as sandbox:
        for _ in range(20):
            with sandbox.session() as session:
                session.execute("1")
        assert zombies_within(mark + "x", 2.0) == set()
    gc.collect()
    assert state() == before
    assert open_files() <= files
    assert gone_within(mark + "x", 2.0) == {}


@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "1 / 0", "os.kill(os.getpid(), 9)"])
def test_nothing_survives_the_parent_however_it_ends(ending: str, mark: str) -> None:
    own = f"{mark}-{uuid.uuid4().hex}"
    code = f"""
import asyncio, os, warnings
warnings.simplefilter("ignore")
from turngym.sandboxes import create
async def main():
    sandbox = await create("local", preload=(), env={{"MARK": "{own}"}})
    sessions = [await sandbox.session() for _ in range(3)]
    await sessions[0].execute("import subprocess; subprocess.Popen(['sleep', '600'])")
    copy = await sessions[1].fork()
    running = asyncio.create_task(sessions[2].execute("while True: pass", 60.0))
    await asyncio.sleep(0.2)
    print(len(os.listdir("/proc")), flush=True)
    {ending}
asyncio.run(main())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip().isdigit(), run.stderr
    assert gone_within(own, 2.0) == {}


def test_cancelling_a_start_leaves_nothing_behind(mark: str) -> None:
    own = f"{mark}-cancel"

    async def scenario() -> None:
        sandbox = await create("local", preload=(), env={"MARK": own})
        launcher_and_zygote = 2
        for delay_s in (0.0, 0.001, 0.003, 0.006, 0.01):
            task = asyncio.create_task(sandbox.session())
            await asyncio.sleep(delay_s)
            task.cancel()
            for outcome in await asyncio.gather(task, return_exceptions=True):
                if not isinstance(outcome, BaseException):
                    await outcome.close()
        deadline = time.monotonic() + 2.0
        while len(marked(own)) > launcher_and_zygote and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        assert len(marked(own)) == launcher_and_zygote
        await sandbox.aclose()

    asyncio.run(scenario())
    assert gone_within(own, 2.0) == {}


def test_closing_the_sandbox_ends_running_cells() -> None:
    async def scenario() -> None:
        sandbox = await create("local", preload=())
        session = await sandbox.session()
        running = asyncio.create_task(session.execute("while True: pass", 60.0))
        await asyncio.sleep(0.2)
        await sandbox.aclose()
        with pytest.raises(SessionClosedError):
            await asyncio.wait_for(running, 5.0)

    asyncio.run(scenario())


def test_strict_isolation_is_refused_where_namespaces_are_missing() -> None:
    code = (
        "import asyncio; from turngym.sandboxes import create\n"
        "from turngym.sandboxes.inside.seccomp import install; install()\n"
        "asyncio.run(create('local', preload=(), isolation='strict'))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert SandboxUnavailableError.__name__ in run.stderr
    assert "namespaces: PermissionError" in run.stderr


def test_running_unconfined_needs_to_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with SyncSandbox("local", isolation="none", preload=()) as sandbox:
        assert sandbox.guarantees.level == "none"
        assert sandbox.run("print(1)").stdout == "1\n"
    assert issubclass(SandboxDegradedWarning, UserWarning)


def test_a_dead_zygote_is_an_error_and_not_a_hang(mark: str) -> None:
    own = f"{mark}-zygote"

    async def scenario() -> None:
        sandbox = await create("local", preload=(), env={"MARK": own})
        for pid in marked(own):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(SandboxError):
            await asyncio.wait_for(sandbox.session(), 10.0)
        await sandbox.aclose()

    asyncio.run(scenario())


def test_sessions_beyond_the_bound_wait_their_turn() -> None:
    async def scenario() -> None:
        sandbox = await create("local", preload=(), pool=PoolConfig(max_sessions=2, min_idle=1))

        async def one(number: int) -> str | None:
            session = await sandbox.session()
            try:
                return (await session.execute(f"{number} * 2", 20.0)).result
            finally:
                await session.close()

        found = await asyncio.gather(*(one(n) for n in range(12)))
        assert found == [str(2 * n) for n in range(12)]
        await sandbox.aclose()

    asyncio.run(scenario())


def test_sleeping_cells_do_not_keep_others_waiting() -> None:
    async def scenario() -> None:
        sandbox = await create("local", preload=(), pool=PoolConfig(max_executing=1))
        sleeper, worker = await sandbox.session(), await sandbox.session()
        sleeping = asyncio.create_task(sleeper.execute("import time; time.sleep(600)", 600.0))
        await asyncio.sleep(0.1)
        assert (await asyncio.wait_for(worker.execute("1 + 1"), 30.0)).result == "2"
        await sleeper.interrupt()
        assert (await sleeping).status == "timeout"
        await sandbox.aclose()

    asyncio.run(scenario())
