"""PID 1 of a session: trusted, single-threaded, between the host and the worker.

Init decides how every cell ended. It starts the worker, feeds it one request at a time, reads its
output from pipes, enforces the limits and answers the host. It installs no signal handler: inside
a PID namespace signals without a handler never reach PID 1.

**How a host speaks to init.** Frames of `frames.py` in both directions: over one socket (local), or
over stdin and stdout (a container: ``python3 -I -c PROGRAM`` with the program of
`turngym.sandboxes.bundle.container_program`, stdin open, no tty).

1. The host sends ``{"op": "configure", "limits": {every field of Limits}, "workspace": path}``.
2. Init starts the worker and sends ``{"event": "ready", "python": "3.11.7", "protocol": 1}``.
3. Requests carry an ``id`` chosen by the host; each is answered once by a frame with that ``id``.
   File requests are served at any time; execute and program one at a time (an answer ``{"id",
   "errno", "message"}`` with EBUSY otherwise); interrupt acts on the running one.

    op         fields            body           answer (besides id)
    execute    timeout_s         source         the result, below
    program    timeout_s, argv,  source +       the result; the session is good for nothing else
               source_bytes      stdin            afterwards
    interrupt                                   ok: a cell was running and is being stopped
    reset                                       generation
    write      path              data           ok
    read       path, max_bytes                  ok; the body is the data
    list                                        files: [relative paths]
    ping                                        ok
    fork       (a socket as SCM_RIGHTS)         ok; a copy of the session serves the other end of
                                                that socket: it begins with a `ready` event that has
                                                `lost`: [texts]. This session is frozen from now on:
                                                it can be forked again, not execute (`fork.py`)

   A failed file request is answered by ``errno`` and ``message``.
   A result has: status, stdout, stderr, stdout_bytes, stderr_bytes, truncated, result (text or
   null), error (null or {name, value, traceback}), artifacts ([[mime, size], ...], their bytes
   joined in the body), duration_s, cpu_s, delay_s, state_lost, exit_code, exit_signal, generation.
   While a cell or program runs, ``{"event": "asleep", "id"}`` may come once: it waits rather than
   computes, and need not be counted as running.
4. The host ends the session by closing its end (stdin); init then kills everything and exits 0.

Source is UTF-8 with lone surrogates passed through. Strings in answers are plain text: what the
executed code printed is never parsed.
"""

import contextlib
import errno
import os
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from turngym.sandboxes.inside.cell import Cell
from turngym.sandboxes.inside.cgroups import Group
from turngym.sandboxes.inside.files import list_files, read_file, write_file
from turngym.sandboxes.inside.frames import FrameError, FrameReader, encode, pack
from turngym.sandboxes.inside.interpreter import Confine, Interpreter
from turngym.sandboxes.inside.processes import (
    Processes,
    Watch,
    death_notices,
    rss_bytes,
)

__all__ = ["Init"]

PROTOCOL = 1
_CHUNK = 1 << 16
_EXTRA = socket.CMSG_SPACE(4 * 4)
"""Room for four descriptors."""

_MAX_SLEEP_S = 1.0


class Fork(Protocol):
    """Makes a copy of a session that serves the host end `link` belongs to."""

    def __call__(
        self, interpreter: Interpreter, workspace: str, link: int, *, frozen: bool
    ) -> None:
        """Fork; OSError when it fails. `frozen`: it is not the first fork of this state."""
        ...


