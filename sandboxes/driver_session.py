"""A session whose far end is our init: the host's half of the protocol in `inside.init`."""

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from turngym.errors import (
    ConfigError,
    SandboxCreateError,
    SandboxError,
    SessionClosedError,
    SessionLostError,
)
from turngym.sandboxes.base import Artifact, ErrorInfo, ExecResult, Limits
from turngym.sandboxes.inside.frames import FrameError, FrameReader, encode
from turngym.sandboxes.pool import Turn
from turngym.sandboxes.transport import SocketTransport, Transport

__all__ = ["DriverSession", "Link"]

Answer = asyncio.Future[tuple[dict[str, Any], bytes]]

Slot = Callable[[], Turn]
"""Context of one executing cell."""

_SHORT = 16 << 10
_ANSWER_SLACK_S = 30.0
"""How much later than its own limit init may answer before it counts as lost."""


class Link:
    """Requests and answers over one transport.

    Args:
        transport: the byte stream.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._reader = FrameReader()
        self._waiting: dict[int, Answer] = {}
        self._numbers = itertools.count(1)
        self._ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._sending = asyncio.Lock()
        self._lost: SessionLostError | None = None
        self.on_asleep: Callable[[], None] = _ignore
        """Called when the running cell turns out to use no processor."""
        transport.listen(self._receive, self._fail)

    async def start(self, limits: Limits, workspace: str) -> dict[str, Any]:
        """Configure init and wait until the worker stands; returns its `ready` event.

        Raises:
            SandboxCreateError: init could not set the session up; says why.
            SessionLostError: init went away or did not speak the protocol.
        """
        message = {"op": "configure", "limits": dataclasses.asdict(limits), "workspace": workspace}
        await self.transport.send(encode(message))
        return await self.await_ready()

    async def await_ready(self) -> dict[str, Any]:
        """Wait until a worker stands; returns the `ready` event."""
        ready = await self._ready
        if ready.get("event") != "ready":
            raise SandboxCreateError(f"the session was not set up: {ready.get('message', ready)}")
        return ready

    def _receive(self, data: bytes) -> None:
        """Take what arrived apart; the loop calls this, so it must not raise."""
        self._reader.feed(data)
        try:
            while (frame := self._reader.next()) is not None:
                self._dispatch(*frame)
        except FrameError as error:
            self._fail(SessionLostError(f"init does not speak the protocol: {error}"))

    def _dispatch(self, message: dict[str, Any], body: bytes) -> None:
        if not self._ready.done():
            self._ready.set_result(message)
        elif "event" in message:
            self.on_asleep()
        else:
            future = self._waiting.pop(message.get("id", 0), None)
            if future is not None and not future.done():
                future.set_result((message, body))

    def _fail(self, error: SessionLostError) -> None:
        """From now on no answer can come; the first reason counts."""
        self._lost = self._lost or error
        if not self._ready.done():
            self._ready.set_exception(self._lost)
            self._ready.exception()  # nobody may be waiting for it
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SessionLostError(str(self._lost)))

    async def ask(
        self,
        message: dict[str, Any],
        body: bytes = b"",
        *,
        within_s: float = _ANSWER_SLACK_S,
        descriptor: int | None = None,
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request and return its answer.

        A cancelled `execute` or `program` is stopped before the cancellation goes on, so that the
        next request finds the session idle.

        Args:
            message: the operation and its fields.
            body: raw bytes.
            within_s: longest time to wait.
            descriptor: travels along; needs a `SocketTransport`.

        Raises:
            OSError: the request failed inside; the errno of the far side.
            SessionLostError: no answer can or does come.
        """
        if self._lost is not None:
            raise SessionLostError(str(self._lost))
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        future: Answer = loop.create_future()
        self._waiting[number] = future
        late: asyncio.TimerHandle | None = None
        try:
            sending = self._send(encode({**message, "id": number}, body), descriptor)
            # Half a frame would garble the stream; a short one is never sent by halves.
            await (sending if len(body) < _SHORT else asyncio.shield(asyncio.create_task(sending)))
            late = loop.call_later(within_s, _expire, future, within_s)
            answer, data = await future
        except asyncio.CancelledError:
            if message["op"] in ("execute", "program"):
                await self._stop(number)
            raise
        finally:
            if late is not None:
                late.cancel()
            self._waiting.pop(number, None)
            _forget(future)
        if "errno" in answer:
            raise OSError(int(answer["errno"]), str(answer["message"]), message.get("path"))
        return answer, data

    async def _send(self, frame: bytes, descriptor: int | None) -> None:
        async with self._sending:
            if descriptor is None:
                await self.transport.send(frame)
            else:
                assert isinstance(self.transport, SocketTransport)
                await self.transport.send_with_descriptor(frame, descriptor)

    async def _stop(self, number: int) -> None:
        """Interrupt what runs for request `number`, and wait for its answer."""
        ended: Answer = asyncio.get_running_loop().create_future()
        self._waiting[number] = ended
        with contextlib.suppress(SandboxError, OSError, TimeoutError):
            answer, _ = await self.ask({"op": "interrupt"})
            if answer["ok"]:
                async with asyncio.timeout(_ANSWER_SLACK_S):
                    await ended
        _forget(ended)

    async def close(self) -> None:
        """Hang up. Idempotent."""
        self._fail(SessionLostError("the session was closed"))
        await self.transport.close()


def _forget(future: Answer) -> None:
    """Nobody waits any more; an exception set meanwhile has been told elsewhere."""
    if not future.cancel() and not future.cancelled():
        future.exception()


