"""The file tree a session sees: read-only system and interpreter, private writable folders."""

import os
import sys
from typing import Any

from turngym.sandboxes.inside.copy import copy_folder
from turngym.sandboxes.inside.syscalls import (
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    mount,
    pivot_into,
    protect_mount,
)

__all__ = ["PRIVATE", "SYSTEM", "build", "interpreter_paths", "mount_private"]

PRIVATE = {"/workspace": "0755", "/tmp": "1777", "/dev/shm": "1777"}
"""Folders of a session's own, and their modes."""

_ROOTS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_ETC = """
    alternatives ca-certificates fonts ld.so.cache ld.so.conf ld.so.conf.d localtime
    mime.types pki protocols services ssl/certs ssl/openssl.cnf terminfo timezone
""".split()  # noqa: SIM905
SYSTEM = (*_ROOTS, *(f"/etc/{name}" for name in _ETC))
"""What of the host every session may read."""

_ETC_TEXTS = {
    "passwd": "root:x:0:0:root:/:/bin/sh\nsandbox:x:1000:1000:sandbox:/workspace:/bin/sh\n",
    "group": "root:x:0:\nsandbox:x:1000:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_STAGE = "/tmp"


def build(paths: list[str]) -> None:
    """Make the tree and enter it; needs its own mount and PID namespace and full rights there.

    Args:
        paths: further host paths to show, read-only, at the same place.
    """
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    # Opened first: the stage hides what lies below it.
    sources = [(path, os.open(path, os.O_PATH)) for path in _visible(paths)]
    devices = [(f"/dev/{name}", os.open(f"/dev/{name}", os.O_PATH)) for name in _DEVICES]
    descriptors = "/proc/self/fd"
    mount("tmpfs", _STAGE, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=4m")
    for folder in ("/proc", "/etc", "/dev", *PRIVATE):
        os.makedirs(_STAGE + folder, exist_ok=True)
    for path, fd in sources + devices:
        _make_place(_STAGE + path, is_folder=os.path.isdir(f"{descriptors}/{fd}"))
        mount(f"{descriptors}/{fd}", _STAGE + path, None, MS_BIND | MS_REC)
        if path not in dict(devices):
            protect_mount(_STAGE + path, read_only=True, recursive=True)
        os.close(fd)
    _make_links()
    for name, text in _ETC_TEXTS.items():
        with open(f"{_STAGE}/etc/{name}", "w", encoding="ascii") as file:
            file.write(text)
    mount("proc", f"{_STAGE}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    pivot_into(_STAGE)
    protect_mount("/", read_only=True, recursive=False)


def interpreter_paths() -> list[str]:
    """Where this interpreter and its packages live."""
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    return sorted(prefixes | {path for path in sys.path if os.path.isabs(path)})


def _visible(paths: list[str]) -> list[str]:
    """Existing paths to bind, without those that lie below another one; links are made instead."""
    real = [path for path in (*SYSTEM, *paths) if os.path.exists(path) and not os.path.islink(path)]
    kept: list[str] = []
    for path in sorted(set(real)):
        if not any((path + "/").startswith(above + "/") for above in kept):
            kept.append(path)
    return kept


def _make_place(path: str, *, is_folder: bool) -> None:
    os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
    if not is_folder and not os.path.lexists(path):
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))


def _make_links() -> None:
    links = {path: os.readlink(path) for path in _ROOTS if os.path.islink(path)}
    links |= {"/dev/fd": "/proc/self/fd"}
    links |= {f"/dev/{name}": f"/proc/self/fd/{n}" for n, name in enumerate(_STREAMS)}
    for path, target in links.items():
        os.symlink(target, _STAGE + path)
    for name in _ETC:
        path = f"/etc/{name}"
        if os.path.islink(path) and not os.path.lexists(_STAGE + path):
            os.makedirs(os.path.dirname(_STAGE + path), exist_ok=True)
            os.symlink(os.readlink(path), _STAGE + path)


_STREAMS = ("stdin", "stdout", "stderr")


def mount_private(limits: dict[str, Any], paths: list[str], *, copy: bool) -> list[str]:
    """Give this session's mount namespace its own writable folders and its own /proc.

    Args:
        limits: `disk_mb` and `inodes` bound each folder.
        paths: shown paths; those below a private folder are put back into it.
        copy: take over what the folders hold now.

    Returns:
        What could not be taken over, in words.
    """
    lost = []
    size = f"size={int(limits['disk_mb'])}m,nr_inodes={int(limits['inodes'])}"
    for folder, mode in PRIVATE.items():
        inner = [path for path in paths if path.startswith(folder + "/") and os.path.exists(path)]
        held = [(path, os.open(path, os.O_PATH)) for path in inner]
        old = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, f"{size},mode={mode}")
        if copy:
            lost += copy_folder(old, os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
        else:
            os.close(old)
        for path, fd in held:
            source = f"/proc/self/fd/{fd}"
            _make_place(path, is_folder=os.path.isdir(source))
            mount(source, path, None, MS_BIND | MS_REC)
            os.close(fd)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    return lost
