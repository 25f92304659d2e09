"""One sandbox at E2B and the kernel in it."""

import asyncio
import logging
import posixpath
import shlex
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from turngym.errors import ConfigError, SandboxError, SessionClosedError, SessionLostError
from turngym.sandboxes.base import ErrorInfo, ExecResult, ExecStatus, Limits
from turngym.sandboxes.e2b.options import PROGRAM, WORKSPACE, Options, inside
from turngym.sandboxes.e2b.output import (
    Capture,
    OutputLimitError,
    artifacts,
    clip,
    error_info,
    uncaught,
)

__all__ = ["E2BSession"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

_KERNEL_DEATHS = ("ContextRestarting", "UnexpectedEndOfExecution", "WebSocketError")
"""Errors that the service reports in place of the kernel; they come without a traceback."""


class E2BSession:
    """A live sandbox (see `turngym.sandboxes.base.Session`); made by `E2BSandbox.session`."""

    def __init__(
        self,
        sdk: Any,
        remote: Any,
        options: Options,
        limits: Limits,
        on_close: Callable[["E2BSession"], None],
    ) -> None:
        self._sdk = sdk
        self._remote = remote
        self._options = options
        self._limits = limits
        self._on_close = on_close
        self._context: Any = None
        self._generation = 0
        self._lock = asyncio.Lock()
        self._cell: asyncio.Future[Any] | None = None
        self._interrupted = False
        self._abandoned = False
        self._closed = False
        self._lost: str | None = None
        self._ends_at = time.monotonic() + options.lifetime_s
        self._errands: set[asyncio.Task[Any]] = set()

    @property
    def id(self) -> str:
        """E2B's name of the sandbox."""
        return str(self._remote.sandbox_id)

    @property
    def limits(self) -> Limits:
        """The session's limits."""
        return self._limits

    async def start(self) -> None:
        """Make `/workspace` and the kernel."""
        await self._ask(self._remote.files.make_dir(WORKSPACE))
        await self._ask(self._new_kernel())

    async def ping(self) -> None:
        """Return when the sandbox is alive, raise SessionLostError otherwise."""
        if not await self._ask(self._remote.is_running()):
            raise SessionLostError(f"E2B sandbox {self.id} is not running")

    async def execute(self, code: str, timeout_s: float | None = None) -> ExecResult:
        """Run one cell; the clock includes the way to the service and back.

        Raises:
            SessionClosedError: after `close`.
            SessionLostError: the sandbox died or cannot be reached.
        """
        asked = time.monotonic()
        async with self._lock:
            self._check_open()
            queued = time.monotonic() - asked
            try:
                code.encode()
            except UnicodeEncodeError as error:
                info = ErrorInfo(name="UnicodeEncodeError", value=str(error), traceback=str(error))
                return ExecResult(status="error", error=info, generation=self._generation)
            limit = self._limits.wall_s if timeout_s is None else timeout_s
            if not limit > 0:
                raise ConfigError(f"timeout_s must be positive, got {limit}")
            await self.renew(limit)
            if self._abandoned:
                await self._recover()
            return await self._run_cell(code, limit, queued)

    async def _run_cell(self, code: str, limit: float, queued: float) -> ExecResult:
        out, err = self._captures()
        began = time.monotonic()
        status, execution = await self._watch(
            self._remote.run_code(
                code,
                context=self._context,
                on_stdout=lambda message: out.add(message.line),
                on_stderr=lambda message: err.add(message.line),
                timeout=0,
            ),
            limit,
        )
        took = time.monotonic() - began
        error = execution.error if execution is not None else None
        results = execution.results if execution is not None else []
        lost = False
        if error is not None and error.name in _KERNEL_DEATHS and not error.traceback:
            status, error, lost = "exited", None, True
            await self._ask(self._new_kernel())
        elif error is not None:
            status = "error"
        elif status != "ok":
            lost = await self._recover()
        main = next((result.text for result in results if result.is_main_result), None)
        shown, clipped = clip(main, self._limits.result_chars)
        files, dropped = artifacts(results, self._limits.artifact_mb << 20)
        return ExecResult(
            status=status,
            stdout=out.text,
            stderr=err.text,
            stdout_bytes=out.num_bytes,
            stderr_bytes=err.num_bytes,
            truncated=out.truncated or err.truncated or clipped or dropped,
            result=shown,
            error=None if error is None else error_info(error),
            artifacts=files,
            duration_s=took,
            queued_s=queued,
            state_lost=lost,
            generation=self._generation,
        )

    async def run_program(
        self, code: str, files: Mapping[str, bytes], argv: tuple[str, ...], stdin: bytes
    ) -> ExecResult:
        """Run `code` as a program of its own (see `turngym.sandboxes.base.Sandbox.run`)."""
        limit = self._limits.wall_s
        await self.renew(limit)
        source = code.encode("utf-8", "surrogatepass")
        inputs = {inside(path): data for path, data in files.items()}
        inputs |= {f"{PROGRAM}/main.py": source, f"{PROGRAM}/stdin": stdin}
        for path, data in inputs.items():
            await self._ask(self._remote.files.write(path, data))
        out, err = self._captures()
        began = time.monotonic()
        status, done = await self._watch(
            self._command(shlex.join(["python3", f"{PROGRAM}/main.py", *argv]), out, err), limit
        )
        exit_code = done.exit_code if done is not None else None
        error = None
        if exit_code is not None and exit_code != 0:
            # How an uncaught exception ends a program; whatever else it was, it is the program's.
            error = uncaught(err.text) if exit_code == 1 else None
            status = "error" if error is not None else "exited"
        return ExecResult(
            status=status,
            stdout=out.text,
            stderr=err.text,
            stdout_bytes=out.num_bytes,
            stderr_bytes=err.num_bytes,
            truncated=out.truncated or err.truncated,
            error=error,
            duration_s=time.monotonic() - began,
            exit_code=exit_code,
        )

    async def _command(self, command: str, out: Capture, err: Capture) -> Any:
        try:
            return await self._remote.commands.run(
                f"{command} < {PROGRAM}/stdin",
                cwd=WORKSPACE,
                envs={"PYTHONPATH": WORKSPACE},
                on_stdout=out.add,
                on_stderr=err.add,
                timeout=0,
                retain_output=False,
            )
        except self._sdk.CommandExitException as done:
            return done

    def _captures(self) -> tuple[Capture, Capture]:
        chars, hard = self._limits.stdout_chars, self._limits.output_hard_mb << 20
        return Capture(chars, hard), Capture(chars, hard)

    async def _watch(
        self, call: Coroutine[Any, Any, Any], limit: float
    ) -> tuple[ExecStatus, Any | None]:
        """Wait on our own clock for a call of the SDK that runs agent code."""
        self._interrupted = False
        self._abandoned = True
        self._cell = cell = asyncio.ensure_future(call)
        try:
            async with asyncio.timeout(limit):
                execution = await cell
            self._abandoned = False
            return "ok", execution
        except TimeoutError:
            return "timeout", None
        except OutputLimitError:
            return "output_limit", None
        except asyncio.CancelledError:
            if not self._interrupted:
                raise
            self._check_open()
            return "timeout", None
        except Exception as error:
            # The SDK's errors have no base in common, and none of them tells whose fault it was.
            logger.warning("sandbox %s: the request of a cell failed: %r", self.id, error)
            await self._reconnect(error)
            return "infra", None
        finally:
            self._cell = None

    async def _recover(self) -> bool:
        """Bring back the kernel of an abandoned cell; return True when its variables are gone."""
        try:
            async with asyncio.timeout(self._limits.grace_s + self._options.round_trip_s):
                probe = await self._remote.run_code("None", context=self._context, timeout=0)
            self._abandoned = probe.error is not None
        except TimeoutError:
            logger.debug("sandbox %s: the kernel does not answer, replacing it", self.id)
        except Exception as error:
            await self._reconnect(error)
        if not self._abandoned:
            return False
        await self._ask(self._new_kernel())
        return True

    async def _new_kernel(self) -> None:
        last, self._context = self._context, await self._remote.create_code_context(cwd=WORKSPACE)
        self._abandoned = False
        if last is not None:
            self._generation += 1
            # Jupyter takes seconds to give up on a hung kernel; nobody needs to wait for it.
            errand = asyncio.create_task(self._drop_kernel(last))
            self._errands.add(errand)
            errand.add_done_callback(self._errands.discard)

    async def _drop_kernel(self, context: Any) -> None:
        try:
            await self._remote.remove_code_context(context)
        except Exception as error:
            # Harmless: it ends with the sandbox.
            logger.debug("sandbox %s: an old kernel was not removed: %r", self.id, error)

    async def renew(self, busy_s: float = 0.0) -> None:
        """Have the service keep the sandbox for `lifetime_s` beyond the next `busy_s` seconds."""
        needed = time.monotonic() + busy_s + self._options.lifetime_s / 2
        if needed > self._ends_at and not self._closed:
            seconds = int(busy_s) + 1 + self._options.lifetime_s
            await self._ask(self._remote.set_timeout(seconds))
            self._ends_at = time.monotonic() + seconds

    async def _ask(self, call: Coroutine[Any, Any, T]) -> T:
        """Await an exchange with the service that runs no agent code."""
        try:
            async with asyncio.timeout(self._options.request_timeout_s):
                return await call
        except (SandboxError, FileNotFoundError):
            raise
        except Exception as error:
            await self._reconnect(error)
            raise SessionLostError(
                f"sandbox {self.id} is alive but a request failed: {error!r}"
            ) from error

    async def _reconnect(self, cause: Exception) -> None:
        """Find the sandbox again after a failed request.

        Raises:
            SessionLostError: there is nothing to return to.
        """
        reason = "it is not running"
        try:
            async with asyncio.timeout(self._options.request_timeout_s):
                await self._remote.connect(timeout=self._options.lifetime_s)
                if await self._remote.is_running():
                    return
        except Exception as error:
            reason = repr(error)
        self._lost = reason
        raise SessionLostError(f"E2B sandbox {self.id} is lost: {reason}") from cause

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file below `/workspace`, making its folders."""
        self._check_open()
        await self._ask(self._remote.files.write(inside(path), data))

    async def read_file(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        """Read at most `max_bytes` of a file below `/workspace`.

        Raises:
            FileNotFoundError: there is no such file.
        """
        self._check_open()
        return await self._ask(self._read(inside(path), max_bytes))

    async def _read(self, path: str, max_bytes: int) -> bytes:
        data = bytearray()
        try:
            stream = await self._remote.files.read(path, format="stream")
        except self._sdk.FileNotFoundException as error:
            raise FileNotFoundError(f"no file {path} in the sandbox") from error
        async with stream:
            async for chunk in stream:
                data += chunk
                if len(data) >= max_bytes:
                    break
        return bytes(data[:max_bytes])

    async def list_files(self) -> list[str]:
        """Relative paths of the regular files below `/workspace`, sorted."""
        self._check_open()
        entries = await self._ask(self._remote.files.list(WORKSPACE, depth=1 << 20))
        regular = (entry.path for entry in entries if entry.type.value == "file")
        return sorted(posixpath.relpath(path, WORKSPACE) for path in regular)

    async def interrupt(self) -> None:
        """Stop the running cell; its `execute` returns status `timeout`."""
        self._check_open()
        if self._cell is not None:
            self._interrupted = True
            self._cell.cancel()

    async def reset(self) -> None:
        """Start a new kernel; files are kept."""
        async with self._lock:
            self._check_open()
            await self._ask(self._new_kernel())

    async def fork(self) -> "E2BSession":
        """Refuse.

        Raises:
            SandboxError: always.
        """
        raise SandboxError(
            "the 'e2b' backend cannot fork a session; replay its cells in a new session, "
            "or use the 'local' backend, which forks the interpreter"
        )

    async def close(self) -> None:
        """Kill the sandbox. Idempotent; never raises for a service that does not answer."""
        if self._closed:
            return
        self._closed = True
        if self._cell is not None:
            self._interrupted = True
            self._cell.cancel()
        # Shielded, for sessions are closed above all by those who are being cancelled.
        await asyncio.shield(asyncio.ensure_future(self._kill()))

    async def _kill(self) -> None:
        try:
            async with asyncio.timeout(self._options.request_timeout_s):
                await self._remote.kill()
        except Exception as error:
            logger.warning(
                "E2B sandbox %s was not killed (%r); it ends by itself within %d s",
                *(self.id, error, max(0, self._ends_at - time.monotonic())),
            )
        for errand in self._errands:
            errand.cancel()
        self._on_close(self)

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosedError(f"session {self.id} was closed; start a new one")
        if self._lost is not None:
            raise SessionLostError(f"E2B sandbox {self.id} is lost: {self._lost}")
