"""What a cell printed and showed, cut to size while it arrives."""

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from turngym.errors import TurngymError
from turngym.sandboxes.base import Artifact, ErrorInfo

__all__ = ["Capture", "OutputLimitError", "artifacts", "clip", "error_info", "uncaught"]

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TEXT = {
    "html": "text/html",
    "markdown": "text/markdown",
    "latex": "text/latex",
    "svg": "image/svg+xml",
}
_BASE64 = {"png": "image/png", "jpeg": "image/jpeg", "pdf": "application/pdf"}


class OutputLimitError(TurngymError):
    """Raised in a callback of the SDK to end a cell that prints too much."""


@dataclass
class Capture:
    """Head and tail of one stream, and its full size."""

    max_chars: int
    """Characters kept."""

    hard_bytes: int
    """Bytes after which the cell is stopped."""

    num_bytes: int = 0
    num_chars: int = 0
    _head: str = ""
    _tail: list[str] = field(default_factory=list)
    _tail_chars: int = 0

    def add(self, text: str) -> None:
        """Take the next piece.

        Raises:
            OutputLimitError: the stream has grown past `hard_bytes`.
        """
        self.num_bytes += len(text.encode("utf-8", "surrogatepass"))
        self.num_chars += len(text)
        room = self.max_chars // 2 - len(self._head)
        self._head += text[:room]
        self._tail.append(text[room:])
        self._tail_chars += len(self._tail[-1])
        if self._tail_chars > 2 * self.max_chars:
            self._tail = ["".join(self._tail)[-self.max_chars :]]
            self._tail_chars = len(self._tail[0])
        if self.num_bytes > self.hard_bytes:
            raise OutputLimitError(f"more than {self.hard_bytes} bytes of output")

    @property
    def truncated(self) -> bool:
        """Something was cut out."""
        return self.num_chars > self.max_chars

    @property
    def text(self) -> str:
        """What was kept; the cut is marked."""
        tail = "".join(self._tail)
        if not self.truncated:
            return self._head + tail
        kept = self.max_chars - len(self._head)
        cut = self.num_chars - self.max_chars
        return f"{self._head}\n[... {cut} characters cut ...]\n{tail[len(tail) - kept :]}"


def clip(text: str | None, max_chars: int) -> tuple[str | None, bool]:
    """Cut a text to its head; tell whether anything was lost."""
    if text is None or len(text) <= max_chars:
        return text, False
    return text[:max_chars], True


def error_info(error: Any) -> ErrorInfo:
    """Translate the SDK's error of a cell, without the colours of IPython's tracebacks."""
    plain = _ANSI.sub("", error.traceback)
    return ErrorInfo(name=error.name, value=error.value, traceback=plain)


def uncaught(stderr: str) -> ErrorInfo | None:
    """Read the exception that ended a program from the end of its standard error."""
    _, mark, trace = stderr.rpartition("Traceback (most recent call last):\n")
    last = trace.rstrip().rpartition("\n")[2]
    if not mark or not last:
        return None
    name, _, value = last.partition(": ")
    return ErrorInfo(name=name.rpartition(".")[2], value=value, traceback=mark + trace)


def artifacts(results: Sequence[Any], max_bytes: int) -> tuple[tuple[Artifact, ...], bool]:
    """Collect figures and rich texts, at most `max_bytes` in all; tell whether any was left out."""
    found: list[Artifact] = []
    for result in results:
        for name, mime in (_TEXT | _BASE64).items():
            if (value := getattr(result, name)) is not None:
                data = base64.b64decode(value) if name in _BASE64 else value.encode()
                found.append(Artifact(mime=mime, data=data))
    kept: list[Artifact] = []
    for artifact in found:
        max_bytes -= len(artifact.data)
        if max_bytes >= 0:
            kept.append(artifact)
    return tuple(kept), len(kept) < len(found)
