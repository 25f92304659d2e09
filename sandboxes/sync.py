"""Sandboxes for code without an event loop: scripts, Gymnasium environments, notebooks."""

import asyncio
import threading
import weakref
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

from turngym.errors import SandboxError
from turngym.sandboxes.base import ExecResult, Guarantees, Limits, PoolConfig, Sandbox, Session
from turngym.sandboxes.executor import ExitSafeExecutor
from turngym.sandboxes.factory import create

__all__ = ["SyncSandbox", "SyncSession"]

T = TypeVar("T")


class SyncSandbox:
    """A sandbox with blocking methods, safe to call from any thread.

    The backend lives on an event loop of its own in a daemon thread, so the calls also work from
    a thread that runs a loop itself (where they block that loop, as every sync call does).

    Args:
        backend: a backend name, or a sandbox that exists already and is used on this loop only.
        limits: defaults of every session.
        pool: how many sessions are kept and run at once.
        **options: the backend's own settings, checked by `turngym.sandboxes.create`.

    Raises:
        ConfigError, MissingDependencyError, SandboxUnavailableError: as `create`.
    """

    def __init__(
        self,
        backend: str | Sandbox = "local",
        *,
        limits: Limits | None = None,
        pool: PoolConfig | None = None,
        **options: Any,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_serve, args=(self._loop,), name="turngym-sandbox", daemon=True
        )
        self._thread.start()
        self._owned: list[Sandbox] = []
        self._stop = weakref.finalize(self, _stop, self._loop, self._thread, self._owned)
        try:
            if isinstance(backend, str):
                backend = self._wait(create(backend, limits=limits, pool=pool, **options))
        except BaseException:
            self._stop()
            raise
        self._sandbox = backend
        self._owned.append(backend)

    def _wait(self, task: Coroutine[Any, Any, T]) -> T:
        if not self._stop.alive:
            task.close()
            raise SandboxError("the sandbox is closed; make a new SyncSandbox")
        if threading.current_thread() is self._thread:
            task.close()
            raise SandboxError("a blocking call from the sandbox's own loop would never return")
        future = asyncio.run_coroutine_threadsafe(task, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def limits(self) -> Limits:
        """Defaults of new sessions."""
        return self._sandbox.limits

    @property
    def guarantees(self) -> Guarantees:
        """What was really obtained."""
        return self._sandbox.guarantees

    def session(self, *, limits: Limits | None = None) -> "SyncSession":
        """Start a fresh session; see `Sandbox.session`."""
        return SyncSession(self, self._wait(self._sandbox.session(limits=limits)))

    def run(
        self,
        code: str,
        *,
        files: dict[str, bytes] | None = None,
        argv: tuple[str, ...] = (),
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> ExecResult:
        """Run a program in a fresh one-shot session; see `Sandbox.run`."""
        return self._wait(
            self._sandbox.run(code, files=files, argv=argv, stdin=stdin, limits=limits)
        )

    def close(self) -> None:
        """End every session, the backend and the loop's thread. Idempotent."""
        self._stop()

    def __enter__(self) -> "SyncSandbox":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class SyncSession:
    """A session with blocking methods; made by `SyncSandbox.session`."""

    def __init__(self, sandbox: SyncSandbox, session: Session) -> None:
        self._sandbox = sandbox
        self._session = session

    def execute(self, code: str, timeout_s: float | None = None) -> ExecResult:
        """Run one cell; see `Session.execute`."""
        return self._sandbox._wait(self._session.execute(code, timeout_s))

    def write_file(self, path: str, data: bytes) -> None:
        """Write a file below `/workspace`."""
        self._sandbox._wait(self._session.write_file(path, data))

    def read_file(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        """Read a file below `/workspace`."""
        return self._sandbox._wait(self._session.read_file(path, max_bytes))

    def list_files(self) -> list[str]:
        """Relative paths of the regular files below `/workspace`, sorted."""
        return self._sandbox._wait(self._session.list_files())

    def interrupt(self) -> None:
        """Stop the running cell, from another thread."""
        self._sandbox._wait(self._session.interrupt())

    def reset(self) -> None:
        """Replace the interpreter; files are kept."""
        self._sandbox._wait(self._session.reset())

    def fork(self) -> "SyncSession":
        """Return an independent copy; see `Session.fork`."""
        return SyncSession(self._sandbox, self._sandbox._wait(self._session.fork()))

    def close(self) -> None:
        """End the session. Idempotent, also after the sandbox was closed."""
        if self._sandbox._stop.alive:
            self._sandbox._wait(self._session.close())

    def __enter__(self) -> "SyncSession":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.set_default_executor(ExitSafeExecutor(thread_name_prefix="turngym-sandbox"))
    loop.run_forever()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, owned: list[Sandbox]) -> None:
    """Close the backend, then the loop; a finalizer, so it must not refer to the facade."""

    async def drain() -> None:
        try:
            for sandbox in owned:
                await sandbox.aclose()
        finally:
            rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in rest:
                # A second cancellation would break off what it does because of the first.
                if not task.cancelling():
                    task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

    if thread is threading.current_thread() or not thread.is_alive():
        return
    try:
        asyncio.run_coroutine_threadsafe(drain(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
