"""The local sandbox against bare `python -c`, and against what else runs model-written code.

    python benchmarks/sandbox.py [--rounds 40] [--heavy-rounds 8] [--sessions 200]

Every round measures each contender once, in turn, so that a busy machine disturbs all alike; shown
are median, 99th percentile and the median of the ratios to bare `python -c` in the same round.
Contenders that are not installed are named with the command that brings them.
"""

import argparse
import asyncio
import importlib.util
import logging
import shlex
import shutil
import statistics
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from turngym.sandboxes import PoolConfig, Sandbox, Session, create
from turngym.sandboxes.checking.leaks import marked

Cell = Callable[[str], Awaitable[None]]
HEAVY = "import numpy, sympy; numpy.zeros(1); sympy.Symbol('x')"
BWRAP = [
    "bwrap", "--unshare-all", "--die-with-parent", "--proc", "/proc", "--dev", "/dev",
    "--tmpfs", "/tmp", "--ro-bind", "/usr", "/usr",
]  # fmt: skip


@dataclass(frozen=True)
class Contender:
    """Something that runs cells; `start` returns how to run one and how to stop."""

    name: str
    start: Callable[[], Awaitable[tuple[Cell, Callable[[], Awaitable[None]]]]]
    needs: Callable[[], bool] = lambda: True
    install: str = ""


async def nothing() -> None:
    """Stop what needs no stopping."""