class Init:
    """Serve one session.

    Args:
        host_in: descriptor to read the host's frames from.
        host_out: descriptor to write to; may be the same.
        confine: takes the worker's rights away, called in the worker with the limits.
        isolated: this process is PID 1 of its PID namespace.
        prepare: called once with the limits, before the first worker; returns the workspace.
        fork: serves the operation of that name, where the backend has one.
        group: for worker and what it starts, where the backend has one.
    """

    def __init__(
        self,
        host_in: int,
        host_out: int,
        confine: Confine,
        *,
        isolated: bool,
        prepare: Callable[[dict[str, Any]], str] | None = None,
        fork: Fork | None = None,
        group: Group | None = None,
    ) -> None:
        self._in, self._out = host_in, host_out
        is_socket = stat.S_ISSOCK(os.fstat(host_in).st_mode)
        self._socket = socket.socket(fileno=os.dup(host_in)) if is_socket else None
        self._descriptors: list[int] = []
        self._confine = confine
        self._prepare = prepare
        self._fork = fork
        self._group = group
        self._frozen = False
        self._processes = Processes(isolated=isolated)
        self._reader = FrameReader()
        self._cell: Cell | None = None
        self._lost_unseen = False
        self._spent = False
        self._deaths = death_notices()
        self._handlers = {
            "execute": self._execute,
            "program": self._execute,
            "interrupt": self._interrupt,
            "reset": self._reset,
            "fork": self._branch,
            "write": self._write,
            "read": self._read,
            "list": self._list,
            "ping": self._ping,
        }

    def run(self) -> NoReturn:
        """Serve until the host hangs up."""
        self._serve(lambda: self._configure(self._first_frame()))

    def resume(self, interpreter: Interpreter, workspace: str, lost: list[str]) -> NoReturn:
        """Serve a session whose interpreter stands already: the new end of a fork."""

        def take_over() -> None:
            self._limits, self._workspace = interpreter.limits, workspace
            self._interpreter, self._processes = interpreter, interpreter.processes
            self._group = interpreter.group
            self._watch = Watch((int(self._limits["memory_mb"]) << 20) + rss_bytes())
            self._announce(lost=lost)

        self._serve(take_over)

    def _serve(self, begin: Callable[[], None]) -> NoReturn:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        status = 0
        try:
            begin()
            while True:
                self._turn()
        except (EOFError, FrameError, BrokenPipeError, ConnectionResetError):
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
            status = 1
        finally:
            self._processes.kill_all()
            self._processes.reap_all()
            if self._group is not None:
                self._group.remove()
            os._exit(status)

    def _first_frame(self) -> dict[str, Any]:
        while (frame := self._reader.next()) is None:
            self._receive()
        return frame[0]

    def _receive(self) -> None:
        if self._socket is None:
            data = os.read(self._in, _CHUNK)
        else:
            data, extra, _, _ = self._socket.recvmsg(_CHUNK, _EXTRA)
            for _, _, numbers in extra:
                self._descriptors += struct.unpack(f"{len(numbers) // 4}i", numbers)
        if not data:
            raise EOFError("the host hung up")
        self._reader.feed(data)

    def _configure(self, message: dict[str, Any]) -> None:
        limits = message["limits"]
        prepare = self._prepare
        self._workspace = prepare(limits) if prepare else str(message["workspace"])
        self._limits = limits
        if self._group is not None:
            self._group.limit(limits)
        self._interpreter = Interpreter(
            limits, self._workspace, self._confine, self._processes, self._group
        )
        self._watch = Watch((int(limits["memory_mb"]) << 20) + rss_bytes())
        self._interpreter.start()
        self._announce()

    def _announce(self, **more: object) -> None:
        version = ".".join(map(str, sys.version_info[:3]))
        self._send({"event": "ready", "python": version, "protocol": PROTOCOL, **more})

    def _send(self, message: dict[str, Any], body: bytes = b"") -> None:
        view = memoryview(encode(message, body))
        while view:
            view = view[os.write(self._out, view) :]

    def _turn(self) -> None:
        """Wait for something and deal with it."""
        ready = self._wait()
        interpreter, cell = self._interpreter, self._cell
        if cell is not None:
            for stream in (interpreter.out, interpreter.err):
                if stream.fd in ready:
                    stream.read()
                    cell.on_output()
            if interpreter.channel.fileno() in ready:
                interpreter.push()
                cell.on_channel()
        if self._deaths in ready:
            os.read(self._deaths, 128)
            interpreter.reap()
        if cell is not None:
            if not cell.done:
                cell.check()
                if cell.fell_asleep():
                    self._send({"event": "asleep", "id": cell.id})
            if cell.done:
                self._finish(cell)
        if self._in in ready:
            self._receive()
        elif self._cell is None and self._watch_idle():
            self._replace()
        while (frame := self._reader.next()) is not None:
            self._handle(*frame)

    def _wait(self) -> set[int]:
        """Poll the host and, while a cell runs, what the worker says; idle output stays queued."""
        poll = select.poll()
        poll.register(self._in, select.POLLIN)
        interpreter = self._interpreter
        poll.register(self._deaths, select.POLLIN)
        wait_s = _MAX_SLEEP_S
        if self._cell is not None:
            if not interpreter.hung_up:
                poll.register(interpreter.channel, interpreter.wanted_events())
            for stream in (interpreter.out, interpreter.err):
                if not stream.ended:
                    poll.register(stream.fd, select.POLLIN)
            wait_s = min(wait_s, self._cell.next_check_s())
        return {fd for fd, _ in poll.poll(max(0.0, wait_s * 1000))}

    def _watch_idle(self) -> bool:
        """Between cells: the worker died, or what it left running uses too much memory."""
        if self._spent or self._frozen:
            return False
        if self._interpreter.exit_status is not None:
            return True
        return self._watch.exceeded_idle(self._processes, time.monotonic())

    def _replace(self) -> None:
        self._interpreter.replace()
        self._lost_unseen = True

    def _handle(self, message: dict[str, Any], body: bytes) -> None:
        operation, number = message.get("op"), message.get("id")
        handler = self._handlers.get(str(operation))
        try:
            if handler is None:
                raise OSError(errno.ENOSYS, f"no operation {operation!r}")
            answer, data = handler(message, body)
        except OSError as error:
            code = error.errno or errno.EIO
            answer, data = {"errno": code, "message": error.strerror or str(error)}, b""
        if answer:
            self._send({"id": number, **answer}, data)

    def _execute(self, message: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        if self._cell is not None:
            raise OSError(errno.EBUSY, "a cell is running; cells run one after another")
        if self._spent or self._frozen:
            raise OSError(errno.ESHUTDOWN, "the session ran a program or was forked: it is used up")
        if self._interpreter.exit_status is not None or self._interpreter.spoke_unasked():
            self._replace()
        token = os.urandom(32)
        program = message["op"] == "program"
        fields = [token, b"cell", body]
        if program:
            size = int(message["source_bytes"])
            argv = [str(word).encode("utf-8", "surrogateescape") for word in message["argv"]]
            fields = [token, b"program", body[:size], body[size:], *argv]
        self._cell = Cell(
            int(message["id"]),
            token,
            self._interpreter,
            self._watch,
            float(message["timeout_s"]),
            program=program,
        )
        self._cell.start(pack(fields))
        return {}, b""

    def _finish(self, cell: Cell) -> None:
        message, body = cell.result()
        self._cell = None
        replaced = message["state_lost"] and not cell.program
        if cell.program:
            self._spent = True
            self._processes.kill_all()
        elif replaced:
            self._interpreter.replace()
        message["state_lost"] |= self._lost_unseen
        self._lost_unseen = False
        self._send({**message, "generation": self._interpreter.generation}, body)
        if not replaced:
            self._interpreter.read_counters()

    def _interrupt(self, message: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        if self._cell is not None:
            self._cell.interrupt()
        return {"ok": self._cell is not None}, b""

    def _reset(self, message: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        if self._cell is not None:
            raise OSError(errno.EBUSY, "a cell is running; interrupt it first")
        self._interpreter.replace()
        self._lost_unseen = False
        return {"generation": self._interpreter.generation}, b""

    def _branch(self, message: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        if self._fork is None or not self._descriptors:
            raise OSError(errno.ENOSYS, "this session cannot be forked")
        link = self._descriptors.pop(0)
        try:
            if self._cell is not None or self._spent:
                raise OSError(errno.EBUSY, "only an idle session can be forked")
            if self._interpreter.exit_status is not None or self._interpreter.spoke_unasked():
                if self._frozen:
                    raise OSError(errno.ESHUTDOWN, "the forked interpreter is dead")
                self._replace()
            self._fork(self._interpreter, self._workspace, link, frozen=self._frozen)
        finally:
            os.close(link)
        self._frozen = True
        return {"ok": True}, b""

    def _write(self, message: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        write_file(self._workspace, str(message["path"]), body)
        return {"ok": True}, b""

    def _read(self, message: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        data = read_file(self._workspace, str(message["path"]), int(message["max_bytes"]))
        return {"ok": True}, data

    def _list(self, message: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        return {"files": list_files(self._workspace, int(self._limits["inodes"]))}, b""

    def _ping(self, message: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        return {"ok": True}, b""


def protect() -> None:
    """Keep executed code of the same user from reading or tracing this process."""
    import ctypes

    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
