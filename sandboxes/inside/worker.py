"""The untrusted end: an interpreter that runs cells and answers with their last value.

Executed code shares this process and may do anything to it. Whatever it does shows up to init as
a wrong token, silence or death; nothing here is needed for safety. The care taken (saved
references, guarded formatting) only keeps sessions usable after merely clumsy code.

A request packet is ``[token, kind, *fields]``; the answer is ``[token, outcome, *fields]``:

    cell     source                -> ok     has_result, result, mime, data, mime, data, ...
    program  source, stdin, *argv  -> the process ends; an uncaught exception is answered first
                                      error  name, value, traceback
    branch   (see `branch.py`)     -> branched  lost, lost, ...
"""

import _signal  # type: ignore[import-not-found]
import ast
import atexit
import io
import linecache
import os
import signal
import socket
import struct
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any, NoReturn

from turngym.sandboxes.inside.branch import CHANNEL, branch
from turngym.sandboxes.inside.display import artifacts
from turngym.sandboxes.inside.frames import pack, unpack
from turngym.sandboxes.inside.output import clip

__all__ = ["Worker"]

_exit = os._exit
_fstat = os.fstat
_getpid = os.getpid
# The C functions: the wrappers in `signal` call builtins, which executed code may have patched.
_set_signal: Callable[..., object] = _signal.signal
_set_mask: Callable[..., object] = _signal.pthread_sigmask
_set_trace, _set_profile = sys.settrace, sys.setprofile
_TracebackException = traceback.TracebackException
_type_name = type.__dict__["__name__"].__get__

_SIGINT, _SIG_IGN, _SIG_UNBLOCK = 2, 1, 1  # plain numbers: enums run Python code

_CELL_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_CO_COROUTINE = 0x80
_KEPT_SOURCES = 256
_TRACEBACK_CHARS = 16_384


