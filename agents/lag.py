"""Watches an event loop from outside and names what blocks it."""

import asyncio
import logging
import sys
import threading
import time
from types import FrameType

__all__ = ["LoopMonitor"]

logger = logging.getLogger(__name__)

_IDLE = ("select.py", "selectors.py")


class LoopMonitor:
    """A heartbeat in the loop and a thread that reads it; use as a context manager in the loop.

    When the heart has not beaten for `lag_s`, the frame the loop's thread is in is logged, once a
    blockage. A loop that merely waits for the interpreter lock is not reported.

    Args:
        lag_s: longest acceptable delay, seconds.
    """

    def __init__(self, lag_s: float) -> None:
        self._lag_s = lag_s
        self._interval_s = lag_s / 4
        self._stop = threading.Event()

    def __enter__(self) -> "LoopMonitor":
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._beat()
        self._thread = threading.Thread(target=self._watch, name="turngym-lag", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._timer.cancel()

    def _beat(self) -> None:
        self._last = time.monotonic()
        self._timer = self._loop.call_later(self._interval_s, self._beat)

    def _watch(self) -> None:
        reported = 0.0
        while not self._stop.wait(self._interval_s):
            last = self._last
            lag = time.monotonic() - last
            if lag < self._lag_s or last == reported:
                continue
            place = _place(sys._current_frames().get(self._loop_thread))
            if place is None:
                continue
            reported = last
            logger.warning(
                "the event loop has been blocked for %.2f s by %s: every rollout waits; "
                "move blocking code into the environment or a thread",
                lag,
                place,
            )


def _place(frame: FrameType | None) -> str | None:
    """Where the loop's thread is; None when it waits for events."""
    if frame is None or frame.f_code.co_filename.endswith(_IDLE):
        return None
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
