"""A thread that works in small steps and takes jobs between two of them."""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from turngym.errors import EngineError, EngineTimeoutError

__all__ = ["StepThread", "fail"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Job:
    run: Callable[[], None]
    future: "Future[Any] | None" = None
    """What somebody waits for; fails with the thread."""


def fail(future: "Future[Any]", error: EngineError) -> None:
    """Make a future raise, unless it is done or cancelled."""
    if not future.done() and future.set_running_or_notify_cancel():
        future.set_exception(error)


class StepThread:
    """Works until closed; when it fails, everybody who waits gets the cause, then and later.

    Args:
        step: does a bit of work; returns whether there is more.
        in_flight: futures that the work still owes.
        mode: context the thread runs in, such as `torch.no_grad`.
        threads: torch's intra-op threads for this thread; None = torch's setting.
    """

    def __init__(
        self,
        step: Callable[[], bool],
        in_flight: Callable[[], Iterable["Future[Any]"]],
        *,
        mode: Callable[[], contextlib.AbstractContextManager[Any]],
        threads: int | None,
    ) -> None:
        self._step = step
        self._mode = mode
        self._in_flight = in_flight
        self._threads = threads
        self._inbox: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._parked_for: int | None = None
        self._stopping = False
        self._failure: EngineError | None = None

    def post(self, run: Callable[[], None], future: "Future[Any] | None" = None) -> None:
        """Have a function run between two steps; starts the thread if need be.

        Raises:
            EngineError: the thread has failed or was closed.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._stopping:
                raise EngineError("the policy was closed; make a new one")
            self._inbox.put(_Job(run, future))
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name="sampler", daemon=True)
                self._thread.start()

    def call(self, function: Callable[[], T], *, timeout_s: float | None = None) -> T:
        """Run a function between two steps; return what it returns.

        Args:
            function: to run.
            timeout_s: most seconds to wait; None = no limit.

        Raises:
            EngineError: the thread has failed or was closed.
            EngineTimeoutError: it did not answer in time; it may still run the function later.
        """
        if self._parked_for == threading.get_ident():
            return function()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self.post(run, future)
        try:
            return future.result(timeout_s)
        except FutureTimeoutError as error:
            if future.done():
                raise
            raise EngineTimeoutError(
                f"the sampling thread did not answer within {timeout_s:g} s"
            ) from error

    @contextlib.contextmanager
    def parked(self) -> Iterator[None]:
        """Hold the thread between two steps; `call` then runs on the caller's own thread."""
        entered: Future[None] = Future()
        leave = threading.Event()
        caller = threading.get_ident()

        def park() -> None:
            self._parked_for = caller
            entered.set_result(None)
            leave.wait()
            self._parked_for = None

        self.post(park, entered)
        entered.result()
        try:
            yield
        finally:
            leave.set()

    def close(self, *, timeout_s: float | None = None) -> None:
        """End the thread and fail what is in flight. Closing twice is fine.

        Args:
            timeout_s: most seconds to wait for the step that is running; None = no limit.
        """
        with self._lock:
            self._stopping = True
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._inbox.put(_Job(lambda: None))
            thread.join(timeout_s)

    def _main(self) -> None:
        cause = EngineError("the policy was closed while this was in flight")
        try:
            if self._threads is not None:
                torch.set_num_threads(self._threads)
            with self._mode():
                self._loop()
        except BaseException as error:
            logger.exception("the sampling engine failed")
            cause = EngineError(f"the sampling engine failed: {type(error).__name__}: {error}")
            cause.__cause__ = error
        finally:
            with self._lock:
                self._failure = cause
            while not self._inbox.empty():
                if (future := self._inbox.get().future) is not None:
                    fail(future, cause)
            for future in self._in_flight():
                fail(future, cause)

    def _loop(self) -> None:
        has_work = False
        while not self._stopping:
            while not has_work or not self._inbox.empty():
                self._inbox.get().run()
                has_work = True
            has_work = self._step()
