"""The backend: its pool of containers and the proof that they are walled off."""

import asyncio
import functools
import json
from collections.abc import Callable, Mapping, Sequence

from turngym.errors import SandboxCreateError, SandboxUnavailableError, SessionLostError
from turngym.sandboxes.base import Guarantees, Limits, PoolConfig
from turngym.sandboxes.docker.engine import Container, Engine
from turngym.sandboxes.docker.image import DEFAULT_IMAGE
from turngym.sandboxes.docker.options import WORKSPACE, Options
from turngym.sandboxes.docker.probe import PROBE, guarantees_of
from turngym.sandboxes.docker.session import DockerSession
from turngym.sandboxes.driver_session import Link
from turngym.sandboxes.pooled import PooledSandbox

__all__ = ["DockerSandbox"]

_START_S = 60.0
"""A session that is not up by then failed to start; takes 0.3 to 1 s on an idle machine."""


class DockerSandbox(PooledSandbox[DockerSession]):
    """The `docker` backend (see `turngym.sandboxes.base.Sandbox`); made by `create`."""

    def __init__(self, engine: Engine, options: Options, limits: Limits, pool: PoolConfig) -> None:
        self._engine = engine
        self._options = options
        super().__init__(limits, pool, self._start)
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
        self._guarantees = guarantees_of(
            facts, self._limits, self._options.preload, self._engine.podman
        )
        await self._pool.warm_up()

    @property
    def guarantees(self) -> Guarantees:
        """What was really obtained."""
        assert self._guarantees is not None
        return self._guarantees

    async def aclose(self) -> None:
        """End every session and remove what is left of them. Idempotent."""
        await self._pool.aclose()
        await self._engine.close()

    async def _start(
        self, limits: Limits, on_close: Callable[[DockerSession], None]
    ) -> DockerSession:
        start_link = functools.partial(self._start_link, limits)
        container, link = await start_link()
        return DockerSession(container, link, start_link, limits, self._pool.slot, on_close)

    async def _start_link(self, limits: Limits) -> tuple[Container, Link]:
        """Start a container and configure the init in it."""
        container = await self._engine.start(
            self._options.image, self._options.command(), **self._options.container(limits)
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
        return container, link
