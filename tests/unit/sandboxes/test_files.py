import os
from pathlib import Path

import pytest

from turngym.sandboxes.inside.copy import copy_folder
from turngym.sandboxes.inside.files import list_files, read_file, write_file


def test_what_is_written_is_read_and_listed(tmp_path: Path) -> None:
    root = str(tmp_path)
    write_file(root, "a/b/c.bin", b"123")
    write_file(root, "/workspace/d.txt", b"4")
    write_file(root, "d.txt", b"")
    assert read_file(root, f"{root}/a/b/c.bin", 2) == b"12"
    assert list_files(root, 10) == ["a/b/c.bin", "d.txt"]
    assert list_files(root, 1) in (["a/b/c.bin"], ["d.txt"])


@pytest.mark.parametrize(
    "path", ["", ".", "..", "a/../../x", "/etc/passwd", "/workspacex/y", "a\0b"]
)
def test_paths_that_leave_the_workspace_are_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(PermissionError):
        read_file(str(tmp_path), path, 1)
    with pytest.raises(PermissionError):
        write_file(str(tmp_path), path, b"")


def test_no_component_may_be_a_symlink(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "secret").write_text("s")
    (root / "folder").symlink_to(outside)
    (root / "leaf").symlink_to(outside / "secret")
    for path in ("folder/secret", "leaf"):
        with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
            read_file(str(root), path, 10)
        with pytest.raises(OSError, match=r"symbolic links|Not a directory|exists"):
            write_file(str(root), path, b"x")
    assert (outside / "secret").read_text() == "s"
    assert list_files(str(root), 10) == []


def test_special_files_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(PermissionError, match="not a regular file"):
        read_file(str(tmp_path), "fifo", 1)
    with pytest.raises(OSError, match="fifo"):
        write_file(str(tmp_path), "fifo", b"x")


def copied(tmp_path: Path) -> tuple[Path, list[str]]:
    target = tmp_path / "target"
    target.mkdir()
    source = os.open(tmp_path / "source", os.O_RDONLY)
    return target, copy_folder(source, os.open(target, os.O_RDONLY))


def test_a_copied_folder_has_the_same_files_links_and_modes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub" / "empty").mkdir(parents=True)
    (source / "sub" / "f").write_bytes(b"x" * 5000)
    (source / "sub" / "f").chmod(0o640)
    os.utime(source / "sub" / "f", ns=(10**18, 10**18 + 5))
    os.link(source / "sub" / "f", source / "sub" / "twin")
    (source / "link").symlink_to("sub/f")
    with (source / "sparse").open("wb") as file:
        file.seek(1 << 20)
        file.write(b"end")
        file.truncate(1 << 22)
    target, lost = copied(tmp_path)
    assert lost == []
    found = (target / "sub" / "f").stat()
    assert (target / "sub" / "f").read_bytes() == b"x" * 5000
    assert (found.st_mode & 0o777, found.st_mtime_ns, found.st_nlink) == (0o640, 10**18 + 5, 2)
    assert (target / "sub" / "empty").is_dir()
    assert os.readlink(target / "link") == "sub/f"
    assert (target / "sparse").read_bytes() == (source / "sparse").read_bytes()
    assert (target / "sparse").stat().st_blocks * 512 < 1 << 20


def test_what_cannot_be_copied_is_named(tmp_path: Path) -> None:
    import socket

    source = tmp_path / "source"
    source.mkdir()
    os.mkfifo(source / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(source / "socket"))
    target, lost = copied(tmp_path)
    assert lost == ["special file socket"]
    assert (target / "fifo").is_fifo()


def test_a_deep_folder_is_copied_without_recursion(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    here = os.getcwd()
    os.chdir(source)
    for _ in range(1200):
        os.mkdir("d")
        os.chdir("d")
    os.chdir(here)
    target, lost = copied(tmp_path)
    assert lost == []
    depth, fd = 0, os.open(target, os.O_RDONLY)
    while "d" in os.listdir(fd):
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        depth, fd = depth + 1, below
    os.close(fd)
    assert depth == 1200
    os.system(f"rm -rf '{tmp_path}/source' '{tmp_path}/target'")
