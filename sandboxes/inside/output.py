"""What a cell prints, kept within bounds."""

import array
import contextlib
import fcntl
import os
import termios

__all__ = ["Capture", "clip"]

_CHUNK = 1 << 16


def clip(text: str, max_chars: int) -> str:
    """Return `text`, or its head and tail with a mark between when it is longer."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters cut ...]\n{text[-half:]}"


class Capture:
    """Read one pipe, keep head and tail, count everything."""

    def __init__(self, fd: int, max_chars: int) -> None:
        self.fd = fd
        self.total = 0
        self.ended = False
        """Every writer has closed its end."""

        self._half = max(1, max_chars // 2)
        self._keep = 4 * self._half
        self._head = bytearray()
        self._tail = bytearray()
        os.set_blocking(fd, False)

    def read(self) -> None:
        """Take what is there, one chunk at most."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.fd, _CHUNK)
            self._add(data)
            self.ended = not data

    def drain(self) -> None:
        """Take what is in the pipe now, and not what a surviving writer adds meanwhile."""
        waiting = array.array("i", [0])
        fcntl.ioctl(self.fd, termios.FIONREAD, waiting)
        left = waiting[0]
        while left > 0 and (data := os.read(self.fd, min(left, _CHUNK))):
            self._add(data)
            left -= len(data)

    def _add(self, data: bytes) -> None:
        self.total += len(data)
        if (room := self._keep - len(self._head)) > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            if len(self._tail) > 2 * self._keep:
                del self._tail[: -self._keep]

    def take(self) -> tuple[str, int, bool]:
        """Return text, bytes seen and whether something was cut; then start afresh."""
        total, kept = self.total, len(self._head) + len(self._tail)
        if kept == total:
            text = (self._head + self._tail).decode("utf-8", "replace")
            cut = len(text) > 2 * self._half
            text = clip(text, 2 * self._half)
        else:
            head = self._head.decode("utf-8", "replace")[: self._half]
            tail = self._tail.decode("utf-8", "replace")[-self._half :]
            text, cut = f"{head}\n[... output cut, {total} bytes in all ...]\n{tail}", True
        self.total = 0
        self._head, self._tail = bytearray(), bytearray()
        return text, total, cut
