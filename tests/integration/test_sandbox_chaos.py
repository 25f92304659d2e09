import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import uuid

import pytest

from turngym.sandboxes import ExecResult, Limits, PoolConfig, Sandbox, create
from turngym.sandboxes.checking.leaks import gone_within, marked, open_files, zombies_within

COUNT, COROUTINES = 2000, 128
LIMITS = Limits(memory_mb=96, wall_s=30.0)
HANGS = ("while True: pass", "import time; time.sleep(600)", "sum(range(10**12))")
CRASHES = ("import os; os._exit(5)", "import ctypes; ctypes.string_at(0)")
BOMBS = (
    "x = []\nwhile True: x.append(bytearray(8 << 20))",
    "import mmap\nh = []\nwhile True:\n    b = mmap.mmap(-1, 8 << 20); b[::4096] = b'x' * 2048\n"
    "    h.append(b)",
)


def plan(seed: int) -> list[tuple[str, str, set[str]]]:
    """Kind, code and allowed statuses of each execution: 5 % hang, 5 % crash, 2 % bombs."""
    rng = random.Random(seed)
    kinds = ["hang"] * 100 + ["crash"] * 100 + ["bomb"] * 40 + ["good"] * (COUNT - 240)
    rng.shuffle(kinds)
    # A loop that never gets a processor is the machine's fault, and is said to be.
    expected = {"hang": {"timeout", "infra"}, "crash": {"exited"}, "bomb": {"memory", "error"}}
    codes = {"hang": HANGS, "crash": CRASHES, "bomb": BOMBS}
    return [
        (kind, rng.choice(codes[kind]), expected[kind])
        if kind in codes
        else (kind, f"print({n})\n{n} * 2", {"ok"})
        for n, kind in enumerate(kinds)
    ]


async def run_share(
    sandbox: Sandbox, work: list[tuple[str, str, set[str]]], results: list[tuple[str, ExecResult]]
) -> None:
    """One coroutine: a session for every four executions."""
    for start in range(0, len(work), 4):
        session = await sandbox.session()
        try:
            for kind, code, allowed in work[start : start + 4]:
                result = await session.execute(code, 0.3 if kind == "hang" else 30.0)
                assert result.status in allowed, (kind, code, result)
                if kind == "good":
                    number = int(code.split("(")[1].split(")")[0])
                    assert (result.stdout, result.result) == (f"{number}\n", str(2 * number))
                results.append((kind, result))
        finally:
            await session.close()


def resident_mb() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.slow
def test_two_thousand_executions_from_128_coroutines_leave_no_trace() -> None:
    mark = f"turngym-chaos-{uuid.uuid4().hex}"

    async def scenario() -> None:
        pool = PoolConfig(max_sessions=32, min_idle=4)
        sandbox = await create("local", limits=LIMITS, pool=pool, preload=(), env={"MARK": mark})
        work = plan(1)
        results: list[tuple[str, ExecResult]] = []
        shares = [work[n::COROUTINES] for n in range(COROUTINES)]
        try:
            await asyncio.gather(*(run_share(sandbox, share, results) for share in shares))
            assert zombies_within(mark, 2.0) == set()
        finally:
            await sandbox.aclose()
        assert len(results) == COUNT
        assert "timeout" in {one.status for kind, one in results if kind == "hang"}

    files, memory = open_files(), resident_mb()
    asyncio.run(asyncio.wait_for(scenario(), 500))
    gc.collect()
    assert gone_within(mark, 2.0) == {}
    assert open_files() <= files
    assert resident_mb() - memory < 64


BUSY = """
import asyncio, sys
from turngym.sandboxes import create
async def main():
    sandbox = await create("local", preload=(), env={"MARK": sys.argv[1]})
    async def one(number):
        session = await sandbox.session()
        await session.execute("import subprocess; subprocess.Popen(['sleep', '600'])")
        print("up", flush=True)
        await session.execute("while True: pass", 600.0)
    await asyncio.gather(*(one(n) for n in range(24)))
asyncio.run(main())
"""


@pytest.mark.slow
def test_killing_the_parent_in_the_middle_kills_everything() -> None:
    mark = f"turngym-killed-{uuid.uuid4().hex}"
    parent = subprocess.Popen([sys.executable, "-c", BUSY, mark], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    for _ in range(2):
        assert parent.stdout.readline() == b"up\n"
    assert len(marked(mark)) > 8
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert gone_within(mark, 2.0) == {}
