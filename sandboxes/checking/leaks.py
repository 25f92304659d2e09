"""What a sandbox may have left on this machine: processes and file descriptors."""

import os
import time
from pathlib import Path

__all__ = ["descendants", "gone_within", "marked", "open_files", "zombies_within"]


def open_files() -> int:
    """File descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


def descendants() -> set[int]:
    """PIDs of this process's descendants, those inside PID namespaces included."""
    return set(_below({os.getpid()}, _processes())) - {os.getpid()}


def marked(mark: str) -> dict[int, str]:
    """PIDs and states (Z for zombies) of the processes that carry a mark.

    Args:
        mark: a text that is part of their command line, or of an ancestor's that is alive.
    """
    processes = _processes()
    roots = {pid for pid in processes if pid != os.getpid() and mark.encode() in _words(pid)}
    return {pid: processes[pid][1] for pid in _below(roots, processes)}


def gone_within(mark: str, seconds: float) -> dict[int, str]:
    """What `marked` still finds after at most `seconds`; empty as soon as nothing is left."""
    deadline = time.monotonic() + seconds
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def zombies_within(mark: str, seconds: float) -> set[int]:
    """Zombies of `marked` that nobody collects for `seconds`."""
    deadline = time.monotonic() + seconds
    left = {pid for pid, state in marked(mark).items() if state == "Z"}
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left &= {pid for pid, state in marked(mark).items() if state == "Z"}
    return left


def _processes() -> dict[int, tuple[int, str]]:
    """Parent and state by PID."""
    found = {}
    for name in os.listdir("/proc"):
        try:
            text = Path("/proc", name, "stat").read_text(errors="replace")
            state, parent = text.rpartition(")")[2].split()[:2]
            found[int(name)] = int(parent), state
        except (OSError, ValueError):
            continue  # not a process, or no longer one
    return found


def _words(pid: int) -> bytes:
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes()
    except OSError:
        return b""


def _below(roots: set[int], processes: dict[int, tuple[int, str]]) -> set[int]:
    found = set(roots)
    while below := {pid for pid, (parent, _) in processes.items() if parent in found} - found:
        found |= below
    return found
