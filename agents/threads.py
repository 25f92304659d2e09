"""Daemon threads for blocking code, and an event loop in a thread for synchronous callers.

Standard executors join their threads at exit, so one hung tool would hang the interpreter; here a
call that outlives its time is abandoned, and its thread replaced.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from queue import SimpleQueue
from typing import Any, TypeVar

from turngym.errors import EngineError

__all__ = ["BlockingPool", "CallTimeoutError", "LoopThread"]

T = TypeVar("T")


class CallTimeoutError(TimeoutError):
    """A call on the pool ran longer than it may; its thread was abandoned."""


class _Call:
    """One call on its way through the pool. The future belongs to the loop, the rest to `lock`."""

    __slots__ = (
        "fn",
        "future",
        "is_abandoned",
        "is_finished",
        "loop",
        "started",
        "timeout_s",
        "timer",
    )

    def __init__(
        self, fn: Callable[[], Any], loop: asyncio.AbstractEventLoop, timeout_s: float | None
    ) -> None:
        self.fn = fn
        self.loop = loop
        self.future: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        self.timeout_s = timeout_s
        self.timer: asyncio.TimerHandle | None = None
        self.started: float | None = None
        self.is_finished = False
        self.is_abandoned = False


class BlockingPool:
    """Runs blocking calls for coroutines, each with a limit on its running (not queueing) time.

    Threads are made on demand and woken one by one, each by the one before when calls still wait:
    many threads woken at once would do little but wait for the interpreter lock. A call that is
    cancelled or out of time cannot be stopped: its thread is left behind and replaced.

    Args:
        size: most threads, abandoned ones not counted.
        name: prefix of the thread names.
        max_abandoned: threads that may hang at once before calls are refused.
    """

    def __init__(self, size: int, *, name: str, max_abandoned: int = 64) -> None:
        self._size = size
        self._name = name
        self._max_abandoned = max_abandoned
        self._lock = threading.Lock()
        self._calls: deque[_Call] = deque()
        self._bell: SimpleQueue[bool] = SimpleQueue()
        self._threads = 0
        self._idle = 0
        self._is_rousing = False
        self._is_closed = False
        self.abandoned = 0
        """Threads hanging in a call nobody waits for."""

    async def call(self, fn: Callable[[], T], *, timeout_s: float | None = None) -> T:
        """Run `fn()` on a thread.

        Raises:
            CallTimeoutError: it ran longer than `timeout_s`.
            EngineError: the pool is closed, or too many of its threads hang.
            Exception: whatever `fn` raised.
        """
        call = _Call(fn, asyncio.get_running_loop(), timeout_s)
        self._submit(call)
        if timeout_s is not None:
            call.timer = call.loop.call_later(timeout_s, self._expire, call)
        try:
            value, error = await call.future
        except asyncio.CancelledError:
            self._abandon(call)
            raise
        finally:
            if call.timer is not None:
                call.timer.cancel()
        if error is not None:
            raise error
        result: T = value
        return result

    def close(self) -> None:
        """Let idle threads end; running calls finish on their own. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for _ in range(self._threads):
                self._bell.put(False)

    def _submit(self, call: _Call) -> None:
        with self._lock:
            if self._is_closed:
                raise EngineError(f"pool {self._name!r} is closed")
            if self.abandoned >= self._max_abandoned:
                raise EngineError(
                    f"{self.abandoned} calls on pool {self._name!r} hang and cannot be stopped; "
                    "give the tools that block a shorter timeout, or isolate them in a process"
                )
            self._calls.append(call)
            self._rouse()

    def _rouse(self) -> None:
        """Have one more thread look for calls; the lock is held."""
        if self._is_rousing or not self._calls:
            return
        if self._idle:
            self._idle -= 1
            self._is_rousing = True
            self._bell.put(True)
        elif self._threads < self._size:
            self._threads += 1
            self._is_rousing = True
            threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        while True:
            call = self._next(is_roused=True)
            while call is not None:
                value, error = _run(call)
                with self._lock:
                    call.is_finished = True
                    if call.is_abandoned:
                        self.abandoned -= 1
                        return
                with contextlib.suppress(RuntimeError):  # a closed loop: nobody waits any more
                    call.loop.call_soon_threadsafe(_deliver, call, value, error)
                call = self._next(is_roused=False)
            if not self._bell.get():
                return

    def _next(self, *, is_roused: bool) -> _Call | None:
        """Take the next call, or None and be counted as idle."""
        with self._lock:
            if is_roused:
                self._is_rousing = False
            while self._calls:
                call = self._calls.popleft()
                if not call.future.cancelled():
                    call.started = time.monotonic()
                    self._rouse()
                    return call
            self._idle += 1
            return None

    def _expire(self, call: _Call) -> None:
        assert call.timeout_s is not None
        left = (
            call.timeout_s
            if call.started is None
            else call.started + call.timeout_s - time.monotonic()
        )
        if left > 0:
            call.timer = call.loop.call_later(left, self._expire, call)
        elif not call.future.done() and self._abandon(call):
            error = CallTimeoutError(f"still running after {call.timeout_s:g} s")
            call.future.set_result((None, error))

    def _abandon(self, call: _Call) -> bool:
        """Give up a call; False when it has just finished and its result is on the way."""
        with self._lock:
            if call.is_finished or call.is_abandoned:
                return False
            if call.started is not None:
                call.is_abandoned = True
                self.abandoned += 1
                self._threads -= 1
                self._rouse()
            return True


def _run(call: _Call) -> tuple[Any, BaseException | None]:
    try:
        return call.fn(), None
    except Exception as error:
        return None, error
    except BaseException as error:  # SystemExit in a tool must not end a thread of ours
        return None, RuntimeError(f"the call raised {type(error).__name__}: {error}")


def _deliver(call: _Call, value: Any, error: BaseException | None) -> None:
    if not call.future.done():
        call.future.set_result((value, error))


class LoopThread:
    """An event loop on a thread of its own, for callers that are not coroutines."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end; an interrupt cancels it and waits for its clean-up."""
        done = threading.Event()

        async def main() -> T:
            try:
                return await coroutine
            finally:
                done.set()

        future = asyncio.run_coroutine_threadsafe(main(), self._loop)
        try:
            return future.result()
        except BaseException:
            if future.cancel():
                done.wait(timeout=10)
            raise

    def submit(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Begin a coroutine that nobody waits for."""
        asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Stop the loop and its thread. Idempotent."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        if not self._thread.is_alive():
            self._loop.close()
