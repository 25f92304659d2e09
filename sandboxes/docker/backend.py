"""Containers as sessions, and what is asked of the engine for each of them."""

import asyncio
import base64
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turngym.errors import (
    ConfigError,
    SandboxCreateError,
    SandboxUnavailableError,
    SessionLostError,
)
from turngym.sandboxes.base import ExecResult, Guarantees, Limits, PoolConfig
from turngym.sandboxes.bundle import container_program
from turngym.sandboxes.docker.engine import Container, Engine
from turngym.sandboxes.docker.image import DEFAULT_IMAGE
from turngym.sandboxes.docker.probe import PROBE, guarantees_of
from turngym.sandboxes.driver_session import DriverSession, Link, Slot
from turngym.sandboxes.pool import PoolMetrics, SessionPool

__all__ = ["DockerSandbox", "DockerSession"]

WORKSPACE = "/workspace"
_START_S = 60.0
"""A session that is not up by then failed to start; takes 0.3 to 1 s on an idle machine."""

_OVERHEAD_MB = 128
"""Memory of init, of the preloaded modules and of the engine's own process in the container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of the backend, checked where they enter."""

    image: str
    preload: tuple[str, ...]
    cpus: float
    runtime: str | None
    env: Mapping[str, str]

    def __post_init__(self) -> None:
        if self.cpus <= 0:
            raise ConfigError(f"cpus must be positive, got {self.cpus}")
        for name in self.preload:
            if not re.fullmatch(r"[A-Za-z_][\w.]*", name):
                raise ConfigError(f"preload must name modules, got {name!r}")

    def command(self) -> list[str]:
        """Return the command of PID 1: our init, whatever else the image holds."""
        program = _PRELOAD.format(modules=self.preload) + container_program()
        packed = base64.b85encode(zlib.compress(program.encode(), 9)).decode()
        # One argument may have 128 KiB, so the program travels compressed.
        unpack = f"import base64,zlib;exec(zlib.decompress(base64.b85decode({packed!r})))"
        return ["python3", "-I", "-c", unpack]

    def container(self, limits: Limits, podman: bool) -> dict[str, Any]:
        """Return the engine's settings for a session with `limits`."""
        disk, inodes = f"{limits.disk_mb}m", "" if podman else f",nr_inodes={limits.inodes}"
        tmpfs = f"rw,exec,nosuid,nodev,mode=1777,size={disk}{inodes}"
        # Files in a tmpfs are charged as memory.
        memory = f"{limits.memory_mb + 2 * limits.disk_mb + _OVERHEAD_MB}m"
        host = {
            "auto_remove": True,
            "network_mode": "none",
            "read_only": True,
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges"],
            "mem_limit": memory,
            "memswap_limit": memory,
            "pids_limit": limits.processes + 1,
            "nano_cpus": int(self.cpus * 1e9),
            "tmpfs": {WORKSPACE: tmpfs, "/tmp": tmpfs},
            "shm_size": disk,
            "runtime": self.runtime,
        }
        files = max(64, limits.open_files)
        ulimits = {"nofile": files, "core": 0, "nproc": 4096, "memlock": 65536}
        return {
            "host": host,
            "ulimits": ulimits,
            "user": "1000:1000",
            "working_dir": WORKSPACE,
            "environment": _ENVIRONMENT | dict(self.env),
            "entrypoint": [],
        }


