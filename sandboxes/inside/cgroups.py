"""Control groups, where the kernel lets us make some: limits for all processes of a session.

    <group of the owner>/turngym-<owner>    made by the launcher, given to the user of the sessions
        zygote                              the zygote and the inits, which are trusted
        <number>                            the worker of a session and whatever it starts
        <number>.<random>                   the same of a fork of it

Version 1 has one such tree for memory and one for processes, version 2 one for both. What works is
found by trying it in a throw-away child. Whoever made a group removes it: init at its end, the
zygote after an init that was killed, the launcher at its own end, and the next launcher after
one that was killed.
"""

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

__all__ = ["Group", "Tree", "grow", "oom_counter", "oom_kills", "uproot"]

_PREFIX = "turngym-"
_ZYGOTE = "zygote"
_CONTROLLERS = ("memory", "pids")
_OVERHEAD_MB = 64
_PROBED_BYTES = 4 << 20
_FOLDERS = 3
"""Private folders of a session, each of `disk_mb`; files in memory are charged as memory."""


class Tree(NamedTuple):
    """The groups of one sandbox in one hierarchy of the kernel."""

    place: int
    """Descriptor of the folder above: no path leads there from the zygote's own file tree."""

    name: str
    folder: int
    """Descriptor of the tree's own folder."""

    controllers: tuple[str, ...]
    unified: bool
    """Control groups of version 2."""


class Group:
    """The processes of one session.

    Args:
        trees: where the group has a folder.
        name: of the folders.
    """

    def __init__(self, trees: Sequence[Tree], name: str) -> None:
        self._trees = trees
        self._name = name
        self._folders: list[int] = []
        self.entries: list[int] = []
        """Descriptors that a process writes ``0`` to in order to enter."""

        try:
            for tree in trees:
                os.mkdir(name, dir_fd=tree.folder)
                self._folders.append(os.open(name, os.O_PATH, dir_fd=tree.folder))
                # A lone thread that moves itself takes no lock that all processes of the machine
                # share, which costs milliseconds; only version 1 lets it.
                entry = "cgroup.procs" if tree.unified else "tasks"
                self.entries.append(_open(self._folders[-1], entry))
        except OSError:
            self.close()
            remove(trees, name)
            raise

    def limit(self, limits: dict[str, Any]) -> None:
        """Set what the processes of the group may use together."""
        megabytes = int(limits["memory_mb"]) + _FOLDERS * int(limits["disk_mb"]) + _OVERHEAD_MB
        for tree, folder in zip(self._trees, self._folders, strict=True):
            _limit(folder, tree, megabytes << 20, int(limits["processes"]))

    def enter(self, pid: int = 0) -> None:
        """Move a process, by default the calling one, into the group."""
        for entry in self.entries:
            os.write(entry, b"%d" % pid)

    def holds(self, pid: int) -> bool:
        """A process is in the group."""
        for folder in self._folders:
            fd = os.open("cgroup.procs", os.O_RDONLY, dir_fd=folder)
            with open(fd, "rb") as file:
                if b"%d" % pid not in file.read().split():
                    return False
        return True

    def sibling(self) -> "Group":
        """Make a group for a fork of this session; goes at the latest when this one goes."""
        return Group(self._trees, f"{self._name}.{secrets.token_hex(4)}")

    def oom_counter(self) -> int:
        """Open the file for `oom_kills`; -1 where memory is not limited by the group."""
        for tree, folder in zip(self._trees, self._folders, strict=True):
            if "memory" in tree.controllers:
                name = "memory.events" if tree.unified else "memory.oom_control"
                return os.open(name, os.O_RDONLY, dir_fd=folder)
        return -1

    def close(self) -> None:
        """Let go of the descriptors; the group stays."""
        for fd in (*self._folders, *self.entries):
            os.close(fd)
        self._folders, self.entries = [], []

    def remove(self) -> None:
        """Remove the group, whose processes have ended."""
        remove(self._trees, self._name)


