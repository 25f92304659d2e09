"""Who follows a run: a console, a notebook, nobody."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from turngym.agents.summary import Report

__all__ = ["Observer", "Quiet"]


class Observer(Protocol):
    """Follows a run; every method must return soon."""

    def stage(self, name: str, total: int) -> AbstractContextManager[Callable[..., None]]:
        """Begin a stage of `total` items; yields `advance(done, note="")`."""
        ...

    def evaluated(self, name: str, report: Report) -> None:
        """Take the numbers of an evaluation."""
        ...


class Quiet:
    """An observer that shows nothing."""

    @contextlib.contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[..., None]]:
        """Follow nothing."""
        yield lambda done, note="": None

    def evaluated(self, name: str, report: Report) -> None:
        """Show nothing; `evaluations/` in the run folder holds the numbers."""
