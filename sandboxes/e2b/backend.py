"""The client of the service and the bookkeeping of the sandboxes it holds."""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from turngym.errors import (
    MissingDependencyError,
    SandboxCreateError,
    SandboxError,
    SandboxUnavailableError,
)
from turngym.sandboxes.base import ExecResult, Guarantees, Limits, PoolConfig
from turngym.sandboxes.e2b.options import Options
from turngym.sandboxes.e2b.session import E2BSession
from turngym.sandboxes.pool import PoolMetrics, SessionPool

__all__ = ["E2BSandbox"]

logger = logging.getLogger(__name__)


class E2BSandbox:
    """The `e2b` backend (see `turngym.sandboxes.base.Sandbox`); made by `create`."""

    def __init__(self, sdk: ModuleType, options: Options, limits: Limits, pool: PoolConfig) -> None:
        self._sdk = sdk
        self._options = options
        self._limits = limits
        self._pool: SessionPool[E2BSession] = SessionPool(pool, limits, self._start)
        self._sessions: set[E2BSession] = set()
        self._orphans: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None

    @classmethod
    async def create(
        cls,
        *,
        limits: Limits | None = None,
        pool: PoolConfig | None = None,
        template: str = "code-interpreter-v1",
        lifetime_s: int = 300,
        request_timeout_s: float = 30.0,
        allow_internet: bool = False,
    ) -> "E2BSandbox":
        """Prepare the client, with the key in `E2B_API_KEY`, and start the stock.

        Args:
            limits: defaults of new sessions; processors, memory and disk are the template's.
            pool: sizes; those kept in stock (`min_idle`) are paid for while they wait.
            template: name or id of an E2B template derived from the code interpreter's.
            lifetime_s: seconds after which the service kills a sandbox that nobody renews.
            request_timeout_s: longest wait for an answer that needs no agent code to run.
            allow_internet: let the code reach the internet.

        Raises:
            MissingDependencyError: `e2b-code-interpreter` is not installed.
            SandboxUnavailableError: there is no API key, or it is refused.
            ConfigError: an option is out of range.
        """
        options = Options(
            template=template,
            lifetime_s=lifetime_s,
            request_timeout_s=request_timeout_s,
            allow_internet=allow_internet,
        )
        try:
            import e2b_code_interpreter as sdk
        except ImportError as error:
            raise MissingDependencyError(
                "the 'e2b' sandbox needs the package e2b-code-interpreter; "
                "install it with: pip install 'turngym[e2b]'"
            ) from error
        if not os.environ.get("E2B_API_KEY"):
            raise SandboxUnavailableError(
                "the 'e2b' sandbox needs an API key in the environment variable E2B_API_KEY "
                "(keys are made at e2b.dev/dashboard); the 'local' sandbox needs none"
            )
        sandbox = cls(sdk, options, limits or Limits(), pool or PoolConfig())
        try:
            await sandbox._pool.warm_up()
        except BaseException:
            await sandbox.aclose()
            raise
        return sandbox

    @property
    def limits(self) -> Limits:
        """Defaults of new sessions."""
        return self._limits

    @property
    def guarantees(self) -> Guarantees:
        """What the service states; from outside it cannot be probed."""
        return Guarantees(
            backend="e2b",
            level="vm",
            filesystem="hard",
            network="none" if self._options.allow_internet else "hard",
            processes="soft",
            memory="hard",
            disk="hard",
            session_isolation="hard",
            notes=(
                "as stated by the service, not probed",
                f"processors, memory and disk are those of template {self._options.template!r}; "
                "cpu_s, memory_mb, disk_mb, inodes, processes and open_files are not applied",
            ),
        )

    @property
    def metrics(self) -> PoolMetrics:
        """Counters of the pool."""
        return self._pool.metrics

    async def session(self, *, limits: Limits | None = None) -> E2BSession:
        """Return a fresh session; waits while the pool is exhausted.

        Raises:
            SandboxUnavailableError: the key was refused.
            SandboxCreateError: the service did not start a sandbox.
        """
        return await self._pool.acquire(limits)

    async def run(
        self,
        code: str,
        *,
        files: Mapping[str, bytes] | None = None,
        argv: tuple[str, ...] = (),
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> ExecResult:
        """Run a program in a sandbox of its own, which is killed afterwards."""
        session = await self._pool.acquire(limits)
        try:
            return await session.run_program(code, files or {}, argv, stdin)
        finally:
            await session.close()

    async def _start(self, limits: Limits, on_close: Callable[[E2BSession], None]) -> E2BSession:
        def forget(session: E2BSession) -> None:
            self._sessions.discard(session)
            on_close(session)

        remote = await self._start_remote()
        session = E2BSession(self._sdk, remote, self._options, limits, forget)
        self._sessions.add(session)
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep_alive())
        try:
            await session.start()
        except SandboxError as error:
            await session.close()
            raise SandboxCreateError(f"E2B sandbox {session.id} did not come up") from error
        except BaseException:
            await session.close()
            raise
        return session

    async def _start_remote(self) -> Any:
        request = asyncio.ensure_future(
            self._sdk.AsyncSandbox.create(
                template=self._options.template,
                timeout=self._options.lifetime_s,
                metadata={"owner": "turngym"},
                allow_internet_access=self._options.allow_internet,
                request_timeout=self._options.request_timeout_s,
            )
        )
        try:
            return await asyncio.shield(request)
        except asyncio.CancelledError:
            # The service may start it all the same: it must not outlive the one who asked.
            orphan = asyncio.create_task(self._kill_when_started(request))
            self._orphans.add(orphan)
            orphan.add_done_callback(self._orphans.discard)
            raise
        except self._sdk.AuthenticationException as error:
            raise SandboxUnavailableError(
                f"E2B refused the key in E2B_API_KEY ({error}); check it at e2b.dev/dashboard"
            ) from error
        except Exception as error:
            # The SDK's errors have no base in common.
            raise SandboxCreateError(
                f"E2B did not start a sandbox from template {self._options.template!r}: {error!r}"
            ) from error

    async def _kill_when_started(self, request: "asyncio.Future[Any]") -> None:
        try:
            await (await request).kill()
        except Exception as error:
            logger.warning("an abandoned E2B sandbox was not killed: %r", error)

    async def _keep_alive(self) -> None:
        """Renew idle sessions: a policy may think for longer than a sandbox lives."""
        while True:
            await asyncio.sleep(self._options.lifetime_s / 4)
            for session in list(self._sessions):
                try:
                    await session.renew()
                except SandboxError as error:
                    # Its owner hears of it at the next call.
                    logger.warning("%s", error)

    async def aclose(self) -> None:
        """Kill every sandbox. Idempotent."""
        await self._pool.aclose()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await asyncio.gather(*self._orphans)