def remove(trees: Sequence[Tree], name: str) -> None:
    """Remove the group of a session, and those of its forks, as far as nobody is in them."""
    for tree in trees:
        for found in os.listdir(tree.folder):
            if found == name or found.startswith(f"{name}."):
                with contextlib.suppress(OSError):
                    os.rmdir(found, dir_fd=tree.folder)


def oom_counter() -> int:
    """Open the file for `oom_kills` of a container's own group; -1 where there is none."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        with contextlib.suppress(OSError):
            return os.open(path, os.O_RDONLY)
    return -1


def oom_kills(counter: int) -> int:
    """Processes of a group that the kernel has killed for memory; 0 where unknown."""
    try:
        words = os.pread(counter, 4096, 0).split()
        return int(words[words.index(b"oom_kill") + 1])
    except (OSError, ValueError, IndexError):
        return 0


def grow(owner: int, user: int) -> list[Tree]:
    """Make the trees of a sandbox wherever that works; remove those of dead owners.

    Args:
        owner: PID of the process that the sandbox belongs to.
        user: who makes the groups of sessions.
    """
    trees = []
    for unified, controllers, places in _hierarchies():
        for place in places:
            _clear(place)
            tree = _plant(place, owner, user, controllers, unified)
            if tree is not None:
                trees.append(tree)
                break
    return trees


def _hierarchies() -> Iterator[tuple[bool, tuple[str, ...], list[str]]]:
    """Version, controllers and folders to try, for each mounted hierarchy of interest."""
    own: dict[str, str] = {}
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        for line in file:
            _, names, path = line.rstrip("\n").split(":", 2)
            own.update(dict.fromkeys(names.split(","), path))
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        mounts = [line.split() for line in file]
    for fields in mounts:
        kind, _, options = fields[fields.index("-") + 1 :][:3]
        root, mounted = fields[3:5]
        unified = kind == "cgroup2"
        offered = _read(f"{mounted}/cgroup.controllers").split() if unified else options.split(",")
        wanted = tuple(name for name in _CONTROLLERS if name in offered)
        if not kind.startswith("cgroup") or not wanted:
            continue
        group = own.get("" if unified else wanted[0], "")
        if seen := _seen(group, root, mounted):
            yield unified, wanted, _free_ancestors(seen, mounted) if unified else [seen]


def _seen(group: str, root: str, mounted: str) -> str:
    """Where a mount that shows `root` and what is below it shows `group`; empty if it does not."""
    root = root.rstrip("/")
    if not group or not f"{group}/".startswith(f"{root}/"):
        return ""
    return (mounted + group[len(root) :]).rstrip("/")


def _free_ancestors(path: str, mounted: str) -> list[str]:
    """`path` and what is above it, as long as to go there is no escape from a limit.

    Version 2 has no groups below one with processes in it, such as the owner's own mostly is.
    """
    places = [path]
    while path != mounted and all(
        _read(f"{path}/{name}.max").strip() in ("max", "") for name in _CONTROLLERS
    ):
        path = os.path.dirname(path)
        places.append(path)
    return places


def _plant(
    place: str, owner: int, user: int, controllers: tuple[str, ...], unified: bool
) -> Tree | None:
    name = f"{_PREFIX}{_identity(owner)}-{secrets.token_hex(4)}"
    path = f"{place}/{name}"
    opened: list[int] = []
    try:
        if unified:
            _enable(place, controllers)
        os.mkdir(path)
        if unified:
            _enable(path, controllers)
        opened = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY) for folder in (place, path)]
        tree = Tree(opened[0], name, opened[1], controllers, unified)
        _probe(tree)
        os.mkdir(f"{path}/{_ZYGOTE}")
        for mine in (path, f"{path}/cgroup.procs"):
            os.chown(mine, user, -1)
    except OSError:
        for fd in opened:
            os.close(fd)
        _fell(path)
        return None
    return tree


def _enable(path: str, controllers: tuple[str, ...]) -> None:
    """Let the groups below `path` have controllers."""
    if missing := set(controllers) - set(_read(f"{path}/cgroup.subtree_control").split()):
        with open(f"{path}/cgroup.subtree_control", "w", encoding="ascii") as file:
            file.write(" ".join(f"+{name}" for name in sorted(missing)))


def _probe(tree: Tree) -> None:
    """Have a child enter a group and see whether that counts its memory and its processes.

    Raises:
        OSError: it does not.
    """
    group = Group([tree], "probe")
    try:
        _limit(group._folders[0], tree, 4 * _PROBED_BYTES, 1)
        child = os.fork()
        if child == 0:
            try:
                group.enter()
                os._exit(0 if _is_counted(tree, group._folders[0]) else 1)
            finally:
                os._exit(2)
        if os.waitpid(child, 0)[1] != 0:
            raise OSError("the limits of a control group have no effect")
    finally:
        group.close()
        group.remove()


def _is_counted(tree: Tree, folder: int) -> bool:
    if "memory" in tree.controllers:
        block = bytearray(_PROBED_BYTES)
        block[::4096] = bytes(len(block[::4096])).replace(b"\0", b"1")
        name = "memory.current" if tree.unified else "memory.usage_in_bytes"
        fd = os.open(name, os.O_RDONLY, dir_fd=folder)
        if int(os.read(fd, 64)) < _PROBED_BYTES // 2:
            return False
    if "pids" in tree.controllers:
        try:
            if os.fork() == 0:
                os._exit(0)
        except OSError:
            return True
        return False
    return True


def _limit(folder: int, tree: Tree, memory_bytes: int, processes: int) -> None:
    if "pids" in tree.controllers:
        _write(folder, "pids.max", processes)
    if "memory" in tree.controllers:
        _write(folder, "memory.max" if tree.unified else "memory.limit_in_bytes", memory_bytes)
        with contextlib.suppress(OSError):  # a kernel without accounting of swap
            if tree.unified:
                _write(folder, "memory.swap.max", 0)
            else:
                _write(folder, "memory.memsw.limit_in_bytes", memory_bytes)


def _open(folder: int, name: str) -> int:
    return os.open(name, os.O_WRONLY, dir_fd=folder)


def _write(folder: int, name: str, value: int) -> None:
    fd = _open(folder, name)
    try:
        os.write(fd, b"%d" % value)
    finally:
        os.close(fd)


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except OSError:
        return ""


def _identity(pid: int) -> str:
    """What no other process of this machine is: PID namespace, PID and start time."""
    namespace = os.stat("/proc/self/ns/pid").st_ino
    start = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()[19:20]
    return "-".join([str(namespace), str(pid), *start])


def _clear(place: str) -> None:
    """Remove the trees of owners of this PID namespace that are dead."""
    for name in os.listdir(place) if os.path.isdir(place) else ():
        fields = name.removeprefix(_PREFIX).split("-")
        if not name.startswith(_PREFIX) or len(fields) != 4 or not fields[1].isdigit():
            continue
        identity = _identity(int(fields[1])).split("-")
        if fields[0] == identity[0] and fields[:3] != identity:
            _fell(f"{place}/{name}")


def enter_zygote(trees: Sequence[Tree]) -> None:
    """Move the calling process to where zygote and inits are."""
    for tree in trees:
        entry = os.open(f"{_ZYGOTE}/cgroup.procs", os.O_WRONLY, dir_fd=tree.folder)
        os.write(entry, b"0")
        os.close(entry)
        os.close(tree.place)


def uproot(trees: Sequence[Tree]) -> None:
    """Remove everything; whoever was in there has ended."""
    for tree in trees:
        _fell(tree.name, tree.place)


def _fell(path: str, place: int | None = None) -> None:
    """Remove a tree; a group may count as busy for a moment after its last process has ended."""
    for _ in range(100):
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=place)
        except OSError:
            return
        try:
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):
                    os.rmdir(name, dir_fd=folder)
            os.rmdir(path, dir_fd=place)
        except OSError:
            time.sleep(0.01)
        finally:
            os.close(folder)
