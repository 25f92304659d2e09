"""What the worker gives up before it runs anything: resources, privileges, system calls."""

import contextlib
import ctypes
import os
import resource
import struct
from typing import Any

from turngym.sandboxes.inside.seccomp import install

__all__ = ["Confinement"]

_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_CAP_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 63
_ADDRESS_SPACE_SLACK = 4 << 30


class Confinement:
    """How a worker is confined.

    Args:
        filter_calls: install the system-call filter.
        lone: the filter also cuts the worker off from other processes.
        count_processes: RLIMIT_NPROC counts this session alone (it has a user namespace).
    """

    def __init__(
        self, *, filter_calls: bool = True, lone: bool = False, count_processes: bool = True
    ) -> None:
        self._filter_calls = filter_calls
        self._lone = lone
        self._count_processes = count_processes

    def apply(self, limits: dict[str, Any]) -> None:
        """Confine this process for good."""
        reseed()
        self._set_rlimits(limits)
        drop_capabilities()
        if self._filter_calls:
            install(lone=self._lone)

    def _set_rlimits(self, limits: dict[str, Any]) -> None:
        memory = int(limits["memory_mb"]) << 20
        size, data = _memory_in_use()
        # RLIMIT_DATA gives a clean MemoryError and keeps the state; RLIMIT_AS also bounds shared
        # mappings, widely, since thread arenas reserve far more than they use.
        wanted = {
            resource.RLIMIT_DATA: data + memory,
            resource.RLIMIT_AS: size + 4 * memory + _ADDRESS_SPACE_SLACK,
            resource.RLIMIT_NOFILE: int(limits["open_files"]),
            resource.RLIMIT_FSIZE: int(limits["disk_mb"]) << 20,
            resource.RLIMIT_CORE: 0,
        }
        if self._count_processes:
            wanted[resource.RLIMIT_NPROC] = int(limits["processes"])
        for kind, value in wanted.items():
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
        cpu = max(1, int(limits["cpu_s"]))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))


def _memory_in_use() -> tuple[int, int]:
    """Address space and data segment of this process, bytes."""
    try:
        with open("/proc/self/statm", "rb") as file:
            fields = file.read().split()
    except OSError:
        return 1 << 30, 256 << 20
    page = os.sysconf("SC_PAGE_SIZE")
    return int(fields[0]) * page, int(fields[5]) * page


def drop_capabilities() -> None:
    """Give up every capability, also for programs executed later; become inspectable by oneself."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(_LAST_CAPABILITY + 1):
        if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
            break
    libc.prctl(_PR_CAP_AMBIENT, 4, 0, 0, 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = struct.pack("=Ii", _CAP_VERSION_3, 0)
    if libc.capset(header, bytes(24)):
        raise OSError(ctypes.get_errno(), "capabilities could not be dropped")
    libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def reseed() -> None:
    """Give the session its own random numbers: `random` reseeds on fork, numpy does not."""
    import sys

    numpy_random = sys.modules.get("numpy.random")
    with contextlib.suppress(AttributeError):
        if numpy_random is not None:
            numpy_random.seed()
