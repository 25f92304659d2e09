"""The worker's half of a fork: copy this process into namespaces prepared for it.

The template (this process) forks a child; the child joins the new namespaces, which lie below this
one's, and forks the copy that lives there. This process's user owns the new user namespace, so
joining it needs no privilege; the rights gained by it are dropped at once.

What cannot be copied is replaced by something harmless and told: nothing stays shared.
"""

import ctypes
import mmap
import os
import random
import stat
from typing import Any

from turngym.sandboxes.inside.confine import drop_capabilities
from turngym.sandboxes.inside.tree import PRIVATE

__all__ = ["CHANNEL", "NAMESPACES", "branch"]

_DELETED = " (deleted)"
_STREAMS = 3
NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
"""What a copy joins, in this order."""

CHANNEL = 3
"""Where every worker finds its channel."""


def branch(
    descriptors: list[int], pipes: tuple[int, int], workspace: str, loop: Any
) -> list[str] | None:
    """Fork into the namespaces behind `descriptors`.

    Args:
        descriptors: entries of control groups, namespaces, the user namespace first, and channel,
            stdout and stderr of the copy.
        pipes: inodes of this process's stdout and stderr.
        workspace: where to go when the working directory does not exist in the copy.
        loop: the cells' event loop, or None; it cannot be copied.

    Returns:
        None in the template; what was lost in the copy.
    """
    folder = os.getcwd()
    threads = len(os.listdir("/proc/self/task")) - 1
    state = random.getstate()  # `random` reseeds itself in every forked child
    child = os.fork()
    if child:
        for fd in descriptors:
            os.close(fd)
        os.waitpid(child, 0)
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    places = -len(NAMESPACES) - _STREAMS
    for fd in descriptors[:places]:
        os.write(fd, b"0")
        os.close(fd)
    for fd in descriptors[places:-_STREAMS]:
        if libc.setns(fd, 0):
            os._exit(1)
        os.close(fd)
    # Twice: an orphan is adopted by the init of its parent's namespace, which must be the new one.
    if inner := os.fork():
        os.waitpid(inner, 0)
        os._exit(0)
    if os.fork():
        os._exit(0)
    drop_capabilities()
    random.setstate(state)
    os.setsid()
    lost = [f"{threads} background threads"] if threads else []
    if loop is not None:
        lost += _close_loop(loop)
    try:
        os.chdir(folder)
    except OSError:
        os.chdir(workspace)
        lost.append(f"working directory {folder}")
    channel, *outputs = descriptors[-_STREAMS:]
    lost += _replace_descriptors(channel, outputs, pipes)
    os.dup2(channel, CHANNEL, inheritable=False)
    os.close(channel)
    lost += _unshare_memory()
    return lost


def _close_loop(loop: Any) -> list[str]:
    import asyncio

    pending = len(asyncio.all_tasks(loop))
    loop.close()
    return [f"{pending} unfinished asyncio tasks"] if pending else []


def _replace_descriptors(channel: int, outputs: list[int], pipes: tuple[int, int]) -> list[str]:
    """Give the copy files of its own under the same numbers."""
    own = dict(zip(pipes, outputs, strict=True))
    lost = []
    for fd in sorted(int(name) for name in os.listdir("/proc/self/fd")):
        try:
            found = os.fstat(fd)
            name = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # the descriptor of the listing itself
        if fd in (channel, *outputs):
            continue
        if found.st_ino in own and stat.S_ISFIFO(found.st_mode):
            _put(own[found.st_ino], fd)
            continue
        try:
            if name.endswith(_DELETED) or not _reopenable(found.st_mode):
                raise OSError(0, "cannot be reopened")
            _reopen(fd, name)
        except OSError:
            # Under its number now stands something that answers EBADF to read and write.
            broken = os.open("/", os.O_PATH)
            _put(broken, fd)
            os.close(broken)
            if fd != CHANNEL:
                lost.append(f"file descriptor {fd} ({name})")
    for fd in outputs:
        os.close(fd)
    return lost


def _reopenable(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISCHR(mode)


def _reopen(fd: int, name: str) -> None:
    fields = {}
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
        for line in file:
            key, _, value = line.partition(":")
            fields[key] = value.strip()
    flags = int(fields["flags"], 8) & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC | os.O_CLOEXEC)
    new = os.open(name, flags)
    try:
        if stat.S_ISREG(os.fstat(new).st_mode):
            os.lseek(new, int(fields["pos"]), os.SEEK_SET)
        _put(new, fd)
    finally:
        os.close(new)


def _put(source: int, fd: int) -> None:
    os.dup2(source, fd, inheritable=os.get_inheritable(fd))


def _unshare_memory() -> list[str]:
    """Turn mappings shared with the template into private copies, or into the copy's own file."""
    lost = []
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        lines = file.read().splitlines()
    for line in lines:
        span, rights, offset, _, _, *rest = line.split(maxsplit=5)
        name = rest[0] if rest else ""
        private = any(name.startswith(folder + "/") for folder in PRIVATE)
        if rights[3] != "s" or not ("w" in rights or private):
            continue
        start, end = (int(part, 16) for part in span.split("-"))
        try:
            _remap(start, end - start, rights, name if private else "", int(offset, 16))
        except OSError as error:
            lost.append(f"shared memory {name}: {error}")
        else:
            if not private or name.endswith(_DELETED):
                lost.append(f"sharing of the memory {name or 'at ' + span} (its content is kept)")
    return lost


def _remap(start: int, size: int, rights: str, name: str, offset: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        *[ctypes.c_int] * 3,
        ctypes.c_long,
    ]
    protection = sum(
        bit for bit, letter in ((mmap.PROT_READ, "r"), (mmap.PROT_WRITE, "w")) if letter in rights
    )
    fixed = 0x10
    if name and not name.endswith(_DELETED):
        fd = os.open(name, os.O_RDWR if "w" in rights else os.O_RDONLY)
        result = libc.mmap(start, size, protection, mmap.MAP_SHARED | fixed, fd, offset)
        os.close(fd)
    else:
        content = ctypes.string_at(start, size)
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed
        result = libc.mmap(start, size, protection | mmap.PROT_WRITE, kind, -1, 0)
        if result == start:
            ctypes.memmove(start, content, size)
            libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(size), protection)
    if result != start:
        raise OSError(ctypes.get_errno(), "cannot be mapped anew")
