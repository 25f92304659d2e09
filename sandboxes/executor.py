"""Threads for blocking calls that can still be made while the interpreter exits."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["ExitSafeExecutor"]

T = TypeVar("T")


class ExitSafeExecutor(ThreadPoolExecutor):
    """A thread pool that makes calls itself, in turn, once no thread serves it any more.

    Sandboxes are closed by exit handlers when nobody closed them before. By then the interpreter
    has ended the threads of every pool and starts no new ones, but containers must still go.
    """

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Schedule a call; at exit make it now, blocking."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            future: Future[T] = Future()
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)
            return future