async def run(*command: str) -> None:
    """Run a process to its end; it must succeed."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    _, errors = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{command[0]} failed: {errors.decode()[-300:]}")


async def bare() -> tuple[Cell, Callable[[], Awaitable[None]]]:
    """`python -c` for every cell."""
    return lambda code: run(sys.executable, "-I", "-c", code), nothing


async def bubblewrap() -> tuple[Cell, Callable[[], Awaitable[None]]]:
    """Python in bubblewrap for every cell."""
    command = list(BWRAP)
    for path in {sys.prefix, sys.base_prefix, "/lib", "/lib64"}:
        command += ["--ro-bind", path, path]
    return lambda code: run(*command, sys.executable, "-I", "-c", code), nothing


async def jupyter() -> tuple[Cell, Callable[[], Awaitable[None]]]:
    """A kernel of jupyter_client."""
    manager = import_module("jupyter_client.manager").AsyncKernelManager(kernel_name="python3")
    await manager.start_kernel()
    client = manager.client()
    client.start_channels()
    await client.wait_for_ready(timeout=60)

    async def cell(code: str) -> None:
        await client.execute_interactive(code, timeout=60, output_hook=lambda message: None)

    async def stop() -> None:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)

    return cell, stop


async def gem() -> tuple[Cell, Callable[[], Awaitable[None]]]:
    """The code tool of GEM."""
    run_python = import_module("gem.utils.sandbox").run_python

    async def cell(code: str) -> None:
        await asyncio.to_thread(run_python, code, "none")

    return cell, nothing


async def sandlock() -> tuple[Cell, Callable[[], Awaitable[None]]]:
    """Sandlock, a process for every cell."""
    lock_of = import_module("sandlock").Sandbox
    readable = ["/usr", "/lib", "/lib64", "/etc", "/proc", "/dev", sys.prefix, sys.base_prefix]

    async def cell(code: str) -> None:
        lock = lock_of(fs_readable=readable)
        result = await asyncio.to_thread(lock.run, [sys.executable, "-I", "-c", code], 60.0)
        if not result.success:
            raise RuntimeError(f"sandlock failed: {result}")

    return cell, nothing


async def swe_rex() -> tuple[Cell, Callable[[], Awaitable[None]]]:
    """A bash session of SWE-ReX, `python -c` for every cell."""
    words = import_module("swerex.runtime.abstract")
    local = import_module("swerex.deployment.local")
    deployment = local.LocalDeployment(logger=logging.getLogger("quiet"))
    await deployment.start()
    await deployment.runtime.create_session(words.CreateBashSessionRequest())

    async def cell(code: str) -> None:
        command = shlex.join([sys.executable, "-I", "-c", code])
        await deployment.runtime.run_in_session(words.BashAction(command=command, timeout=60))

    return cell, deployment.stop


def found(*modules: str) -> Callable[[], bool]:
    """Are these modules installed?"""
    return lambda: all(importlib.util.find_spec(name) for name in modules)


PEERS = (
    Contender("bubblewrap + python", bubblewrap, lambda: bool(shutil.which("bwrap")),
              "apt install bubblewrap"),
    Contender("jupyter_client", jupyter, found("jupyter_client", "ipykernel"),
              "pip install jupyter_client ipykernel"),
    Contender("GEM run_python", gem, found("gem"), "pip install gem-llm"),
    Contender("sandlock", sandlock, found("sandlock"), "pip install sandlock"),
    Contender("SWE-ReX local", swe_rex, found("swerex"), "pip install swe-rex"),
)  # fmt: skip


def ours(sandbox: Sandbox) -> Contender:
    """The sandbox under test; its pool keeps nothing in stock."""

    async def start() -> tuple[Cell, Callable[[], Awaitable[None]]]:
        session = await sandbox.session()
        return lambda code: checked(session, code), session.close

    return Contender("turngym local", start)


async def checked(session: Session, code: str) -> None:
    """Run a cell that must succeed."""
    result = await session.execute(code, 60.0)
    if not result.ok:
        raise RuntimeError(f"a cell ended as {result.status}: {result.stderr}")


async def seconds(task: Awaitable[object]) -> float:
    """How long a task takes."""
    start = time.perf_counter()
    await task
    return time.perf_counter() - start


async def first_cell(
    contender: Contender, code: str
) -> tuple[float, Callable[[], Awaitable[None]]]:
    """Seconds of start and first cell together, and how to stop."""
    start = time.perf_counter()
    cell, stop = await contender.start()
    await cell(code)
    return time.perf_counter() - start, stop


def show(title: str, times: dict[str, list[float]], base: str) -> None:
    """Print one table."""
    print(f"\n{title:44}     p50 ms    p99 ms   ratio p50   ratio p99")
    low = statistics.quantiles(times[base], n=100)[98]
    for name, values in times.items():
        ratio = statistics.median(a / b for a, b in zip(values, times[base], strict=True))
        high = statistics.quantiles(values, n=100)[98]
        print(
            f"  {name:42} {1e3 * statistics.median(values):10.2f} {1e3 * high:9.2f}"
            f" {ratio:11.3f} {high / low:11.3f}"
        )


async def round_trips(contenders: list[Contender], rounds: int, in_a_row: int, title: str) -> None:
    """One stateful cell: `1 + 1`; contenders take turns after `in_a_row` of them."""
    started = {one.name: await one.start() for one in contenders}
    for cell, _ in started.values():
        await cell("1 + 1")
    times: dict[str, list[float]] = {name: [] for name in started}
    for _ in range(rounds):
        for name, (cell, _) in started.items():
            for _ in range(in_a_row):
                times[name].append(await seconds(cell("1 + 1")))
    for _, stop in started.values():
        await stop()
    show(title, times, contenders[0].name)


async def first_cells(contenders: list[Contender], code: str, rounds: int, title: str) -> None:
    """Start, first cell, stop; stopping is not measured."""
    times: dict[str, list[float]] = {one.name: [] for one in contenders}
    for _ in range(rounds):
        for one in contenders:
            took, stop = await first_cell(one, code)
            times[one.name].append(took)
            await stop()
    show(title, times, contenders[0].name)


async def throughput(sandbox: Sandbox, concurrency: int, count: int) -> float:
    """Sessions a second: create, three cells, close."""
    gate = asyncio.Semaphore(concurrency)

    async def one() -> None:
        async with gate:
            session = await sandbox.session()
            for _ in range(3):
                await checked(session, "1 + 1")
            await session.close()

    return count / await seconds(asyncio.gather(*(one() for _ in range(count))))


def pss_mb(mark: str) -> float:
    """Proportional set size of everything of the sandbox, MiB."""
    total = 0
    for pid in marked(mark):
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            total += sum(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    return total / 1024


async def memory(sandbox: Sandbox, mark: str, count: int) -> None:
    """MiB a session with `count` of them alive."""
    before = pss_mb(mark)
    sessions = [await sandbox.session() for _ in range(count)]
    for session in sessions:
        await checked(session, "x = 1")
    each = (pss_mb(mark) - before) / count
    print(f"\n{count} sessions alive: {each:.1f} MiB each (PSS), zygote {before:.0f} MiB before")
    await asyncio.gather(*(session.close() for session in sessions))


async def forks(sandbox: Sandbox, rounds: int) -> None:
    """A fork and its first cell, against replaying 20 cells in a fresh session."""
    cells = [f"x{n} = [n * n for n in range(20_000)]" for n in range(20)]
    times: dict[str, list[float]] = {"replay of 20 cells": [], "fork": []}

    async def replay() -> None:
        session = await sandbox.session()
        for cell in [*cells, "x0[1]"]:
            await checked(session, cell)
        await session.close()

    async def fork(origin: Any) -> None:
        copy = await origin.fork()
        await checked(copy, "x0[1]")
        await copy.close()

    for _ in range(rounds):
        origin = await sandbox.session()
        for cell in cells:
            await checked(origin, cell)
        times["fork"].append(await seconds(fork(origin)))
        await origin.close()
        times["replay of 20 cells"].append(await seconds(replay()))
    show("branching (copy, one cell, close)", times, "replay of 20 cells")


async def benchmark(options: argparse.Namespace) -> None:
    """Run everything."""
    mark = f"turngym-bench-{uuid.uuid4().hex}"
    pool = PoolConfig(max_sessions=max(options.sessions, 64))
    sandbox = await create("local", pool=pool, env={"MARK": mark})
    print(f"level {sandbox.guarantees.level}, python {sys.version.split()[0]}")
    peers = [one for one in PEERS if one.needs()]
    for one in PEERS:
        if one not in peers:
            print(f"not installed: {one.name} ({one.install})")
    contenders = [Contender("python -c", bare), ours(sandbox), *peers]
    try:
        title = "a cell (1 + 1) in a running session"
        await round_trips(contenders[:2], options.rounds, 10, f"{title}, ten in turn")
        await round_trips(contenders, options.rounds, 1, f"{title}, one in turn")
        await first_cells(contenders[:2], "1 + 1", options.rounds, "create + first cell (1 + 1)")
        await first_cells(contenders, "1 + 1", options.heavy_rounds, "the same, peers included")
        await first_cells(
            contenders, HEAVY, options.heavy_rounds, "create + first cell (import numpy, sympy)"
        )
        await forks(sandbox, options.heavy_rounds)
        print("\nsessions a second (create, 3 cells, close)")
        for concurrency in (1, 2, 8, 64):
            rate = await throughput(sandbox, concurrency, options.sessions)
            print(f"  {concurrency:3} at a time {rate:8.1f}")
        await memory(sandbox, mark, options.sessions)
    finally:
        await sandbox.aclose()


def main() -> None:
    """Read the flags and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--heavy-rounds", type=int, default=8)
    parser.add_argument("--sessions", type=int, default=200)
    asyncio.run(benchmark(parser.parse_args()))


if __name__ == "__main__":
    main()