class Worker:
    """Serve requests of init until it hangs up."""

    def __init__(self, channel: socket.socket, workspace: str, limits: dict[str, Any]) -> None:
        self._use(channel)
        self._pid = _getpid()
        self._workspace = workspace
        self._result_chars = int(limits["result_chars"])
        self._artifact_bytes = int(limits["artifact_mb"]) << 20
        self._cells = 0
        self._interrupted = False
        self._loop: Any = None
        self._token = b""
        self._streams: list[io.TextIOWrapper] = []
        self._main = types.ModuleType("__main__")

    def _use(self, channel: socket.socket) -> None:
        self._channel = channel
        self._receive_message = channel.recvmsg
        self._send_all = channel.sendall

    def serve(self) -> NoReturn:
        """Answer requests; never returns."""
        sys.modules["__main__"] = self._main
        sys.argv = [""]
        sys.path.insert(0, self._workspace)
        self._make_streams()
        self._pipes = _fstat(1).st_ino, _fstat(2).st_ino
        _ignore_interrupts()
        while True:
            self._token, kind, *fields = self._receive()
            try:
                answer = self._answer(kind, fields)
            except BaseException as error:
                answer = _describe(error, self._workspace)
            if _getpid() != self._pid:
                _exit(0)  # executed code forked and its child ran off the end of the cell
            try:
                _fstat(1), _fstat(2)
            except OSError:
                _exit(1)  # with stdout closed every later word of this interpreter would be lost
            self._send_all(pack([self._token, *answer]))

    def _answer(self, kind: bytes, fields: list[bytes]) -> list[bytes]:
        if kind == b"program":
            self._program(fields[0], fields[1], [part.decode("utf-8") for part in fields[2:]])
        if kind == b"branch":
            return self._branch(self._received_fds)
        return self._cell(fields[0])

    def _branch(self, descriptors: list[int]) -> list[bytes]:
        """Answer as the template on the old channel, and as the copy on the new one."""
        loop, self._loop = self._loop, None
        self._flush()
        lost = branch(descriptors, self._pipes, self._workspace, loop)
        if lost is None:
            self._loop = loop
            return [b"branched"]
        self._channel.detach()
        self._use(socket.socket(fileno=CHANNEL))
        self._pipes = _fstat(1).st_ino, _fstat(2).st_ino
        self._pid = _getpid()
        return [b"branched", *(_encode(text) for text in lost)]

    def _receive(self) -> list[bytes]:
        """Return the next request; file descriptors that came along are in `_received_fds`."""
        self._received_fds: list[int] = []
        data = bytearray()
        size = 4
        while len(data) < size:
            # One request at a time, so this cannot reach into the next one.
            chunk, extra, _, _ = self._receive_message(1 << 16, 256)
            if not chunk:
                _exit(0)
            data += chunk
            if len(data) >= 4:
                size = 4 + int.from_bytes(data[:4], "big")
            for _, _, numbers in extra:
                count = len(numbers) // 4
                self._received_fds += struct.unpack(f"{count}i", numbers[: 4 * count])
        return unpack(bytes(data[4:]))

    def _make_streams(self) -> None:
        """Own text streams over fd 1 and 2; closing them does not close the descriptors."""
        names = ("stdout", "stderr")
        self._streams = [
            io.TextIOWrapper(
                io.FileIO(fd, "w", closefd=False),  # raw: bytes are never held back
                encoding="utf-8",
                errors="backslashreplace",
                line_buffering=True,
            )
            for fd in (1, 2)
        ]
        for name, stream in zip(names, self._streams, strict=True):
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr, *self._streams):
            if stream is not None and not stream.closed:
                stream.flush()

    def _cell(self, source: bytes) -> list[bytes]:
        self._cells += 1
        if self._interrupted:
            _reap_children()
            self._interrupted = False
        if any(stream.closed for stream in self._streams):
            self._make_streams()
        try:
            try:
                _allow_interrupts()
                value = self._evaluate(source, f"<cell {self._cells}>")
                answer = [b"ok", *self._show(value)]
                self._flush()
                return answer
            except BaseException as error:
                _stop_tracing()
                self._interrupted = type(error) is KeyboardInterrupt
                answer = _describe(error, self._workspace)
                self._flush()
                return answer
        finally:
            _ignore_interrupts()

    def _evaluate(self, source: bytes, name: str) -> object:
        """Run a cell; return the value of its last expression statement, or None."""
        text = source.decode("utf-8", "surrogatepass")
        _remember(name, text)
        linecache.cache.pop(f"<cell {self._cells - _KEPT_SOURCES}>", None)
        tree = compile(text, name, "exec", _CELL_FLAGS | ast.PyCF_ONLY_AST, dont_inherit=True)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        if tree.body:
            self._run(compile(tree, name, "exec", _CELL_FLAGS, dont_inherit=True))
        if last is None:
            return None
        expression = ast.Expression(last.value)
        return self._run(compile(expression, name, "eval", _CELL_FLAGS, dont_inherit=True))

    def _run(self, code: types.CodeType) -> object:
        result = eval(code, self._main.__dict__)
        if code.co_flags & _CO_COROUTINE:
            import asyncio

            if self._loop is None or self._loop.is_closed():
                self._loop = asyncio.new_event_loop()
            result = self._loop.run_until_complete(result)
        return result

    def _show(self, value: object) -> list[bytes]:
        if value is None:
            return [b"", b"", *artifacts(None, self._artifact_bytes)]
        text = clip(repr(value), self._result_chars)
        self._main.__dict__["_"] = value
        return [b"1", _encode(text), *artifacts(value, self._artifact_bytes)]

    def _program(self, source: bytes, stdin: bytes, argv: list[str]) -> NoReturn:
        """Run `source` as the program of this process and end it the way Python would."""
        code = 1
        try:
            _allow_interrupts()
            _give_stdin(stdin, os.path.join(self._workspace, ".stdin"))
            sys.argv = argv
            text = source.decode("utf-8", "surrogatepass")
            _remember(argv[0], text)
            self._main.__dict__.update(__file__=argv[0], __builtins__=__import__("builtins"))
            exec(compile(text, argv[0], "exec", dont_inherit=True), self._main.__dict__)
            code = 0
        except SystemExit as stop:
            code = _exit_code(stop)
        except BaseException as error:
            answer = _describe(error, self._workspace)
            sys.stderr.write(answer[3].decode("utf-8"))
            self._send_all(pack([self._token, *answer]))
        finally:
            try:
                threading._shutdown()  # type: ignore[attr-defined]
                atexit._run_exitfuncs()
                self._flush()
            finally:
                _exit(code)


def _allow_interrupts() -> None:
    _set_signal(_SIGINT, signal.default_int_handler)
    _set_mask(_SIG_UNBLOCK, {_SIGINT})


def _ignore_interrupts() -> None:
    """Shield the driver; one interrupt may still be on its way, so the call itself may fail."""
    for _ in range(3):
        try:
            _set_signal(_SIGINT, _SIG_IGN)
            return
        except BaseException:
            continue


def _reap_children() -> None:
    """Collect the children that init killed with an interrupted cell; they count as processes."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return


def _stop_tracing() -> None:
    """Take off trace functions: they run inside the driver too, and may raise."""
    for stop in (_set_trace, _set_profile, _set_trace, _set_profile):
        try:
            stop(None)
        except BaseException:
            continue


def _remember(name: str, text: str) -> None:
    """Let tracebacks quote the source."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


def _give_stdin(data: bytes, path: str) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    os.dup2(fd, 0)
    os.close(fd)


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    sys.stderr.write(f"{stop.code}\n")
    return 1


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def _describe(error: BaseException, workspace: str) -> list[bytes]:
    """Return an `error` answer; every step may run executed code and fail in turn."""
    try:
        name = _type_name(type(error))
    except BaseException:
        name = "Exception"
    try:
        value = str(error)
    except BaseException:
        value = "<exception str() failed>"
    try:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals is globals():
            trace = trace.tb_next
        full = _TracebackException(type(error), error, trace)
        text = "".join(full.format())
    except BaseException:
        text = f"{name}: {value}\n"
    limit = _TRACEBACK_CHARS
    return [b"error", _encode(name[:256]), _encode(clip(value, limit)), _encode(clip(text, limit))]