def _expire(future: Answer, after_s: float) -> None:
    if not future.done():
        future.set_exception(SessionLostError(f"init gave no answer within {after_s:.0f} s"))


class DriverSession:
    """A `Session` over a `Link`.

    Args:
        link: started.
        limits: the session's own.
        slot: makes cells wait for their turn; a cell's limit starts when it has one.
        on_close: called once with the session when it has ended.
    """

    def __init__(
        self, link: Link, limits: Limits, slot: Slot, on_close: Callable[[Any], None]
    ) -> None:
        self._link: Link = link
        self._limits = limits
        self._slot = slot
        self._on_close = on_close
        self._serial = asyncio.Lock()
        self._closed = False
        self._lost: tuple[str, ...] = ()

    @property
    def limits(self) -> Limits:
        """The session's limits."""
        return self._limits

    @property
    def closed(self) -> bool:
        """`close` was called."""
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosedError("the session is closed; ask the sandbox for a new one")

    async def execute(self, code: str, timeout_s: float | None = None) -> ExecResult:
        """Run one cell; see `Session.execute`."""
        limit = self._limits.wall_s if timeout_s is None else timeout_s
        source = code.encode("utf-8", "surrogatepass")
        return await self._run({"op": "execute"}, source, limit)

    async def run_program(
        self, code: str, argv: tuple[str, ...], stdin: bytes, timeout_s: float
    ) -> ExecResult:
        """Run a program; the session is used up afterwards."""
        source = code.encode("utf-8", "surrogatepass")
        message = {
            "op": "program",
            "argv": ["main.py", *argv],
            "source_bytes": len(source),
        }
        return await self._run(message, source + stdin, timeout_s)

    async def _run(self, message: dict[str, Any], body: bytes, limit: float) -> ExecResult:
        self._check_open()
        if not limit > 0:
            raise ConfigError(f"timeout_s must be positive, got {limit}")
        async with self._serial, self._slot() as turn:
            self._check_open()
            await self._thaw()
            self._link.on_asleep = turn.release
            within_s = limit + self._limits.grace_s + _ANSWER_SLACK_S
            try:
                message = {**message, "timeout_s": limit}
                answer, data = await self._ask_interruptibly(message, body, within_s)
            except SessionLostError:
                if self._closed:
                    raise SessionClosedError("the session was closed while it ran") from None
                raise
            lost, self._lost = self._lost, ()
            return _result(answer, data, turn.waited_s, lost)

    async def _ask_interruptibly(
        self, message: dict[str, Any], body: bytes, within_s: float
    ) -> tuple[dict[str, Any], bytes]:
        """Have init run something; a hook for backends whose init can die of what it runs."""
        return await self._link.ask(message, body, within_s=within_s)

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file below `/workspace`; see `Session.write_file`."""
        self._check_open()
        await self._link.ask({"op": "write", "path": path}, bytes(data))

    async def read_file(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        """Read a file below `/workspace`; see `Session.read_file`."""
        self._check_open()
        return (await self._link.ask({"op": "read", "path": path, "max_bytes": max_bytes}))[1]

    async def list_files(self) -> list[str]:
        """Relative paths of the regular files below `/workspace`, sorted."""
        self._check_open()
        answer, _ = await self._link.ask({"op": "list"})
        return [str(path) for path in answer["files"]]

    async def interrupt(self) -> None:
        """Stop the running cell; see `Session.interrupt`."""
        self._check_open()
        await self._link.ask({"op": "interrupt"})

    async def reset(self) -> None:
        """Replace the interpreter; files are kept."""
        self._check_open()
        async with self._serial:
            await self._thaw()
            await self._link.ask({"op": "reset"})

    async def fork(self) -> "DriverSession":
        """Refuse: this backend cannot copy a live interpreter."""
        self._check_open()
        raise SandboxError(
            "this sandbox cannot fork a session (see guarantees.fork); "
            "replay the cells in a fresh session instead"
        )

    async def _thaw(self) -> None:
        """Have a live interpreter behind the link; for backends that freeze forked ones."""

    async def ping(self) -> None:
        """Return when init answers; SessionLostError when it does not within a second."""
        await self._link.ask({"op": "ping"}, within_s=1.0)

    async def close(self) -> None:
        """End the session; nothing of it stays alive. Idempotent."""
        if not self._closed:
            self._closed = True
            try:
                await self._hang_up()
            finally:
                self._on_close(self)

    async def _hang_up(self) -> None:
        await self._link.close()


def _ignore() -> None:
    """Nothing is running that could fall asleep."""


def _result(
    answer: dict[str, Any], body: bytes, waited_s: float, lost: tuple[str, ...]
) -> ExecResult:
    """Build the result; `lost` is what a fork could not carry over, told once."""
    error = answer["error"]
    artifacts = []
    start = 0
    for mime, size in answer["artifacts"]:
        artifacts.append(Artifact(mime=mime, data=body[start : start + size]))
        start += size
    return ExecResult(
        status=answer["status"],
        stdout=answer["stdout"],
        stderr=answer["stderr"],
        stdout_bytes=answer["stdout_bytes"],
        stderr_bytes=answer["stderr_bytes"],
        truncated=answer["truncated"],
        result=answer["result"],
        error=None if error is None else ErrorInfo(**error),
        artifacts=tuple(artifacts),
        duration_s=answer["duration_s"],
        cpu_s=answer["cpu_s"],
        queued_s=waited_s + answer["delay_s"],
        state_lost=answer["state_lost"],
        exit_code=answer["exit_code"],
        exit_signal=answer["exit_signal"],
        generation=answer["generation"],
        lost=lost,
    )
