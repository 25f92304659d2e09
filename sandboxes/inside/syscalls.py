"""The system calls that Python does not wrap."""

import ctypes
import os
import platform
import struct

__all__ = [
    "AT_RECURSIVE",
    "bring_loopback_up",
    "clone",
    "collapse_memory",
    "mount",
    "pivot_into",
    "prctl",
    "protect_mount",
    "setns",
    "unshare",
]

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
SESSION_NAMESPACES = (
    CLONE_NEWUSER
    | CLONE_NEWNS
    | CLONE_NEWPID
    | CLONE_NEWNET
    | CLONE_NEWIPC
    | CLONE_NEWUTS
    | CLONE_NEWCGROUP
)

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
AT_RECURSIVE = 0x8000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4

_SIGCHLD = 17
_MADV_COLLAPSE = 25
_HUGE_PAGE = 2 << 20
_AT_FDCWD = -100
_NUMBERS = {
    "x86_64": {"clone": 56, "pivot_root": 155, "mount_setattr": 442},
    "aarch64": {"clone": 220, "pivot_root": 41, "mount_setattr": 442},
}

_libc = ctypes.CDLL(None, use_errno=True)
# Holds the GIL during the call: the child of a raw clone must find the interpreter as it left it.
_held = ctypes.PyDLL(None, use_errno=True)


def _number(name: str) -> int:
    try:
        return _NUMBERS[platform.machine()][name]
    except KeyError:
        raise OSError(38, f"no number of {name!r} for {platform.machine()}") from None


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def clone(flags: int) -> int:
    """Fork into new namespaces; 0 in the child.

    Python's and libc's fork handlers do not run, so the caller must have one thread only.
    """
    zero = ctypes.c_long(0)
    number = ctypes.c_long(_number("clone"))
    flag = ctypes.c_long(flags | _SIGCHLD)
    return _check(_held.syscall(number, flag, zero, zero, zero, zero), "clone")


def unshare(flags: int) -> None:
    """Move this process (its children, for PIDs) into new namespaces."""
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int = 0) -> None:
    """Join the namespace behind `fd`."""
    _check(_libc.setns(fd, kind), "setns")


def prctl(option: int, value: int) -> None:
    """Set a process attribute."""
    _check(_libc.prctl(option, value, 0, 0, 0), f"prctl {option}")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Attach a file system."""
    options = None if data is None else data.encode()
    name = None if kind is None else kind.encode()
    result = _libc.mount(os.fsencode(source), os.fsencode(target), name, flags, options)
    _check(result, f"mount {target}")


def protect_mount(target: str, *, read_only: bool, recursive: bool) -> None:
    """Make a mount nosuid and nodev, and read-only where asked; adds to what holds already."""
    attributes = MS_NOSUID | MS_NODEV | (MS_RDONLY if read_only else 0)
    record = struct.pack("=4Q", attributes, 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    _check(
        _libc.syscall(
            ctypes.c_long(_number("mount_setattr")),
            ctypes.c_int(_AT_FDCWD),
            os.fsencode(target),
            ctypes.c_uint(flags),
            record,
            ctypes.c_size_t(len(record)),
        ),
        f"mount_setattr {target}",
    )


def pivot_into(root: str) -> None:
    """Make `root`, a mount point, the root folder and let go of the old one."""
    os.chdir(root)
    _check(_libc.syscall(ctypes.c_long(_number("pivot_root")), b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")


def collapse_memory() -> None:
    """Put this process's heap on huge pages, where the kernel can.

    Forking then copies 512 times fewer page table entries; a page that is written later is still
    copied alone.
    """
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        lines = file.read().splitlines()
    for line in lines:
        span, rights, _, _, inode, *name = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in span.split("-"))
        is_heap = inode == "0" and (not name or name[0] == "[heap]")
        if rights == "rw-p" and is_heap and end - start >= _HUGE_PAGE:
            _libc.madvise(start, end - start, _MADV_COLLAPSE)


def bring_loopback_up() -> None:
    """Give a new network namespace its 127.0.0.1."""
    import fcntl
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sh14x", b"lo", 1)  # IFF_UP
        fcntl.ioctl(probe, 0x8914, request)  # SIOCSIFFLAGS
