"""Tripwires on this machine's loopback: what touches one has left its sandbox."""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from types import TracebackType

__all__ = ["Canaries"]

_SECRET = "TG_CANARY_SECRET"


class Canaries:
    """Listening sockets, a secret file and a process with a secret in its environment.

    A context manager; everything it owns is on loopback or in a temporary folder.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="turngym-canary-")
        os.chmod(self._folder.name, 0o755)
        self._tcp = socket.create_server(("127.0.0.1", 0))
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(("127.0.0.1", 0))
        self._path = os.path.join(self._folder.name, "socket")
        self._unix = socket.socket(socket.AF_UNIX)
        self._unix.bind(self._path)
        os.chmod(self._path, 0o777)
        self._name = f"turngym-canary-{secrets.token_hex(8)}"
        self._abstract = socket.socket(socket.AF_UNIX)
        self._abstract.bind(f"\0{self._name}")
        for listener in (self._unix, self._abstract):
            listener.listen()
        self.file = os.path.join(self._folder.name, "secret.txt")
        with open(self.file, "w", encoding="ascii") as file:
            file.write("SECRET\n")
        for one in self._sockets:
            one.setblocking(False)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", "input()", "run_attacks"],
            stdin=subprocess.PIPE,
            env={_SECRET: "1", "PATH": os.environ.get("PATH", "")},
        )

    @property
    def _sockets(self) -> dict[socket.socket, str]:
        return {
            self._tcp: "tcp",
            self._udp: "udp",
            self._unix: "unix",
            self._abstract: "abstract",
        }

    @property
    def places(self) -> dict[str, str]:
        """Placeholders of attack programs and what they stand for."""
        return {
            "@PORT@": str(self._tcp.getsockname()[1]),
            "@UDP@": str(self._udp.getsockname()[1]),
            "@UNIX@": self._path,
            "@ABSTRACT@": self._name,
            "@CANARY@": self.file,
            "@HOSTPID@": str(self._process.pid),
        }

    def touched(self) -> list[str]:
        """Return which canaries were reached since the last call."""
        seen = []
        for one, name in self._sockets.items():
            with contextlib.suppress(BlockingIOError):
                if one is self._udp:
                    one.recv(1 << 16)
                else:
                    one.accept()[0].close()
                seen.append(name)
        with open(self.file, encoding="ascii") as file:
            if file.read() != "SECRET\n":
                seen.append("file")
        if self._process.poll() is not None:
            seen.append("process")
        return seen

    def __enter__(self) -> "Canaries":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for one in self._sockets:
            one.close()
        self._process.communicate(b"\n")
        self._folder.cleanup()
