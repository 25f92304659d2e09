"""Rewards from unit tests that an environment ran in its sandbox.

The verdict must come from a channel the tested code cannot write: the supervisor's status of one
execution per test, never a word such as "PASSED" on stdout.
"""

from collections.abc import Iterable
from typing import Protocol

__all__ = ["Execution", "all_passed", "fraction_passed"]


class Execution(Protocol):
    """What is read of a sandbox's result; `turngym.sandboxes.ExecResult` has it."""

    @property
    def status(self) -> str:
        """`ok` when the test ran to its end; `infra` when the machine failed."""
        ...


def fraction_passed(results: Iterable[Execution | bool | None]) -> float | None:
    """Return the share of tests that passed.

    Args:
        results: one entry a test: the execution that ran it, or whether it passed. `None`, and a
            status `infra`, mean that the test could not be run.

    Returns:
        None when there is no test, or when any could not be run: the share would be a guess.

    >>> fraction_passed([True, True, False, True])
    0.75
    >>> fraction_passed([True, None]) is None
    True
    """
    passed = [_passed(result) for result in results]
    known = [value for value in passed if value is not None]
    if not passed or len(known) < len(passed):
        return None
    return sum(known) / len(known)


def all_passed(results: Iterable[Execution | bool | None]) -> float | None:
    """Return 1.0 when every test passed, 0.0 when one failed, None when it cannot be told.

    One failure settles it, even when other tests could not be run.

    >>> all_passed([True, True]), all_passed([None, False]), all_passed([None, True])
    (1.0, 0.0, None)
    """
    passed = [_passed(result) for result in results]
    if False in passed:
        return 0.0
    return None if not passed or None in passed else 1.0


def _passed(result: Execution | bool | None) -> bool | None:
    if result is None or isinstance(result, bool):
        return result
    return None if result.status == "infra" else result.status == "ok"
