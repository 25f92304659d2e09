"""Control groups of the local backend; skipped where none can be made."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from turngym.sandboxes import Limits, SyncSandbox
from turngym.sandboxes.checking.leaks import gone_within, marked

LIMITS = Limits(memory_mb=100, disk_mb=8, processes=20)
CONTROLLERS: tuple[str, ...] = ("memory", "pids")
BOUND = (100 + 3 * 8 + 64) << 20


@pytest.fixture
def mark() -> str:
    return f"turngym-test-{uuid.uuid4().hex}"


@pytest.fixture
def sandbox(mark: str) -> Iterator[SyncSandbox]:
    with SyncSandbox("local", limits=LIMITS, preload=(), env={"MARK": mark}) as running:
        if running.guarantees.memory != "hard":
            pytest.skip("no control group is writable here")
        yield running


def folders(pid: int) -> dict[str, Path]:
    """Where the groups of a process are, by controller."""
    found: dict[str, Path] = {}
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return {}  # it has just ended
    for line in lines:
        _, names, path = line.split(":", 2)
        for mount in mounts:
            options = mount[-1].split(",")
            for name in CONTROLLERS:
                if name in names.split(",") and name in options and "cgroup" in mount:
                    found[name] = Path(mount[4] + path)
    return found


def session_folders(mark: str) -> set[Path]:
    return {
        folder
        for pid in marked(mark)
        for folder in folders(pid).values()
        if folder.parent.name.startswith("turngym-") and folder.name != "zygote"
    }


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def test_a_session_is_bounded_as_a_whole(sandbox: SyncSandbox, mark: str) -> None:
    with sandbox.session() as session:
        session.execute("1")
        (memory,) = (path for path in session_folders(mark) if "memory" in path.parts)
        (pids,) = (path for path in session_folders(mark) if "pids" in path.parts)
        if not (memory / "memory.limit_in_bytes").exists():
            pytest.skip("the names of the files are those of version 1")
        assert int((memory / "memory.limit_in_bytes").read_text()) == BOUND
        assert int((pids / "pids.max").read_text()) == 20
        # The worker alone: init, which is trusted, must outlive it.
        assert len((memory / "cgroup.procs").read_text().split()) == 1
        code = """
import os, time
for child in range(12):
    if os.fork() == 0:
        block = bytearray(40 << 20)
        block[::4096] = b"1" * len(block[::4096])
        time.sleep(10)
        os._exit(0)
time.sleep(10)
"""
        assert session.execute(code, 10.0).status == "memory"
        assert int((memory / "memory.max_usage_in_bytes").read_text()) <= BOUND
        assert session.execute("1 + 1").result == "2"


def test_forks_are_bounded_each_for_itself_and_all_is_removed_at_the_end(
    sandbox: SyncSandbox, mark: str
) -> None:
    session = sandbox.session()
    copy = session.fork()
    session.execute("1")
    groups = session_folders(mark)
    assert len({path.name for path in groups}) == 3  # the template, and both that go on
    for one in (session, copy):
        one.close()
    assert within(2.0, lambda: not any(path.exists() for path in groups))
    tree = next(iter(groups)).parent
    assert tree.exists()
    sandbox.close()
    assert not tree.exists()


OWNER = """
import sys
from turngym.sandboxes import SyncSandbox
sandbox = SyncSandbox("local", preload=(), env={"MARK": sys.argv[1]})
session = sandbox.session()
session.execute("1")
print("up", flush=True)
session.execute("while True: pass", 60)
"""


@pytest.mark.parametrize("launcher_too", [False, True])
def test_a_killed_owner_leaves_no_group(
    sandbox: SyncSandbox, mark: str, launcher_too: bool
) -> None:
    own = mark + "-own"
    command = [sys.executable, "-c", OWNER, own]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        trees = {path.parent for path in session_folders(own)}
        assert trees
        if launcher_too:
            for pid in marked(own):
                os.kill(pid, signal.SIGSTOP)
            for pid in marked(own):
                with contextlib.suppress(ProcessLookupError):  # went with the zygote
                    os.kill(pid, signal.SIGKILL)
        owner.kill()
    assert gone_within(own, 2.0) == {}
    if launcher_too:
        assert all(tree.exists() for tree in trees)
        SyncSandbox("local", preload=()).close()
    assert within(2.0, lambda: not any(tree.exists() for tree in trees))
