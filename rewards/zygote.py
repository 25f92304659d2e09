"""The process that workers are forked from, and what a worker does.

A fresh interpreter imports the target once, then forks a worker whenever it is asked to, which
takes milliseconds where an import takes a second. It ends when its owner does: it watches the
owner's process and the control socket; workers are killed by the kernel when it dies.

Control socket (owner -> zygote): `F` with one end of a socket pair forks a worker that serves it,
answered by its pid; `R` and a pid reaps a worker, answered when it is gone. Worker socket:
length-prefixed JSON; a request is answered by `{"started": t}` when work on it begins and by
`{"result": ...}` or `{"failure": ...}` at its end.
"""

import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

__all__ = ["HEADER", "main", "receive", "send"]

HEADER = struct.Struct("!I")
_PR_SET_PDEATHSIG = 1


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    """Write one message; lone surrogates survive."""
    body = json.dumps(message).encode("ascii")
    channel.sendall(HEADER.pack(len(body)) + body)


def receive(channel: socket.socket) -> dict[str, Any] | None:
    """Read one message; None when the other end is closed."""
    header = _read(channel, HEADER.size)
    body = None if header is None else _read(channel, HEADER.unpack(header)[0])
    if body is None:
        return None
    message: dict[str, Any] = json.loads(body)
    return message


def _read(channel: socket.socket, count: int) -> bytes | None:
    chunks = bytearray()
    while len(chunks) < count:
        try:
            chunk = channel.recv(count - len(chunks))
        except ConnectionResetError:
            return None
        if not chunk:
            return None
        chunks += chunk
    return bytes(chunks)


def main(control_fd: int, owner: int, target: str, memory_mb: int) -> None:
    """Serve fork and reap requests until the owner dies or closes the socket.

    Args:
        control_fd: inherited end of the control socket.
        owner: process whose death ends this one.
        target: `module:function` that takes the request's keyword arguments.
        memory_mb: address space a worker may add to what the imports took.
    """
    control = socket.socket(fileno=control_fd)
    module, _, name = target.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:
        control.sendall(f"cannot import {target}: {error}".replace("\n", " ").encode() + b"\n")
        return
    gc.collect()
    gc.freeze()
    owner_fd = os.pidfd_open(owner)
    if os.getppid() != owner:
        return
    control.sendall(b"ready\n")
    workers: set[int] = set()
    try:
        while True:
            readable, _, _ = select.select([control.fileno(), owner_fd], [], [])
            if owner_fd in readable or not _serve(control, workers, function, memory_mb):
                return
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _serve(
    control: socket.socket, workers: set[int], function: Callable[..., Any], memory_mb: int
) -> bool:
    request, fds, _, _ = socket.recv_fds(control, 32, 1)
    if not request:
        return False
    if request[:1] == b"F":
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            _work(socket.socket(fileno=fds[0]), control, function, memory_mb, zygote)
        os.close(fds[0])
        workers.add(pid)
        control.sendall(f"{pid}\n".encode())
    else:
        pid = int(request[1:])
        if pid in workers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            workers.discard(pid)
        control.sendall(b"reaped\n")
    return True


def _work(
    channel: socket.socket,
    control: socket.socket,
    function: Callable[..., Any],
    memory_mb: int,
    zygote: int,
) -> None:
    """Answer requests until the other end closes; never returns into the zygote's loop."""
    code = 1
    try:
        control.close()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != zygote:
            return
        _limit(memory_mb)
        while (request := receive(channel)) is not None:
            send(channel, {"started": time.monotonic()})
            send(channel, _answer(function, request) | {"ended": time.monotonic()})
        code = 0
    finally:
        os._exit(code)


def _answer(function: Callable[..., Any], request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": function(**request)}
    except MemoryError:
        return {"failure": "memory", "detail": "out of memory"}
    except Exception as error:
        return {"failure": "error", "detail": f"{type(error).__name__}: {error}"[:500]}


def _limit(memory_mb: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    ceiling = mapped + memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (ceiling, ceiling))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
