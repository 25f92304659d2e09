"""Run a command as an ordinary user: python as_user.py UID COMMAND...   (needs root)

In a mount namespace of its own, in which the interpreter and this repository can be reached even if
they lie below a folder that only root may enter.
"""

import ctypes
import os
import stat
import sys
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_NEWNS, _BIND, _REC, _PRIVATE = 0x20000, 4096, 16384, 1 << 18


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    arguments = (text.encode() for text in (source, target, kind))
    if _libc.mount(*arguments, flags, data.encode()):
        raise OSError(ctypes.get_errno(), target)


def closed_folder(path: Path) -> Path | None:
    """The uppermost folder on the way to `path` that others may not enter."""
    ways = [*reversed(path.parents), path]
    return next((way for way in ways if not way.stat().st_mode & stat.S_IXOTH), None)


def open_up(needed: list[Path]) -> None:
    held = {path: os.open(path, os.O_PATH) for path in needed}
    covered: set[Path] = set()
    for path, fd in held.items():
        if (folder := closed_folder(path)) is not None and folder not in covered:
            mount("tmpfs", str(folder), "tmpfs", 0, "mode=755")
            covered.add(folder)
        if any(folder in path.parents for folder in covered):
            path.mkdir(parents=True, exist_ok=True)
            mount(f"/proc/self/fd/{fd}", str(path), "", _BIND | _REC)


def main() -> None:
    user = int(sys.argv[1])
    if _libc.unshare(_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    mount("none", "/", "", _REC | _PRIVATE)
    root = Path(__file__).resolve().parents[2]
    open_up([Path(sys.base_prefix), Path(sys.prefix), root])
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    os.environ["HOME"] = "/tmp"
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
