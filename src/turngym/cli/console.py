"""What commands print: tables and progress, plain when the output is not a terminal."""

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

__all__ = ["Advance", "out", "progress", "quiet_transformers", "setup_logging", "show_table"]

out = Console(highlight=False, soft_wrap=True)

PLAIN_EVERY_S = 10.0
"""Seconds between progress lines when the output is not a terminal."""


class Advance(Protocol):
    """Tells a progress display how far the work is."""

    def __call__(self, done: int, note: str = "", *, total: int | None = None) -> None:
        """Set the number of finished items, a short note and, once known, the total."""
        ...


def setup_logging() -> None:
    """Show the library's warnings; plain lines when not a terminal."""
    handler: logging.Handler
    if out.is_terminal:
        handler = RichHandler(console=Console(stderr=True), show_path=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


def quiet_transformers() -> None:
    """Switch off the progress bars of transformers: commands show their own progress."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> None:
    """Print a table; aligned text without frame or colour when not a terminal."""
    cells = [[str(cell) for cell in row] for row in rows]
    if out.is_terminal:
        table = Table(title=title or None, title_justify="left")
        for column in columns:
            table.add_column(column)
        for row in cells:
            table.add_row(*map(escape, row))
        out.print(table)
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    if title:
        print(title)
    for row in [list(columns), *cells]:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


@contextmanager
def progress(label: str, total: int | None = None) -> Iterator[Advance]:
    """Show a bar with a rate and the time left.

    Where the output is not a terminal: a line every ten seconds on standard error.
    """
    if out.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=out, transient=True) as bar:
            task = bar.add_task(escape(label), total=total, note="")

            def update(done: int, note: str = "", *, total: int | None = total) -> None:
                bar.update(task, completed=done, total=total, note=escape(note))

            yield update
        return
    started = last = time.monotonic()

    def advance(done: int, note: str = "", *, total: int | None = total) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < PLAIN_EVERY_S:
            return
        last = now
        rate = done / (now - started)
        left = f", {(total - done) / rate:.0f} s left" if total and rate > 0 else ""
        # Standard output holds results, which a program may read (`--json`).
        print(
            f"{label}: {done}/{total}, {rate:.2f}/s{left}{' ' + note if note else ''}",
            file=sys.stderr,
            flush=True,
        )

    yield advance
