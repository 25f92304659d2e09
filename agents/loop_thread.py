"""An event loop in a thread of its own, for callers of other loops and of none."""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from turngym.errors import EngineError, EngineTimeoutError

__all__ = ["LoopThread"]

T = TypeVar("T")

_CLOSED = "the connection to the servers was closed"


class LoopThread:
    """Runs coroutines until it is closed.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine there and wait for it.

        Raises:
            EngineError: closed.
            EngineTimeoutError: it took too long.
        """
        future = self.submit(work)
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError:
            raise EngineError(_CLOSED) from None
        except TimeoutError as error:
            if isinstance(error, EngineError):
                raise
            future.cancel()
            raise EngineTimeoutError(f"no answer within {timeout_s:g} s") from None

    def post(self, work: Callable[[], None]) -> None:
        """Run a function there soon; never raises."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work)

    def submit(self, work: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Start a coroutine there; cancelling the future cancels it.

        Raises:
            EngineError: closed.
        """
        if self._closed:
            work.close()
            raise EngineError(_CLOSED)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel what runs there and end the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True

        async def cancel() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(cancel(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()