_ENVIRONMENT = {
    "HOME": WORKSPACE,
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    # Workers are forked from init, which therefore must not start threads.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}

_PRELOAD = """\
for name in {modules!r}:
    try:
        __import__(name)
    except ImportError:
        pass
"""


class DockerSession(DriverSession):
    """A session in a container of its own."""

    def __init__(
        self,
        container: Container,
        link: Link,
        limits: Limits,
        slot: Slot,
        on_close: Callable[[Any], None],
    ) -> None:
        super().__init__(link, limits, slot, on_close)
        self._container = container

    @property
    def container_id(self) -> str:
        """The engine's name of the container."""
        return self._container.id

    async def _run(self, message: dict[str, Any], body: bytes, limit: float) -> ExecResult:
        try:
            return await super()._run(message, body, limit)
        except SessionLostError as error:
            death = await self._container.death()
            if not death.out_of_memory:
                raise
            # The code's own doing, unlike any other way to lose a container.
            raise _OutOfMemoryError(str(error)) from error


class _OutOfMemoryError(SessionLostError):
    """Placeholder."""


class DockerSandbox:
    """The `docker` backend (see `turngym.sandboxes.base.Sandbox`); made by `create`."""

    def __init__(self, engine: Engine, options: Options, limits: Limits, pool: PoolConfig) -> None:
        self._engine = engine
        self._options = options
        self._limits = limits
        self._pool: SessionPool[DockerSession] = SessionPool(pool, limits, self._start)
        self._guarantees: Guarantees | None = None

    @classmethod
    async def create(
        cls,
        *,
        limits: Limits | None = None,
        pool: PoolConfig | None = None,
        image: str = DEFAULT_IMAGE,
        preload: Sequence[str] = ("numpy", "sympy"),
        cpus: float = 1.0,
        runtime: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> "DockerSandbox":
        """Connect to the engine that `DOCKER_HOST` names and prove that it keeps its promises.

        Args:
            limits: defaults of every session.
            pool: sizes; `min_idle` containers are started in advance.
            image: any image with python3 (3.10 or newer); see `build_image`.
            preload: modules that init imports before it starts workers; absent ones are noted in
                `guarantees.notes`.
            cpus: processors a session may use.
            runtime: OCI runtime of the engine, for example "runsc" (gVisor); its default if None.
            env: environment variables of the sessions; nothing is inherited from this process.

        Raises:
            ConfigError: an option is malformed.
            MissingDependencyError: the `docker` package is not installed.
            SandboxUnavailableError: no engine answers, it lacks the image, or a session in it is
                not walled off.
        """
        options = Options(
            image=image, preload=tuple(preload), cpus=cpus, runtime=runtime, env=dict(env or {})
        )
        engine = await Engine.connect()
        sandbox = cls(engine, options, limits or Limits(), pool or PoolConfig())
        try:
            await sandbox._prove()
        except BaseException:
            await sandbox.aclose()
            raise
        return sandbox

    async def _prove(self) -> None:
        """Look at a first session from inside, then fill the stock."""
        session = await self._pool.acquire()
        try:
            result = await session.execute(PROBE, 20.0)
        finally:
            await session.close()
        if result.status != "ok":
            raise SandboxUnavailableError(
                f"a first cell in {self._options.image!r} gave {result.status}: {result.stderr}"
            )
        facts = json.loads(result.stdout)
        self._guarantees = guarantees_of(facts, self._limits, self._options.preload)
        await self._pool.warm_up()

    @property
    def limits(self) -> Limits:
        """Defaults of new sessions."""
        return self._limits

    @property
    def guarantees(self) -> Guarantees:
        """What was really obtained."""
        assert self._guarantees is not None
        return self._guarantees

    @property
    def metrics(self) -> PoolMetrics:
        """Counters of the pool."""
        return self._pool.metrics

    async def session(self, *, limits: Limits | None = None) -> DockerSession:
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

    async def aclose(self) -> None:
        """End every session and remove what is left of them. Idempotent."""
        await self._pool.aclose()
        await self._engine.close()

    async def _start(
        self, limits: Limits, on_close: Callable[[DockerSession], None]
    ) -> DockerSession:
        container = await self._engine.start(
            self._options.image,
            self._options.command(),
            self._options.container(limits, self._engine.podman),
        )
        link = Link(container)
        try:
            async with asyncio.timeout(_START_S):
                await link.start(limits, WORKSPACE)
        except (TimeoutError, SessionLostError) as error:
            await link.close()
            raise SandboxCreateError(
                f"a container of {self._options.image!r} did not come up: {error!r}"
            ) from error
        except BaseException:
            await link.close()
            raise
        return DockerSession(container, link, limits, self._pool.slot, on_close)
