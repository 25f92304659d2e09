"""Worker processes that can be killed: calls with a hard wall-clock limit.

The caller's process uses no signals, no timers and no threads for the limit: it waits on a socket
and kills the worker when the time is over. The clock starts in the worker, when it starts on the
call, so that waiting for a free worker never counts. Safe from any thread; a process forked from
the owner gets a pool of its own. Linux only (pidfd, /proc).
"""

import asyncio
import atexit
import contextlib
import functools
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from turngym.errors import ConfigError, RewardError
from turngym.rewards.zygote import receive, send

__all__ = ["Outcome", "WorkerPool"]

START_TIMEOUT_S = 60.0
SELF_TEST_S = 20.0

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from turngym.rewards.zygote import main; "
    "main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))"
)
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "HOME", "TMPDIR")
_SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_POOLS: "weakref.WeakSet[WorkerPool]" = weakref.WeakSet()


class Outcome(NamedTuple):
    """What became of one call."""

    status: Literal["done", "timeout", "memory", "error"]
    result: Any = None
    detail: str = ""
    seconds: float = 0.0
    """From the worker's start on the call to its end."""

    queued_s: float = 0.0
    """From the call to the worker's start on it."""


class _LostError(Exception):
    """The worker or its parent is gone."""


@dataclass(eq=False, slots=True)
class _Worker:
    pid: int
    channel: socket.socket
    zygote: "_Zygote"
    calls: int = 0


