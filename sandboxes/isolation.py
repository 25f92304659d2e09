"""The isolation levels of the local backend and what each one promises."""

import os
import sys
from collections.abc import Sequence
from typing import Literal

from turngym.errors import ConfigError, SandboxUnavailableError
from turngym.sandboxes.base import Guarantees, Isolation

__all__ = ["LOST", "Level", "SandboxDegradedWarning", "guarantees_of", "levels_to_try"]


class SandboxDegradedWarning(UserWarning):
    """The sandbox runs at a weaker isolation level than the best one; says what is lost."""


Level = Literal["namespaces", "landlock", "none"]

LOST: dict[Level, str] = {
    "landlock": (
        "starting processes (subprocess, multiprocessing, os.fork), sockets even on a private "
        "loopback, disk and inode quota (only a largest file size holds), changing file modes and "
        "times (silently ignored), sharing of /tmp and /dev/shm paths, fork() of sessions"
    ),
    "none": (
        "everything but time-outs, resource limits and a clean environment: the code can read and "
        "write your files, use the network and leave processes behind"
    ),
}
"""What is missing in comparison with `namespaces`, in words."""

_WATCHED = (
    "memory: memory_mb hard per process, watched (soft) over all processes of a session; "
    "no control group could be made"
)
_BOUNDED = (
    "memory: memory_mb hard per process and watched over all processes of a session; together "
    "with the files of its folders bounded by a control group (memory_mb + 3 disk_mb + 64 MiB)"
)


def levels_to_try(isolation: Isolation) -> tuple[Level, ...]:
    """Return the levels to probe, strongest first.

    Raises:
        ConfigError: `isolation` is none of the three words.
        SandboxUnavailableError: not Linux, and isolation was asked for.
    """
    if isolation not in ("auto", "strict", "none"):
        raise ConfigError(f"isolation must be 'auto', 'strict' or 'none', got {isolation!r}")
    if not sys.platform.startswith("linux"):
        raise SandboxUnavailableError(
            f"the local sandbox needs Linux, this is {sys.platform}; use the docker or e2b backend"
        )
    if isolation == "none":
        return ("none",)
    if isolation == "strict":
        return ("namespaces",)
    unsafe = os.environ.get("TURNGYM_ALLOW_UNSAFE") == "1"
    return ("namespaces", "landlock", "none") if unsafe else ("namespaces", "landlock")


def guarantees_of(level: Level, missing: Sequence[str], limited: Sequence[str] = ()) -> Guarantees:
    """Return the record of a level that was found to work.

    Args:
        level: obtained by running a cell at it.
        missing: preloads that could not be imported.
        limited: controllers ("memory", "pids") of the control groups that bound whole sessions.
    """
    notes = [f"not preloaded: {reason}" for reason in missing]
    if level in LOST:
        notes.append(f"lost: {LOST[level]}")
    if level == "namespaces":
        is_bounded = "memory" in limited
        notes.append(_BOUNDED if is_bounded else _WATCHED)
        return Guarantees(
            backend="local",
            level=level,
            filesystem="hard",
            network="hard",
            processes="hard",
            memory="hard" if is_bounded else "soft",
            disk="hard",
            session_isolation="hard",
            fork=True,
            notes=tuple(notes),
        )
    confined = level == "landlock"
    return Guarantees(
        backend="local",
        level=level,
        filesystem="hard" if confined else "none",
        network="hard" if confined else "none",
        processes="hard" if confined else "soft",
        memory="hard" if confined else "soft",
        disk="soft" if confined else "none",
        session_isolation="hard" if confined else "none",
        notes=tuple(notes),
    )
