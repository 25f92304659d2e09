"""Says what failed and where in the author's code, which is what an author needs to mend it."""

import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

__all__ = ["describe"]

_LIBRARIES = (
    str(Path(__file__).parents[1]),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


def describe(error: BaseException) -> str:
    """Return an error's type and message, and the place that caused it, in one line.

    The place is the innermost frame outside turngym and installed libraries of the first cause
    that has one; where there is none, the innermost frame.
    """
    text = f"{type(error).__name__}: {error}"[:2000]
    frames = [
        frame
        for cause in reversed(list(_causes(error)))
        for frame in reversed(traceback.extract_tb(cause.__traceback__))
    ]
    if not frames:
        return text
    own = (frame for frame in frames if not frame.filename.startswith(_LIBRARIES))
    frame = next(own, frames[0])
    return f"{text} ({frame.filename}:{frame.lineno} in {frame.name})"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, what it was raised from, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