class _Zygote:
    """The owner's end of the process that workers are forked from."""

    def __init__(self, target: str, memory_mb: int) -> None:
        self.control, theirs = socket.socketpair()
        self.control.settimeout(START_TIMEOUT_S)
        try:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-c", _BOOT, json.dumps(sys.path)),
                    *(str(theirs.fileno()), str(os.getpid()), target, str(memory_mb)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={name: os.environ[name] for name in _INHERITED if name in os.environ}
                | _SINGLE_THREADED,
                start_new_session=True,
            )
        except OSError as error:
            self.control.close()
            raise _LostError(str(error)) from error
        finally:
            theirs.close()
        try:
            if (answer := self._answer()) != "ready":
                raise _LostError(answer)
        except _LostError:
            self.close()
            raise

    def _answer(self) -> str:
        line = bytearray()
        while not line.endswith(b"\n"):
            try:
                byte = self.control.recv(64)
            except OSError as error:
                raise _LostError(f"no answer: {error}") from error
            if not byte:
                raise _LostError("closed")
            line += byte
        return line.decode().strip()

    def fork(self) -> _Worker:
        ours, theirs = socket.socketpair()
        try:
            socket.send_fds(self.control, [b"F"], [theirs.fileno()])
            return _Worker(int(self._answer()), ours, self)
        except (_LostError, OSError) as error:
            ours.close()
            raise _LostError(str(error)) from error
        finally:
            theirs.close()

    def reap(self, pid: int) -> None:
        with contextlib.suppress(_LostError, OSError):
            self.control.sendall(f"R{pid}".encode())
            self._answer()

    def forget(self) -> None:
        """Drop the handle in a forked process, which is not the zygote's owner."""
        self.control.close()
        self.process.returncode = 0

    def close(self) -> None:
        self.control.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class WorkerPool:
    """A bounded pool of worker processes for one function.

    Args:
        target: `module:function`; its keyword arguments and result must be JSON-able.
        size: workers at most; they are started when needed.
        memory_mb: memory a worker may take on top of its imports.
        recycle_after: calls after which a worker is replaced.
        probe: keyword arguments of a call that every new worker must answer.

    Raises:
        ConfigError: a limit that is not positive.
    """

    def __init__(
        self,
        target: str,
        *,
        size: int,
        memory_mb: int = 1024,
        recycle_after: int = 5_000,
        probe: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value in (
            ("size", size),
            ("memory_mb", memory_mb),
            ("recycle_after", recycle_after),
        ):
            if value < 1:
                raise ConfigError(f"WorkerPool {name} must be at least 1, got {value}")
        self.target = target
        self.size = size
        self.memory_mb = memory_mb
        self.recycle_after = recycle_after
        self.probe = probe
        self._reset()
        _POOLS.add(self)

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._free = threading.Semaphore(self.size)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._zygote: _Zygote | None = None
        self._threads: ThreadPoolExecutor | None = None

    def run(self, arguments: Mapping[str, Any], *, deadline_s: float) -> Outcome:
        """Call the target in a worker; blocks, from any thread.

        A call that outlives its deadline is killed with its worker. Nothing is retried, except a
        call whose worker was lost before it started on it.

        Args:
            arguments: keyword arguments.
            deadline_s: seconds the worker may spend on the call.

        Raises:
            ConfigError: a deadline that is not positive.
            RewardError: no worker can be started.
        """
        return self._run(arguments, deadline_s, time.monotonic())

    async def arun(self, arguments: Mapping[str, Any], *, deadline_s: float) -> Outcome:
        """Call the target in a worker without blocking the event loop; see `run`.

        A cancelled call still runs to its end or deadline in its worker.
        """
        self._adopt()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.size, thread_name_prefix="turngym-worker-pool")
        asked = time.monotonic()
        call = functools.partial(self._run, arguments, deadline_s, asked)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _run(self, arguments: Mapping[str, Any], deadline_s: float, asked: float) -> Outcome:
        if not deadline_s > 0:
            raise ConfigError(f"deadline_s must be positive, got {deadline_s}")
        self._adopt()
        with self._free:
            for _ in range(self.size + 3):
                worker = self._take()
                try:
                    outcome = self._call(worker, arguments, deadline_s, asked)
                except _LostError:
                    self._discard(worker)
                    continue
                except BaseException:
                    self._discard(worker)
                    raise
                if outcome.status in ("done", "error") and worker.calls < self.recycle_after:
                    with self._lock:
                        self._idle.append(worker)
                else:
                    self._discard(worker)
                    if outcome.status == "timeout":
                        spent = time.monotonic() - asked - outcome.queued_s
                        outcome = outcome._replace(seconds=spent)
                return outcome
        raise RewardError("workers are lost before they start on the call")

    def close(self) -> None:
        """End all processes; a later call starts new ones."""
        with self._lock:
            for worker in self._idle:
                worker.channel.close()
            self._idle.clear()
            zygote, self._zygote = self._zygote, None
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)
        if zygote is not None:
            zygote.close()

    def _adopt(self) -> None:
        """Start afresh in a forked process: the workers are another process's."""
        if self._owner == os.getpid():
            return
        for worker in self._idle:
            worker.channel.close()
        if self._zygote is not None:
            self._zygote.forget()
        self._reset()

    def _take(self) -> _Worker:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        cause: _LostError | None = None
        for _ in range(3):
            try:
                return self._start()
            except _LostError as error:
                cause = error
        raise RewardError(f"no worker process can be started for {self.target}: {cause}")

    def _start(self) -> _Worker:
        with self._lock:
            if self._zygote is None:
                self._zygote = _Zygote(self.target, self.memory_mb)
            zygote = self._zygote
            try:
                worker = zygote.fork()
            except _LostError:
                self._zygote = None
                zygote.close()
                raise
        if self.probe is not None:
            outcome = self._call(worker, self.probe, SELF_TEST_S, time.monotonic())
            if outcome.status != "done":
                self._discard(worker)
                raise _LostError(f"self-test: {outcome.status} {outcome.detail}")
        return worker

    def _discard(self, worker: _Worker) -> None:
        worker.channel.close()
        with self._lock:
            worker.zygote.reap(worker.pid)

    def _call(
        self, worker: _Worker, arguments: Mapping[str, Any], deadline_s: float, asked: float
    ) -> Outcome:
        channel = worker.channel
        worker.calls += 1
        channel.settimeout(START_TIMEOUT_S)
        try:
            send(channel, dict(arguments))
            first = receive(channel)
        except OSError as error:
            raise _LostError(str(error)) from error
        if first is None:
            raise _LostError("closed before it started")
        started: float = first["started"]
        queued_s = started - asked
        if not _readable(channel, started + deadline_s):
            # Reaping waits for the lock; killing must not. Only `_discard` reaps this pid, so
            # that it cannot be another process's.
            os.kill(worker.pid, 9)
            return Outcome("timeout", None, f"killed after {deadline_s} s", deadline_s, queued_s)
        try:
            answer = receive(channel)
        except OSError:
            answer = None
        if answer is None:
            spent = time.monotonic() - started
            return Outcome("error", None, "the worker died on the call", spent, queued_s)
        seconds = answer["ended"] - started
        if "failure" in answer:
            return Outcome(answer["failure"], None, answer["detail"], seconds, queued_s)
        return Outcome("done", answer["result"], "", seconds, queued_s)


def _readable(channel: socket.socket, until: float) -> bool:
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    return bool(poller.poll(max(0.0, (until - time.monotonic()) * 1000)))


def _after_fork() -> None:
    for pool in list(_POOLS):
        pool._adopt()


@atexit.register
def _at_exit() -> None:
    for pool in list(_POOLS):
        pool.close()


os.register_at_fork(after_in_child=_after_fork)
