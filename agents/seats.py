"""The places in which an engine's episodes run, shared by all who ask it for rollouts."""

import asyncio
import contextlib
import time
from collections.abc import Callable

__all__ = ["Seats", "Shared"]


class Seats:
    """A bound on what runs at once, first come first served; used in one event loop at a time.

    Args:
        count: of the seats.
    """

    def __init__(self, count: int) -> None:
        self.unfinished = 0
        """Episodes asked for that have not ended; counted by the caller."""

        self._free = asyncio.Semaphore(count)
        self._taken = 0
        self._taken_s = 0.0
        self._since = time.monotonic()

    @property
    def taken_s(self) -> float:
        """Integral of the seats taken over time, until now, seat seconds."""
        return self._taken_s + self._taken * (time.monotonic() - self._since)

    def _change(self, by: int) -> None:
        now = time.monotonic()
        self._taken_s += self._taken * (now - self._since)
        self._since = now
        self._taken += by

    async def __aenter__(self) -> None:
        await self._free.acquire()
        self._change(1)

    async def __aexit__(self, *exc: object) -> None:
        self._change(-1)
        self._free.release()


class Shared:
    """A context manager that overlapping users share: made by the first, left by the last.

    Args:
        make: makes it.
    """

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
        self._make = make
        self._users = 0

    def __enter__(self) -> None:
        if not self._users:
            self._inner = self._make()
            self._inner.__enter__()
        self._users += 1

    def __exit__(self, *exc: object) -> None:
        self._users -= 1
        if not self._users:
            self._inner.__exit__(None, None, None)
