"""Start the zygote of the local backend and hand it sockets."""

import asyncio
import contextlib
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turngym.errors import ConfigError, SandboxCreateError
from turngym.sandboxes.bundle import program
from turngym.sandboxes.isolation import Level

__all__ = ["Launcher", "LauncherConfig"]

_READY_S = 60.0
_END_S = 10.0
_POLL_S = 0.005
_NOBODY = 65534
_ALWAYS_PRELOADED = ("asyncio", "encodings.idna", "subprocess", "tempfile")
_ENVIRONMENT = {
    "HOME": "/workspace",
    "LANG": "C.UTF-8",
    "MPLBACKEND": "Agg",
    "MPLCONFIGDIR": "/tmp",
    "PYTHONDONTWRITEBYTECODE": "1",
    # The zygote must have one thread, and thousands of sessions must not want every core each.
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherConfig:
    """Checked options of the local backend."""

    preload: tuple[str, ...]
    python: str
    import_paths: tuple[str, ...]
    read_only: tuple[str, ...]
    env: Mapping[str, str]

    @classmethod
    def checked(
        cls,
        *,
        preload: Sequence[str],
        python: str | None,
        import_paths: Sequence[str],
        read_only: Sequence[str],
        env: Mapping[str, str] | None,
    ) -> "LauncherConfig":
        """Return the options, or raise ConfigError naming the wrong one."""
        interpreter = shutil.which(python or sys.executable)
        if interpreter is None:
            raise ConfigError(f"python={python!r} is not an executable")
        for option, paths in (("import_paths", import_paths), ("read_only", read_only)):
            for path in paths:
                if not os.path.isabs(path) or not os.path.exists(path) or path == "/":
                    raise ConfigError(
                        f"{option} must name existing absolute paths below '/', got {path!r}"
                    )
        folder = os.path.dirname(interpreter)
        search = f"{folder}:/usr/local/bin:/usr/bin:/bin"
        return cls(
            preload=tuple(preload),
            python=interpreter,
            import_paths=tuple(import_paths),
            read_only=tuple(read_only),
            env={"PATH": search, **_ENVIRONMENT, **(env or {})},
        )


class Launcher:
    """A running launcher process with its zygote; made by `start`."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, base: str) -> None:
        self._process = process
        self._base = base
        self._control = control
        self.missing: tuple[str, ...] = ()
        """Preloads that could not be imported, with the reason."""

        self.limited: tuple[str, ...] = ()
        """Controllers of the control groups that bound a session as a whole."""

    @classmethod
    async def start(cls, config: LauncherConfig, level: Level) -> "Launcher":
        """Spawn launcher and zygote and wait until the preloads are imported.

        Raises:
            SandboxCreateError: the level cannot be had, with the reason.
        """
        base = "" if level == "namespaces" else _make_base(level)
        settings: dict[str, Any] = {
            "level": level,
            "parent": os.getpid(),
            "paths": list(config.read_only),
            "import_paths": list(config.import_paths),
            "preload": [*_ALWAYS_PRELOADED, *config.preload],
            "env": dict(config.env),
            "base": base,
        }
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [config.python, "-I", "-c", program("zygote", settings)]
            process = _spawn(command, theirs, dict(config.env))
        launcher = cls(process, control, base)
        try:
            await launcher._await_ready()
        except BaseException:
            await launcher.close()
            raise
        return launcher

    async def _await_ready(self) -> None:
        self._control.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_READY_S):
                data = await loop.sock_recv(self._control, 1 << 16)
        except TimeoutError:
            raise SandboxCreateError(f"the zygote was not ready after {_READY_S:.0f} s") from None
        if not data:
            _, said = await asyncio.to_thread(self._process.communicate)
            raise SandboxCreateError(
                f"the interpreter ended with code {self._process.returncode} before it was ready; "
                f"it must be CPython 3.10 or newer. Its last words: {said.decode()[-500:]!r}"
            )
        if self._process.stderr is not None:
            self._process.stderr.close()
        answer = json.loads(data)
        if "error" in answer:
            raise SandboxCreateError(str(answer["error"]))
        self.missing = tuple(answer["missing"])
        self.limited = tuple(answer["limited"])

    async def send(self, session: socket.socket) -> None:
        """Have the zygote clone a session that serves the far end of `session`.

        Raises:
            SandboxCreateError: the zygote is gone.
        """
        while True:
            try:
                socket.send_fds(self._control, [b"+"], [session.fileno()])
                return
            except BlockingIOError:
                await asyncio.sleep(_POLL_S)
            except OSError as error:
                raise SandboxCreateError(f"the zygote is gone: {error}") from error

    async def close(self) -> None:
        """End zygote and launcher, and with them every session. Idempotent."""
        self._control.close()
        if not await self._ended_within(_END_S):
            self._process.kill()
            await self._ended_within(math.inf)
        if self._process.stderr is not None:
            self._process.stderr.close()
        if self._base and os.path.exists(self._base):
            await _delete(self._base)

    async def _ended_within(self, seconds: float) -> bool:
        """Collect the launcher; polls, for at interpreter exit no thread can be had to wait in."""
        deadline = time.monotonic() + seconds
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL_S)
        return True


def _spawn(
    command: list[str], control: socket.socket, env: dict[str, str]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=control.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd="/",
        env=env,
        start_new_session=True,
    )


def _make_base(level: Level) -> str:
    """Create the folder below which sessions without namespaces live; the launcher removes it."""
    base = tempfile.mkdtemp(prefix="turngym-")
    if os.geteuid() == 0 and level != "none":
        with contextlib.suppress(OSError):
            os.chown(base, _NOBODY, _NOBODY)
    return base


async def _delete(base: str) -> None:
    """Remove a tree deeper than Python could recurse; `subprocess` forks no more at exit."""
    rm = os.posix_spawnp("rm", ["rm", "-rf", "--", base], os.environ)
    while os.waitpid(rm, os.WNOHANG) == (0, 0):
        await asyncio.sleep(_POLL_S)
