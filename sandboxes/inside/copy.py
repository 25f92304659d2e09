"""Copy a folder whose contents nobody vouches for."""

import os
import stat

__all__ = ["copy_folder"]

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK = 1 << 20


class _Copy:
    def __init__(self, device: int) -> None:
        self.device = device
        self.links: dict[int, tuple[int, str]] = {}
        self.lost: list[str] = []


def copy_folder(source: int, target: int) -> list[str]:
    """Copy everything below one open folder into another.

    Regular files, folders, symlinks and FIFOs are copied with modes and times; hard links within
    one folder stay linked. Other file systems mounted below are left out. Never follows a symlink
    and never builds a path, so depth is bounded by open files only.

    Args:
        source: descriptor of the folder to copy; closed afterwards.
        target: descriptor of an empty folder; closed afterwards.

    Returns:
        What could not be copied, in words.
    """
    work = _Copy(os.fstat(source).st_dev)
    pending = [(source, target)]
    while pending:
        source, target = pending.pop()
        try:
            below = _copy_entries(work, source, target)
            while below:
                name = below.pop()
                try:
                    inner = (
                        os.open(name, _FOLDER, dir_fd=source),
                        os.open(name, _FOLDER, dir_fd=target),
                    )
                except OSError as error:
                    work.lost.append(f"folder {name}: {error.strerror}")
                    continue
                pending.append(inner)
        finally:
            os.close(source)
            os.close(target)
    return work.lost


def _copy_entries(work: _Copy, source: int, target: int) -> list[str]:
    """Copy what is not a folder, make the folders; returns their names."""
    folders = []
    work.links.clear()
    for name in os.listdir(source):
        found = os.stat(name, dir_fd=source, follow_symlinks=False)
        if found.st_dev != work.device:
            continue
        mode = stat.S_IMODE(found.st_mode)
        try:
            if stat.S_ISDIR(found.st_mode):
                os.mkdir(name, mode | 0o700, dir_fd=target)
                folders.append(name)
            elif stat.S_ISLNK(found.st_mode):
                os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
            elif stat.S_ISFIFO(found.st_mode):
                os.mkfifo(name, mode, dir_fd=target)
            elif not stat.S_ISREG(found.st_mode):
                work.lost.append(f"special file {name}")
            elif found.st_ino in work.links:
                first = work.links[found.st_ino][1]
                os.link(first, name, src_dir_fd=target, dst_dir_fd=target, follow_symlinks=False)
            else:
                work.links[found.st_ino] = found.st_nlink, name
                _copy_file(name, mode, source, target)
                times = found.st_atime_ns, found.st_mtime_ns
                os.utime(name, ns=times, dir_fd=target, follow_symlinks=False)
        except OSError as error:
            work.lost.append(f"file {name}: {error.strerror}")
    return folders


def _copy_file(name: str, mode: int, source: int, target: int) -> None:
    reading = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=source)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    writing = os.open(name, flags, mode, dir_fd=target)
    try:
        size = os.fstat(reading).st_size
        position = 0
        while position < size:
            try:
                position = os.lseek(reading, position, os.SEEK_DATA)
            except OSError:
                break  # a hole up to the end
            end = os.lseek(reading, position, os.SEEK_HOLE)
            while position < end:
                data = os.pread(reading, min(end - position, _CHUNK), position)
                if not data:
                    return
                position += os.pwrite(writing, data, position)
        os.ftruncate(writing, size)
        os.fchmod(writing, mode)
    finally:
        os.close(reading)
        os.close(writing)
