"""File access for the host that no symlink of the executed code can lead astray."""

import contextlib
import os
import stat

__all__ = ["list_files", "read_file", "write_file"]

_ALIAS = "/workspace"
"""What the host calls the workspace, wherever it lies."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LEAF = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def _parts(root: str, path: str) -> list[str]:
    if os.path.isabs(path):
        above = next((name for name in (root, _ALIAS) if path.startswith(name + "/")), None)
        if above is None:
            raise PermissionError(1, f"only files below {_ALIAS} can be reached", path)
        path = path[len(above) :]
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or "\0" in path:
        raise PermissionError(1, f"path must name a file below {_ALIAS}, without '..'", path)
    return parts


def _open_parent(root: str, parts: list[str], *, create: bool) -> int:
    """Walk down one component at a time, so that no component can be a symlink."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in parts[:-1]:
        try:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=folder)
            below = os.open(part, _DIRECTORY, dir_fd=folder)
        finally:
            os.close(folder)
        folder = below
    return folder


def write_file(root: str, path: str, data: bytes) -> None:
    """Write a regular file below `root`, making folders as needed."""
    parts = _parts(root, path)
    folder = _open_parent(root, parts, create=True)
    try:
        flags = os.O_WRONLY | os.O_CREAT | _LEAF
        fd = os.open(parts[-1], flags, 0o644, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise PermissionError(1, "not a regular file", path)
        os.ftruncate(fd, 0)
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)


def read_file(root: str, path: str, max_bytes: int) -> bytes:
    """Return at most `max_bytes` of a regular file below `root`."""
    parts = _parts(root, path)
    folder = _open_parent(root, parts, create=False)
    try:
        fd = os.open(parts[-1], os.O_RDONLY | _LEAF, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise PermissionError(1, "not a regular file", path)
        chunks = []
        left = max_bytes
        while left > 0 and (chunk := os.read(fd, min(left, 1 << 20))):
            chunks.append(chunk)
            left -= len(chunk)
        return b"".join(chunks)
    finally:
        os.close(fd)


def list_files(root: str, max_entries: int) -> list[str]:
    """Return the relative paths of the regular files below `root`, sorted.

    Paths longer than the kernel's PATH_MAX (4096) cannot be opened by name and are left out.
    """
    found: list[str] = []
    folders = [""]
    while folders and len(found) < max_entries:
        folder = folders.pop()
        try:
            entries = list(os.scandir(os.path.join(root, folder) if folder else root))
        except OSError:
            continue
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                folders.append(path)
            elif entry.is_file(follow_symlinks=False):
                found.append(path)
    return sorted(path.encode("utf-8", "replace").decode("utf-8") for path in found)
