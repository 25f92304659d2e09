"""vLLM in a child process that dies with this one and is replaced when it dies alone.

The two speak over a socket pair, weights lie in memory that both hold: no port, no file on a disk.
"""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from turngym.agents.config import EngineConfig
from turngym.agents.decode_thread import fail
from turngym.agents.vllm_backend import EngineDiedError, EngineSpec, Sample, SampleRequest
from turngym.agents.vllm_child import BEAT_S, Outbox, send_batches
from turngym.agents.vllm_weights import write_weights
from turngym.errors import EngineError, EngineTimeoutError

__all__ = ["IsolatedBackend"]

_ENGINE = "turngym.agents.vllm_engine:InProcessBackend"
_DEATHS = 3
"""Deaths in a row, with nothing sampled in between, after which the child is not replaced."""

_CLOSE_S = 5.0

_LAUNCHER = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
"""What tells learners of their process group; the engine is not one of them."""


@dataclass(slots=True, eq=False)
class _Job:
    """Something the child owes."""

    message: tuple[Any, ...]
    future: "Future[Any]" = field(default_factory=Future)
    is_sent: bool = False


class IsolatedBackend:
    """A `Backend` in a child process.

    A child that dies or hangs is replaced by another with the same weights and version. What it
    was sampling fails with `EngineDiedError`, so that `VLLMPolicy` asks again; what comes
    meanwhile waits.

    Args:
        engine: memory and deadlines.
        spec: model and sizes.
        factory: `module:callable` that makes the backend in the child from the two above.

    Raises:
        ConfigError, MissingDependencyError, EngineError: the child did not start; as the backend
            in this process would say.
    """

    def __init__(self, engine: EngineConfig, spec: EngineSpec, *, factory: str = _ENGINE) -> None:
        self._engine, self._spec, self._factory = engine, spec, factory
        self._files = [os.memfd_create(f"turngym-weights-{k}", os.MFD_CLOEXEC) for k in range(2)]
        """Memory for weights: one holds those in use, the other takes the next."""
        self._held: tuple[int, int] | None = None
        """Which of the two holds weights, and their version; None = those of the folder."""
        self._lock = threading.Lock()
        self._jobs: dict[int, _Job] = {}
        self._count = 0
        self._failure: EngineError | None = None
        self._is_closing = False
        self._version = 0
        self._deaths = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._outbox: Outbox | None = None
        """Messages for the child that is ready; None = none is."""
        started: Future[tuple[int, int]] = Future()
        self._started = started
        self._keeper = threading.Thread(target=self._keep, name="vllm-child", daemon=True)
        self._keeper.start()
        try:
            self._max_context, self._vocab = started.result(engine.timeout_s)
        except BaseException as error:
            self.close()
            if isinstance(error, FutureTimeoutError) and not started.done():
                raise EngineTimeoutError(
                    f"the engine's process was not ready within engine.timeout_s="
                    f"{engine.timeout_s:g}"
                ) from error
            raise

    @property
    def max_context(self) -> int:
        """Most tokens a context may hold, completion included."""
        return self._max_context

    @property
    def vocab(self) -> int:
        """Number of token ids."""
        return self._vocab

    @property
    def version(self) -> int:
        """Policy version of the weights in use, as the engine itself knows it."""
        return self._version

    @property
    def pid(self) -> int | None:
        """Process id of the child; None while there is none."""
        process = self._process
        return None if process is None else process.pid

    def submit(self, request: SampleRequest) -> "Future[Sample]":
        """Queue a request; see `Backend.submit`."""
        number, job = self._post("sample", request)
        job.future.add_done_callback(
            lambda future: self._drop(number) if future.cancelled() else None
        )
        return job.future

    def interrupt(self) -> None:
        """Give back what is running; see `Backend.interrupt`."""
        with contextlib.suppress(EngineDiedError):
            self._call("interrupt")

    def load(self, named: Sequence[tuple[str, Any]], *, version: int) -> None:
        """Sample from these weights from now on; see `Backend.load`."""
        target = 0 if self._held is None else 1 - self._held[0]
        write_weights(f"/proc/self/fd/{self._files[target]}", named)
        for retry in (False, True):
            try:
                self._version = self._call("load", target, version)
                break
            except EngineDiedError:
                if retry:
                    raise
        self._held = (target, version)
        os.ftruncate(self._files[1 - target], 0)

    def release(self, session: str) -> None:
        """Nothing is kept by session."""

    def close(self) -> None:
        """End the child; what is in flight fails. Idempotent."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            outbox, process = self._outbox, self._process
        if outbox is not None:
            outbox.put([("close",)])
        elif process is not None:
            process.kill()
        if self._keeper is not threading.current_thread():
            self._keeper.join(_CLOSE_S)
            if self._keeper.is_alive() and (process := self._process) is not None:
                process.kill()
                self._keeper.join(_CLOSE_S)
        for file in self._files:
            os.close(file)

    def _post(self, kind: str, *content: Any) -> tuple[int, _Job]:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._is_closing:
                raise EngineError("the policy was closed; make a new one")
            self._count += 1
            job = _Job((kind, self._count, *content))
            self._jobs[self._count] = job
            if self._outbox is not None:
                job.is_sent = True
                self._outbox.put([job.message])
            return self._count, job

    def _drop(self, number: int) -> None:
        with self._lock:
            job = self._jobs.pop(number, None)
            if job is not None and job.is_sent and self._outbox is not None:
                self._outbox.put([("cancel", number)])

    def _call(self, name: str, *arguments: Any) -> Any:
        number, job = self._post("call", name, *arguments)
        try:
            return job.future.result(self._engine.timeout_s)
        except FutureTimeoutError as error:
            if job.future.done():
                raise
            self._drop(number)
            if (process := self._process) is not None:
                process.kill()
            raise EngineTimeoutError(
                f"{name!r} was not answered within engine.timeout_s={self._engine.timeout_s:g}; "
                "the engine's process was replaced"
            ) from error

    def _keep(self) -> None:
        """Have a child as long as it takes. The thread outlives it: so does its death signal."""
        cause = EngineError("the policy was closed while this was in flight")
        try:
            while True:
                self._serve()
                if self._is_closing:
                    break
                self._deaths += 1
                if self._deaths > _DEATHS:
                    cause = EngineError(
                        f"the engine's process died {self._deaths} times in a row "
                        f"(last {self._obituary()})"
                    )
                    break
                self._fail_jobs(
                    EngineDiedError(f"the engine's process died ({self._obituary()})"), sent=True
                )
        except BaseException as error:
            cause = error if isinstance(error, EngineError) else EngineError(str(error))
            fail(self._started, error)  # type: ignore[arg-type]
        finally:
            with self._lock:
                self._failure = cause
            fail(self._started, cause)
            self._fail_jobs(cause, sent=False)

    def _obituary(self) -> str:
        code = None if self._process is None else self._process.returncode
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return f"by {signal.Signals(-code).name}"
        return f"exit code {code}"

    def _fail_jobs(self, error: EngineError, *, sent: bool) -> None:
        with self._lock:
            numbers = [n for n, job in self._jobs.items() if job.is_sent or not sent]
            jobs = [self._jobs.pop(number) for number in numbers]
        for job in jobs:
            fail(job.future, error)

    def _serve(self) -> None:
        """Start a child and pass messages until it is gone."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "turngym.agents.vllm_child"),
                    *(str(theirs.fileno()), str(os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                env={k: v for k, v in os.environ.items() if k not in _LAUNCHER},
                pass_fds=[theirs.fileno(), *self._files],
                start_new_session=True,
            )
        connection = Connection(ours.detach())
        outbox: Outbox = queue.SimpleQueue()
        sender = threading.Thread(
            target=send_batches, args=(connection, outbox), name="vllm-sender", daemon=True
        )
        sender.start()
        try:
            held = self._held
            outbox.put(
                [("open", self._factory, self._engine, self._spec, tuple(self._files), held)]
            )
            self._pass_messages(connection, outbox)
        finally:
            with self._lock:
                self._outbox = None
            outbox.put(None)
            _reap(self._process)
            sender.join()
            connection.close()

    def _pass_messages(self, connection: Connection, outbox: Outbox) -> None:
        steps, alive = -1, time.monotonic()
        while True:
            try:
                messages = connection.recv() if connection.poll(BEAT_S) else []
            except (EOFError, OSError):
                return
            for kind, *content in messages:
                if kind == "beat":
                    if content[0] != steps:
                        steps, alive = content[0], time.monotonic()
                elif kind == "ready":
                    alive = time.monotonic()
                    self._begin(outbox, *content)
                elif kind == "failed":
                    raise content[0]
                else:
                    alive = time.monotonic()
                    self._answer(*content)
            owes = any(job.is_sent for job in tuple(self._jobs.values())) or self._outbox is None
            if not owes:
                alive = time.monotonic()
            elif time.monotonic() - alive > self._engine.timeout_s:
                return

    def _begin(self, outbox: Outbox, context: int, vocab: int, version: int) -> None:
        """Let requests through to a child that is ready, first those that have waited."""
        self._version = version
        with self._lock:
            self._outbox = outbox
            waiting = [job for job in self._jobs.values() if not job.is_sent]
            for job in waiting:
                job.is_sent = True
            outbox.put([job.message for job in waiting])
        if not self._started.done():
            self._started.set_result((context, vocab))

    def _answer(self, number: int, value: Any) -> None:
        with self._lock:
            job = self._jobs.pop(number, None)
        if job is None:
            return
        if isinstance(value, EngineError):
            fail(job.future, value)
        elif job.future.set_running_or_notify_cancel():
            self._deaths = 0
            if isinstance(value, BaseException):
                job.future.set_exception(value)
            else:
                job.future.set_result(value)


def _reap(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
