"""The warm process that sessions are forked from, and the launcher that guards it.

    host --spawns--> launcher --forks--> zygote --clones per session--> init --forks--> worker

The launcher watches the host through a pidfd (PR_SET_PDEATHSIG would follow the spawning thread
instead) and kills the zygote when the host is gone; being PID 1 of its namespace, the zygote takes
every session with it. The zygote imports the preloaded modules inside the finished tree, has one
thread, and hands each session one socket received over its control channel (its stdin).
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any, NoReturn

from turngym.sandboxes.inside.cgroups import Group, enter_zygote, grow, remove, uproot
from turngym.sandboxes.inside.confine import Confinement, drop_capabilities
from turngym.sandboxes.inside.fork import Forker
from turngym.sandboxes.inside.frames import encode
from turngym.sandboxes.inside.init import Init
from turngym.sandboxes.inside.interpreter import Interpreter
from turngym.sandboxes.inside.landlock import restrict
from turngym.sandboxes.inside.seccomp import prepare
from turngym.sandboxes.inside.syscalls import (
    CLONE_NEWIPC,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    SESSION_NAMESPACES,
    bring_loopback_up,
    clone,
    collapse_memory,
    prctl,
    unshare,
)
from turngym.sandboxes.inside.tree import SYSTEM, build, interpreter_paths, mount_private

__all__ = ["main"]

_NOBODY = 65534
_INSIDE_ID = 1000
_CONTROL = 0


def main(config: dict[str, Any]) -> NoReturn:
    """Launch: set up namespaces, fork the zygote, guard it.

    Args:
        config: `level`, `parent` (PID of the host), `paths`, `import_paths`, `preload`, `env`,
            `base` (folder for sessions without namespaces).
    """
    try:
        config["paths"] = [*config["paths"], *config["import_paths"], *interpreter_paths()]
        host = os.pidfd_open(config["parent"])
        if os.getppid() != config["parent"]:
            os._exit(0)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("900")  # when the machine runs out of memory, sessions go before the trainer
        config["trees"] = []
        if config["level"] == "namespaces":
            user = _NOBODY if os.geteuid() == 0 else os.geteuid()
            with contextlib.suppress(OSError):
                config["trees"] = grow(config["parent"], user)
            _enter_namespaces()
        leash, held = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(held)
            os.close(host)
            _Zygote(config, leash).run()
    except BaseException as error:
        _report({"error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    os.close(leash)
    os.close(_CONTROL)
    _guard(host, child, config)


def _guard(host: int, child: int, config: dict[str, Any]) -> NoReturn:
    """Wait for the end of host or zygote; make sure of the other's consequences."""
    poll = select.poll()
    own = os.pidfd_open(child)
    poll.register(host, select.POLLIN)
    poll.register(own, select.POLLIN)
    poll.poll()
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    uproot(config["trees"])
    if config["base"]:
        os.execvp("rm", ["rm", "-rf", "--", config["base"]])  # deeper than Python could recurse
    os._exit(0)


