"""What a cell and a session cost in the `docker` sandbox, in units of a bare `python -c`.

    DOCKER_HOST=... python benchmarks/sandbox_docker.py

Every measurement alternates with its yardstick, so a busy machine slows both; the ratios of the
medians are what counts. A cell that follows a fresh interpreter finds cold caches: of ten in turn
it is one, of one in turn it is every one.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from statistics import median, quantiles

from turngym.sandboxes.base import PoolConfig
from turngym.sandboxes.docker import DockerSandbox

ROUNDS = 40
SESSIONS = 12
CELLS = {"round trip, ten in turn": 10, "round trip, one in turn": 1}
TARGETS = dict.fromkeys(CELLS, 0.1) | {"warm-pool acquire": 1.0}


async def seconds(call: Callable[[], Awaitable[object]]) -> float:
    """Time one call."""
    began = time.perf_counter()
    await call()
    return time.perf_counter() - began


async def bare_python() -> None:
    """Run a fresh interpreter, as a sandbox without sessions would."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "1 + 1", stdout=subprocess.DEVNULL
    )
    await process.wait()


async def measure() -> dict[str, tuple[list[float], list[float]]]:
    """Return, by name, our seconds and the yardstick's."""
    pool = PoolConfig(min_idle=3, max_sessions=8)
    sandbox = await DockerSandbox.create(pool=pool)
    pairs: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in TARGETS}
    try:
        session = await sandbox.session()
        await session.execute("x = 1")
        for name, count in CELLS.items():
            ours, bare = pairs[name]
            for _ in range(ROUNDS):
                ours += [await seconds(lambda: session.execute("x + 1")) for _ in range(count)]
                bare.append(await seconds(bare_python))
        for _ in range(SESSIONS):
            # The stock refills in the background: wait for it, a pool is made to have some.
            while sandbox.metrics.idle < pool.min_idle:
                await asyncio.sleep(0.05)
            ours, bare = pairs["warm-pool acquire"]
            began = time.perf_counter()
            fresh = await sandbox.session()
            ours.append(time.perf_counter() - began)
            await fresh.close()
            bare.append(await seconds(bare_python))
    finally:
        await sandbox.aclose()
    return pairs


def main() -> None:
    """Print the table; exit with 1 when a target is missed."""
    missed = False
    print(f"{'':26}{'p50 ms':>9}{'p90 ms':>9}{'python -c ms':>14}{'ratio':>8}{'target':>8}")
    for name, (ours, bare) in asyncio.run(measure()).items():
        ratio = median(ours) / median(bare)
        missed |= ratio > TARGETS[name]
        tail = quantiles(ours, n=10)[-1]
        print(
            f"{name:26}{median(ours) * 1e3:9.2f}{tail * 1e3:9.2f}{median(bare) * 1e3:14.2f}"
            f"{ratio:8.3f}{TARGETS[name]:8.2f}"
        )
    sys.exit(missed)


if __name__ == "__main__":
    main()
