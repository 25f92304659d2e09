"""Tools in a process of their own: what `@tool(isolated=True)` runs on.

The child imports the tool by name and answers over a socket pair. It is killed with its process
group when its deadline passes, and ends by itself when the parent's end of the socket closes, so
it does not outlive the parent. Children are reused by later calls. This contains accidents, not
attacks: code that a model wrote belongs in a sandbox.
"""

import atexit
import contextlib
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from turngym.errors import EnvError

__all__ = ["run_isolated"]

_START_S = 60.0
_MAX_IDLE = 8
_MAX_PICKLE = 1 << 20

Answer = tuple[str, Any, str]
"""("value", value, text), or (error kind, None, text)."""


class _Child:
    """A process that runs one call at a time."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "turngym.envs.isolated", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
            )
        self._wire = Connection(ours.detach())
        if not self._wire.poll(_START_S) or self._receive() != "ready":
            self.kill()
            raise EnvError(f"an isolated tool process did not start within {_START_S:g} s")

    def call(self, request: tuple[str, str, Mapping[str, Any]], timeout_s: float) -> Answer:
        self._wire.send(request)
        if not self._wire.poll(timeout_s):
            raise TimeoutError(f"killed after {timeout_s:g} s")
        answer: Answer = self._receive()
        return answer

    def _receive(self) -> Any:
        try:
            return self._wire.recv()
        except (EOFError, ConnectionError):
            code = self._process.wait()
            return "tool_error", None, f"the tool's process ended with code {code}"

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End the child and its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._wire.close()


_lock = threading.Lock()
_idle: list[_Child] = []


def run_isolated(
    module: str, qualname: str, arguments: Mapping[str, Any], timeout_s: float
) -> Answer:
    """Call a tool in a child process, which is killed after `timeout_s` seconds.

    Args:
        module: name of the module that defines the tool.
        qualname: the tool's name in it.
        arguments: what the model gave, already checked against the schema.
        timeout_s: seconds the call may take; starting the process is not counted.

    Returns:
        `("value", value, text)` or `(error kind, None, text)`.

    Raises:
        TimeoutError: the deadline passed.
        EnvError: the process could not be started.
    """
    with _lock:
        child = _idle.pop() if _idle else None
    if child is None or not child.is_alive:
        child = _Child()
    reusable = False
    try:
        answer = child.call((module, qualname, dict(arguments)), timeout_s)
        reusable = child.is_alive
    finally:
        with _lock:
            if reusable and len(_idle) < _MAX_IDLE:
                _idle.append(child)
                child = None
        if child is not None:
            child.kill()
    return answer


def _close_idle() -> None:
    while _idle:
        _idle.pop().kill()


atexit.register(_close_idle)
os.register_at_fork(after_in_child=_idle.clear)


def _end_with_parent(descriptor: int) -> None:
    watch = select.poll()
    watch.register(descriptor, 0)
    watch.poll()
    os._exit(1)


def _serve(descriptor: int) -> None:
    """Answer calls until the parent closes its end."""
    from turngym.envs.tools import Tool

    wire = Connection(descriptor)
    threading.Thread(target=_end_with_parent, args=(descriptor,), daemon=True).start()
    wire.send("ready")
    while True:
        try:
            module, qualname, arguments = wire.recv()
        except EOFError:
            return
        tool: Any = importlib.import_module(module)
        for part in qualname.split("."):
            tool = getattr(tool, part)
        assert isinstance(tool, Tool)
        kind, value, text = tool.run_here(arguments)
        answer = (kind, value if kind == "value" else None, text)
        try:
            packed = pickle.dumps(answer)
        except Exception:
            packed = b""
        if not packed or len(packed) > _MAX_PICKLE:
            packed = pickle.dumps((kind, text, text))
        wire.send_bytes(packed)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