def _report(message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        os.write(_CONTROL, json.dumps(message).encode("ascii"))


def _enter_namespaces() -> None:
    """As root directly, else through a user namespace of one's own."""
    user, group = os.geteuid(), os.getegid()
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC
    if user == 0:
        unshare(flags)
    else:
        unshare(CLONE_NEWUSER | flags)
        write_id_maps(user, user, group, group)


def write_id_maps(inside: int, outside: int, inside_group: int, outside_group: int) -> None:
    """Map one user and one group of the parent user namespace into the new one."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {outside} 1"),
        ("gid_map", f"{inside_group} {outside_group} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _check_readable(paths: list[str]) -> None:
    for path in paths:
        if not os.access(path, os.R_OK):
            raise PermissionError(
                f"sessions run as user {os.geteuid()}, who cannot read the interpreter's {path}; "
                "use an interpreter that everybody can read (option python)"
            )


class _Zygote:
    def __init__(self, config: dict[str, Any], leash: int) -> None:
        self._config = config
        self._isolated = config["level"] == "namespaces"
        self._leash = leash
        self._control = socket.socket(fileno=os.dup(_CONTROL))
        self._trees = config["trees"]
        self._children: dict[int, tuple[int, str, str]] = {}
        self._count = 0

    def run(self) -> NoReturn:
        try:
            self._settle()
            self._preload()
        except BaseException as error:
            _report({"error": f"{type(error).__name__}: {error}"})
            os._exit(1)
        limited = sorted(name for tree in self._trees for name in tree.controllers)
        version = ".".join(map(str, sys.version_info[:3]))
        _report({"ready": version, "missing": self._missing, "limited": limited})
        null = os.open("/dev/null", os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        os.close(null)
        while True:
            self._turn()

    def _settle(self) -> None:
        """Enter the tree and give up every privilege; then tie this life to the launcher's."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.setsid()
        os.umask(0o022)
        enter_zygote(self._trees)
        if self._isolated:
            build(self._config["paths"])
        if os.geteuid() == 0 and self._config["level"] != "none":
            needed = [path for path in interpreter_paths() if os.path.exists(path)]
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
            _check_readable(needed)
        if self._config["level"] != "none":
            drop_capabilities()
        # Read here: in a new user namespace every identity is unmapped until its maps are written.
        self._config["ids"] = os.geteuid(), os.getegid()
        prctl(PR_SET_DUMPABLE, 1)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if select.select([self._leash], [], [], 0)[0]:
            os._exit(0)

    def _preload(self) -> None:
        """Import what sessions will want, once for all of them."""
        os.environ.clear()
        os.environ.update(self._config["env"])
        sys.path[:0] = self._config["import_paths"]
        self._missing = []
        for name in self._config["preload"]:
            try:
                importlib.import_module(name)
            except ImportError as error:
                self._missing.append(f"{name}: {error}")
        prepare()
        gc.collect()
        gc.freeze()
        collapse_memory()

    def _turn(self) -> None:
        """Wait for a request, a dead session or the launcher's end."""
        poll = select.poll()
        for fd in (self._control.fileno(), self._leash, *self._children):
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll():
            if fd in self._children:
                self._bury(fd)
            elif fd == self._control.fileno():
                self._serve()
            else:
                os._exit(0)

    def _bury(self, fd: int) -> None:
        """Reap a child; remove its group, or the folder of a session without namespaces."""
        pid, folder, group = self._children.pop(fd)
        os.close(fd)
        os.waitpid(pid, 0)
        if group:
            remove(self._trees, group)
        if folder:
            remover = os.posix_spawnp("rm", ["rm", "-rf", "--", folder], os.environ)
            self._children[os.pidfd_open(remover)] = remover, "", ""

    def _serve(self) -> None:
        data, fds, _, _ = socket.recv_fds(self._control, 1 << 16, 1)
        if not data:
            os._exit(0)
        self._count += 1
        (link,) = fds
        name = str(self._count) if self._trees else ""
        group = None
        try:
            group = Group(self._trees, name) if name else None
            child = clone(SESSION_NAMESPACES) if self._isolated else os.fork()
        except OSError as error:
            os.write(link, encode({"event": "failed", "message": str(error)}))
            os.close(link)
            if group is not None:
                group.close()
                group.remove()
            return
        if child == 0:
            self._become_init(link, group)
        os.close(link)
        if group is not None:
            group.close()
        folder = "" if self._isolated else self._folder()
        self._children[os.pidfd_open(child)] = child, folder, name

    def _folder(self) -> str:
        return os.path.join(self._config["base"], str(self._count))

    def _become_init(self, link: int, group: Group | None) -> NoReturn:
        try:
            for fd in (self._control.fileno(), self._leash, *self._children):
                os.close(fd)
            Session(self._config, self._folder()).serve(link, group)
        except BaseException as error:
            with contextlib.suppress(OSError):
                message = f"{type(error).__name__}: {error}"
                os.write(link, encode({"event": "failed", "message": message}))
        finally:
            os._exit(1)


class Session:
    """What turns a fresh process into the init of a session."""

    def __init__(self, config: dict[str, Any], folder: str) -> None:
        self._config = config
        self._level = config["level"]
        self._isolated = self._level == "namespaces"
        self._folder = folder

    def serve(self, link: int, group: Group | None) -> NoReturn:
        """Set up what the level offers and serve the host."""
        self._settle()
        Init(
            link,
            link,
            self._confine,
            isolated=self._isolated,
            prepare=self._prepare,
            fork=self._forker() if self._isolated else None,
            group=group,
        ).run()

    def _settle(self) -> None:
        if self._isolated:
            user, group = self._config["ids"]
            write_id_maps(_INSIDE_ID, user, _INSIDE_ID, group)
            socket.sethostname("sandbox")
            bring_loopback_up()
            self._config["ids"] = _INSIDE_ID, _INSIDE_ID
        else:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(PR_SET_DUMPABLE, 0)

    def _confine(self, limits: dict[str, Any]) -> None:
        """Take the worker's rights away; runs in the worker."""
        if not self._isolated:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        Confinement(
            filter_calls=self._level != "none",
            lone=self._level == "landlock",
            count_processes=self._isolated,
        ).apply(limits)
        if self._level == "landlock":
            restrict([*SYSTEM, *self._config["paths"]], [self._folder])

    def _prepare(self, limits: dict[str, Any]) -> str:
        """Make the session's folders; returns the workspace."""
        if self._isolated:
            mount_private(limits, self._config["paths"], copy=False)
            return "/workspace"
        for name in ("workspace", "tmp"):
            os.makedirs(os.path.join(self._folder, name), mode=0o700)
        os.environ["TMPDIR"] = os.path.join(self._folder, "tmp")
        os.environ["HOME"] = os.path.join(self._folder, "workspace")
        return os.path.join(self._folder, "workspace")

    def _forker(self) -> Forker:
        def settle(limits: dict[str, Any]) -> list[str]:
            prctl(PR_SET_DUMPABLE, 1)  # else its own /proc entries are not writable for it
            self._settle()
            return mount_private(limits, self._config["paths"], copy=True)

        def serve(link: int, interpreter: Interpreter, workspace: str, lost: list[str]) -> NoReturn:
            init = Init(link, link, self._confine, isolated=True, fork=self._forker())
            init.resume(interpreter, workspace, lost)

        return Forker(settle, serve)
