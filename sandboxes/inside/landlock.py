"""File access by path rules for sessions without a mount namespace (Landlock, Linux 5.13)."""

import ctypes
import os
import struct

__all__ = ["restrict", "version"]

_CREATE, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_RULE_PATH_BENEATH = 1

_EXECUTE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3
_OF_FILES = _EXECUTE | 1 << 1 | _READ_FILE | 1 << 14 | 1 << 15
_MAKE_SPECIAL = 1 << 6 | 1 << 11
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""Handled file rights by the version that introduced them."""

_NET, _SCOPE = 3, 3  # TCP bind and connect (version 4); abstract sockets and signals (version 6)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Landlock's ABI version here, 0 when there is none."""
    return max(0, int(_libc.syscall(ctypes.c_long(_CREATE), None, ctypes.c_size_t(0), 1)))


def restrict(readable: list[str], writable: list[str]) -> None:
    """Confine this process and its children to the given paths; cannot be undone.

    Args:
        readable: may be read and executed from.
        writable: may be used freely, except for device nodes.

    Raises:
        OSError: Landlock is absent or a path cannot be opened.
    """
    abi = version()
    if abi == 0:
        raise OSError(95, "the kernel has no Landlock")
    rights = max(value for since, value in _RIGHTS.items() if since <= abi)
    network, scope = (_NET if abi >= 4 else 0), (_SCOPE if abi >= 6 else 0)
    record = struct.pack("=3Q", rights, network, scope)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _call(_CREATE, record, ctypes.c_size_t(size), 0)
    for path in readable:
        _allow(ruleset, path, _EXECUTE | _READ_FILE | _READ_DIR, rights)
    for path in _DEVICES:
        _allow(ruleset, path, _READ_FILE | 1 << 1, rights)
    for path in writable:
        _allow(ruleset, path, rights & ~_MAKE_SPECIAL, rights)
    _libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    _call(_RESTRICT_SELF, ctypes.c_int(ruleset), 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, wanted: int, rights: int) -> None:
    if not os.path.exists(path):
        return
    fd = os.open(path, os.O_PATH)
    granted = wanted & rights if os.path.isdir(path) else wanted & rights & _OF_FILES
    rule = struct.pack("=Qi", granted, fd)
    _call(_ADD_RULE, ctypes.c_int(ruleset), _RULE_PATH_BENEATH, rule, 0)
    os.close(fd)


def _call(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"landlock: {os.strerror(code)}")
    return result
