"""Fork a live session: interpreter, files and all, into namespaces of its own.

Only fork(2) copies an interpreter, and a process cannot leave its PID namespace upwards. So the
worker becomes a *template*: frozen (stopped between forks, never to run a cell again), and every
continuation, the forked session's own one included, is a copy of it in fresh namespaces below it:

    init A, worker A (template)
      ├── init B, worker B     a copy; sees neither A nor C
      └── init C, worker C

Init A forks init B into new namespaces; B copies the files, then sends the template its namespaces
and the pipes of its worker-to-be, and the template forks (`branch.py`). Depth is bounded by the
kernel: 32 nested PID namespaces.
"""

import contextlib
import errno
import os
import secrets
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, NoReturn

from turngym.sandboxes.inside.branch import NAMESPACES
from turngym.sandboxes.inside.frames import pack
from turngym.sandboxes.inside.interpreter import Interpreter
from turngym.sandboxes.inside.processes import Processes, name_of
from turngym.sandboxes.inside.syscalls import SESSION_NAMESPACES, clone

__all__ = ["Forker"]

_WITHIN_S = 20.0
_GO = b"go"


class Forker:
    """Serves forks of one session.

    Args:
        settle: sets up a fresh process as init of the copy's namespaces, copying the files;
            returns what could not be copied.
        serve: serves the host over a descriptor with a given interpreter; never returns.
    """

    def __init__(
        self,
        settle: Callable[[dict[str, Any]], list[str]],
        serve: Callable[[int, Interpreter, str, list[str]], NoReturn],
    ) -> None:
        self._settle = settle
        self._serve = serve
        self._killed: list[str] = []

    def __call__(
        self, interpreter: Interpreter, workspace: str, link: int, *, frozen: bool
    ) -> None:
        """Fork; see `Fork` in `init.py`."""
        processes = interpreter.processes
        # Stopped until the copy's init is out of its reach (see `_settle`).
        os.kill(processes.worker, signal.SIGSTOP)
        if not frozen:
            self._killed = [f"process {name_of(pid)}" for pid in processes.others()]
            processes.kill_others()
        told, tell = os.pipe()
        child = clone(SESSION_NAMESPACES)
        if child == 0:
            os.close(told)
            self._become_copy(interpreter, workspace, link, tell)
        os.close(tell)
        try:
            problem = _read(told, len(_GO))
            if problem == _GO:
                os.kill(processes.worker, signal.SIGCONT)
                problem = _read(told)
        finally:
            os.close(told)
            os.kill(processes.worker, signal.SIGSTOP)
        if problem != b"ok":
            os.kill(child, signal.SIGKILL)
            raise OSError(errno.ECHILD, f"the interpreter could not be copied: {problem.decode()}")

    def _become_copy(self, template: Interpreter, workspace: str, link: int, tell: int) -> NoReturn:
        try:
            lost = [*self._killed, *self._settle(template.limits)]
            group = template.group.sibling() if template.group else None
            if group is not None:
                group.limit(template.limits)
            copy = Interpreter(
                template.limits, workspace, template.confine, Processes(isolated=True), group
            )
            copy.generation = template.generation
            os.write(tell, _GO)
            lost += _copy_worker(template, copy)
            os.write(tell, b"ok")
            os.close(tell)
            self._serve(link, copy, workspace, lost)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.write(tell, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(1)


def _copy_worker(template: Interpreter, copy: Interpreter) -> list[str]:
    """Have the template fork into this process's namespaces; returns what was lost."""
    streams = copy.make_streams()
    namespaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    token = secrets.token_bytes(32)
    template.channel.setblocking(True)
    entries = copy.group.entries if copy.group is not None else ()
    request = pack([token, b"branch"])
    socket.send_fds(template.channel, [request], [*entries, *namespaces, *streams])
    template.channel.setblocking(False)
    for fd in (*namespaces, *streams):
        os.close(fd)
    _expect(template, token)
    lost = _expect(copy, token)
    others = [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    if len(others) != 1:
        raise OSError(errno.EPROTO, f"the copy has {len(others)} processes instead of one")
    copy.adopt(others[0])
    if copy.group is not None and not copy.group.holds(others[0]):
        copy.group.enter(others[0])
    template.close()
    return [text.decode("utf-8", "replace") for text in lost]


def _expect(interpreter: Interpreter, token: bytes) -> list[bytes]:
    """Wait for the answer to `branch`."""
    deadline = time.monotonic() + _WITHIN_S
    while (fields := interpreter.answer()) is None:
        if interpreter.hung_up or time.monotonic() > deadline:
            raise OSError(errno.EPROTO, "the interpreter did not answer")
        select.select([interpreter.channel], [], [], 0.1)
        interpreter.pull()
    if fields[:2] != [token, b"branched"]:
        raise OSError(errno.EPROTO, "the interpreter answered something else")
    return fields[2:]


def _read(fd: int, size: int = 4096) -> bytes:
    if not select.select([fd], [], [], 2 * _WITHIN_S)[0]:
        return b"no answer in time"
    return os.read(fd, size)
