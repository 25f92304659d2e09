"""Deadlines kept by the caller: in a thread, on an event loop, or in a process that is killed.

A Python thread cannot be stopped from outside. One that outlives its deadline is abandoned: it is
a daemon, it is counted, and its place is taken by a fresh one; when `MAX_ABANDONED` of them hang,
further calls are refused, because by then the machine is busy with work that nobody waits for.
A child process has no such limit: it is killed with everything it started.

No signals are used, so everything here works from any thread.
"""

import asyncio
import contextvars
import os
import queue
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from turngym.errors import EnvError

__all__ = ["MAX_ABANDONED", "Stats", "run_async", "run_threaded", "stats"]

MAX_ABANDONED = 64
"""Hung threads (and event loops) after which calls are refused."""

_MAX_IDLE = 64
_CANCEL_GRACE_S = 0.2

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What the callers of this process hold."""

    idle: int
    """Threads waiting for work."""

    abandoned: int
    """Threads and event loops that outlived their deadline and still run."""


@dataclass(slots=True)
class _Job:
    work: Callable[[], Any]
    context: contextvars.Context
    reply: "queue.SimpleQueue[tuple[Any, BaseException | None]]"
    answered: bool = False
    abandoned: bool = False


class _Worker(threading.Thread):
    """Runs one job after another; ends when a job of its was abandoned."""

    def __init__(self, threads: "_Threads") -> None:
        super().__init__(name="turngym-tool", daemon=True)
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = threads

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            value, failure = None, None
            try:
                value = job.context.run(job.work)
            except BaseException as error:  # SystemExit in a tool must not end the thread silently
                failure = error
            if not self._threads.finished(job, self):
                return
            job.reply.put((value, failure))
            del job, value, failure


class _Threads:
    """Threads that are reused, and replaced when they hang."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.idle: list[_Worker] = []
        self.abandoned = 0

    def run(self, work: Callable[[], T], timeout_s: float) -> T:
        with self.lock:
            _refuse_above_the_cap(self.abandoned)
            worker = self.idle.pop() if self.idle else None
        if worker is None:
            worker = _Worker(self)
            worker.start()
        job = _Job(work, contextvars.copy_context(), queue.SimpleQueue())
        worker.jobs.put(job)
        try:
            value, failure = job.reply.get(timeout=timeout_s)
        except queue.Empty:
            with self.lock:
                if not job.answered:
                    job.abandoned = True
                    self.abandoned += 1
                    raise TimeoutError(f"still running after {timeout_s:g} s") from None
            value, failure = job.reply.get()
        if failure is not None:
            raise failure
        result: T = value
        return result

    def finished(self, job: _Job, worker: _Worker) -> bool:
        """Take note that a job is over; False when nobody waits for it any more."""
        with self.lock:
            if job.abandoned:
                self.abandoned -= 1
                return False
            job.answered = True
            if len(self.idle) < _MAX_IDLE:
                self.idle.append(worker)
            else:
                worker.jobs.put(None)
            return True


class _Loop:
    """One event loop in a daemon thread for all async tools; replaced when one blocks it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.abandoned = 0

    def run(self, start: Callable[[], Awaitable[T]], timeout_s: float) -> T:
        with self.lock:
            _refuse_above_the_cap(self.abandoned)
            if self.loop is None:
                self.loop = asyncio.new_event_loop()
                threading.Thread(
                    target=self._serve, args=(self.loop,), name="turngym-async-tools", daemon=True
                ).start()
            loop = self.loop

        async def started() -> T:
            return await start()

        future = asyncio.run_coroutine_threadsafe(started(), loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():
                raise
            future.cancel()
            self._replace_if_blocked(loop)
            raise TimeoutError(f"still running after {timeout_s:g} s") from None

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()
        loop.close()
        with self.lock:
            self.abandoned -= 1

    def _replace_if_blocked(self, loop: asyncio.AbstractEventLoop) -> None:
        alive = threading.Event()
        loop.call_soon_threadsafe(alive.set)
        if alive.wait(_CANCEL_GRACE_S):
            return
        with self.lock:
            if self.loop is loop:
                self.loop = None
                self.abandoned += 1
                loop.call_soon_threadsafe(loop.stop)


def _refuse_above_the_cap(abandoned: int) -> None:
    if abandoned >= MAX_ABANDONED:
        raise EnvError(
            f"{abandoned} tool calls still run although their deadline is over; no more are "
            "started. Mark the tool isolated=True so that it runs in a process that can be killed"
        )


_threads = _Threads()
_loop = _Loop()


def _forget() -> None:
    """A forked child has none of the parent's threads: start afresh there."""
    global _threads, _loop
    _threads, _loop = _Threads(), _Loop()


os.register_at_fork(after_in_child=_forget)


def run_threaded(work: Callable[[], T], timeout_s: float) -> T:
    """Run `work` on another thread and wait at most `timeout_s` seconds for it.

    Raises:
        TimeoutError: the deadline passed; the thread is abandoned.
        EnvError: `MAX_ABANDONED` threads already hang.
        BaseException: whatever `work` raised.
    """
    return _threads.run(work, timeout_s)


def run_async(start: Callable[[], Awaitable[T]], timeout_s: float) -> T:
    """Run the coroutine that `start` returns on the shared loop, at most `timeout_s` seconds.

    Raises:
        TimeoutError: the deadline passed; the coroutine was cancelled. When it blocks the loop and
            cannot be cancelled, the loop is abandoned like a thread and replaced.
        EnvError: `MAX_ABANDONED` loops already hang.
        BaseException: whatever the coroutine raised.
    """
    return _loop.run(start, timeout_s)


def stats() -> Stats:
    """Return how many threads wait and how many were abandoned and still run."""
    return Stats(idle=len(_threads.idle), abandoned=_threads.abandoned + _loop.abandoned)
