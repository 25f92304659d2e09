"""The default backend: sessions as forks of a warm process, walled off by the kernel.

Linux only, no daemon, nothing to install; works as root and as an ordinary user. What is
guaranteed at which isolation level is written in `docs/sandboxes.md`.
"""

import asyncio
import contextlib
import socket
import warnings
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from turngym.errors import (
    SandboxCreateError,
    SandboxError,
    SandboxUnavailableError,
    SessionLostError,
)
from turngym.sandboxes.base import Guarantees, Isolation, Limits, PoolConfig
from turngym.sandboxes.driver_session import DriverSession, Link
from turngym.sandboxes.isolation import (
    LOST,
    Level,
    SandboxDegradedWarning,
    guarantees_of,
    levels_to_try,
)
from turngym.sandboxes.launcher import Launcher, LauncherConfig
from turngym.sandboxes.pool import SessionPool
from turngym.sandboxes.pooled import PooledSandbox
from turngym.sandboxes.transport import SocketTransport

__all__ = ["LocalSandbox", "LocalSession"]

_START_S = 20.0
"""A session that is not up by then failed to start; takes 0.01 s on an idle machine."""


class LocalSandbox(PooledSandbox["LocalSession"]):
    """A zygote and its sessions. Make one with `turngym.sandboxes.create("local")`."""

    def __init__(self, launcher: Launcher, level: Level, limits: Limits, pool: PoolConfig) -> None:
        self._launcher = launcher
        self._level = level
        super().__init__(limits, pool, self._start)
        self._guarantees = guarantees_of(level, launcher.missing, launcher.limited)

    @classmethod
    async def create(
        cls,
        *,
        limits: Limits,
        pool: PoolConfig,
        isolation: Isolation = "auto",
        preload: Sequence[str] = ("numpy", "sympy"),
        python: str | None = None,
        import_paths: Sequence[str] = (),
        read_only: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> "LocalSandbox":
        """Start the zygote at the strongest isolation level that really works here.

        Args:
            limits: defaults of every session.
            pool: sizes.
            isolation: "auto" takes namespaces, else Landlock with a `SandboxDegradedWarning`, else
                refuses; "strict" takes nothing but namespaces; "none" runs code unconfined.
            preload: modules imported once, shared by all sessions; those not installed are noted
                in `guarantees.notes`.
            python: interpreter of the sessions, CPython 3.10 or newer; this one by default.
            import_paths: folders put first on `sys.path` and shown read-only.
            read_only: further host files or folders shown read-only at the same place.
            env: environment variables; nothing is inherited from this process.

        Raises:
            ConfigError: a path does not exist or an option is malformed.
            SandboxUnavailableError: the isolation asked for cannot be had; says why and what to do.
        """
        config = LauncherConfig.checked(
            preload=preload, python=python, import_paths=import_paths, read_only=read_only, env=env
        )
        reasons: list[str] = []
        for level in levels_to_try(isolation):
            try:
                sandbox = await cls._create_at(level, config, limits, pool)
            except (SandboxError, OSError) as error:
                reasons.append(f"{level}: {error}")
                continue
            if level in LOST and isolation != "none":
                warnings.warn(
                    f"the local sandbox runs at level {level!r} ({'; '.join(reasons)}). "
                    f"Lost: {LOST[level]}",
                    SandboxDegradedWarning,
                    stacklevel=3,
                )
            return sandbox
        raise SandboxUnavailableError(
            f"the local sandbox cannot isolate code here with isolation={isolation!r} "
            f"({'; '.join(reasons)}). Use the docker or e2b backend, or isolation='none' for code "
            "you trust"
        )

    @classmethod
    async def _create_at(
        cls, level: Level, config: LauncherConfig, limits: Limits, pool: PoolConfig
    ) -> "LocalSandbox":
        sandbox = cls(await Launcher.start(config, level), level, limits, pool)
        try:
            await sandbox._prove()
        except BaseException:
            await sandbox.aclose()
            raise
        return sandbox

    async def _prove(self) -> None:
        """Run one cell, then fill the stock."""
        session = await self._pool.acquire()
        try:
            result = await session.execute("6 * 7", 10.0)
        finally:
            await session.close()
        if result.result != "42":
            raise SandboxCreateError(f"a first cell gave {result.status}: {result.stderr}")
        await self._pool.warm_up()

    @property
    def guarantees(self) -> Guarantees:
        """What was really obtained."""
        return self._guarantees

    async def aclose(self) -> None:
        """End every session and the zygote. Idempotent."""
        await self._pool.aclose()
        await self._launcher.close()

    async def _start(
        self, limits: Limits, on_close: Callable[["LocalSession"], None]
    ) -> "LocalSession":
        async with _new_link() as (link, theirs):
            await self._launcher.send(theirs)
            theirs.close()
            await link.start(limits, "/workspace")
        return LocalSession(link, limits, self._pool, on_close)


@contextlib.asynccontextmanager
async def _new_link() -> AsyncIterator[tuple[Link, socket.socket]]:
    """A link to an init still to be made, and the socket to hand to it; closed on failure.

    Raises:
        SandboxCreateError: the body took too long or the init died in it.
    """
    ours, theirs = socket.socketpair()
    link = Link(SocketTransport(ours))
    try:
        async with asyncio.timeout(_START_S):
            yield link, theirs
    except BaseException as error:
        theirs.close()
        await link.close()
        if isinstance(error, TimeoutError):
            message = f"a session was not up after {_START_S:.0f} s"
            raise SandboxCreateError(message) from None
        if isinstance(error, SessionLostError):
            raise SandboxCreateError(f"a session did not start: {error}") from error
        raise


class _Template:
    """A frozen interpreter that copies are made of; lives as long as one of them does."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.users = 1

    async def release(self) -> None:
        self.users -= 1
        if self.users == 0:
            await self.link.close()


class LocalSession(DriverSession):
    """A session of the local backend.

    After `fork` its interpreter is frozen as the template of both sessions; its next cell runs in
    a copy of its own. The templates form a chain whose namespaces are nested in one another.
    """

    def __init__(
        self,
        link: Link,
        limits: Limits,
        pool: SessionPool["LocalSession"],
        on_close: Callable[["LocalSession"], None],
        templates: tuple[_Template, ...] = (),
    ) -> None:
        super().__init__(link, limits, pool.slot, on_close)
        self._pool = pool
        self._templates = templates
        self._frozen = False

    async def fork(self) -> "LocalSession":
        """Return an independent copy: interpreter, files and open regular files.

        Threads, processes, sockets and whatever else cannot be copied is lost in both sessions;
        the next result of each says so in `lost`.

        Raises:
            SandboxError: the level is not `namespaces`, the pool is full, or the interpreter could
                not be copied.
        """
        self._check_open()
        async with self._serial:
            self._check_open()
            return await self._pool.adopt(self._fork, self._limits)

    async def _fork(
        self, limits: Limits, on_close: Callable[["LocalSession"], None]
    ) -> "LocalSession":
        link, lost = await self._copy()
        if not self._frozen:
            self._frozen = True
            self._templates = (*self._templates, _Template(self._link))
        for template in self._templates:
            template.users += 1
        session = LocalSession(link, limits, self._pool, on_close, self._templates)
        session._lost = lost
        return session

    async def _thaw(self) -> None:
        if self._frozen:
            self._link, self._lost = await self._copy()
            self._frozen = False

    async def _copy(self) -> tuple[Link, tuple[str, ...]]:
        async with _new_link() as (link, theirs):
            try:
                await self._link.ask({"op": "fork"}, descriptor=theirs.fileno())
            except OSError as error:
                raise SandboxError(
                    f"the session could not be forked: {error.strerror}; "
                    "replay its cells in a fresh session instead"
                ) from error
            theirs.close()
            ready = await link.await_ready()
        return link, tuple(str(text) for text in ready["lost"])

    async def _hang_up(self) -> None:
        if not self._frozen:
            await self._link.close()
        for template in reversed(self._templates):
            await template.release()
