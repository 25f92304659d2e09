"""Rich displays of a cell: open figures and the `_repr_*_` methods of its last value."""

import io
import sys

__all__ = ["artifacts"]

_METHODS = (
    ("_repr_html_", b"text/html"),
    ("_repr_latex_", b"text/latex"),
    ("_repr_svg_", b"image/svg+xml"),
    ("_repr_png_", b"image/png"),
    ("_repr_jpeg_", b"image/jpeg"),
)


def artifacts(value: object, max_bytes: int) -> list[bytes]:
    """Return mime, data, mime, data, ... of what `value` and open figures show.

    What does not fit in `max_bytes` altogether is left out. Runs methods of untrusted objects, so
    it may raise anything.
    """
    shown: list[bytes] = []
    left = max_bytes
    for mime, data in _displays(value) + _figures():
        if len(data) <= left:
            shown += [mime, data]
            left -= len(data)
    return shown


def _displays(value: object) -> list[tuple[bytes, bytes]]:
    found = []
    for name, mime in _METHODS:
        method = getattr(type(value), name, None)
        data = method(value) if callable(method) else None
        if isinstance(data, tuple):
            data = data[0]
        if isinstance(data, str):
            data = data.encode("utf-8", "backslashreplace")
        if isinstance(data, bytes):
            found.append((mime, data))
    return found


def _figures() -> list[tuple[bytes, bytes]]:
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return []
    drawn = []
    for number in pyplot.get_fignums():
        buffer = io.BytesIO()
        pyplot.figure(number).savefig(buffer, format="png", bbox_inches="tight")
        drawn.append((b"image/png", buffer.getvalue()))
    pyplot.close("all")
    return drawn
