"""A Docker or Podman engine, reached through the `docker` SDK.

A container's PID 1 ends with the connection it was started over, and the engine removes what has
ended. What was made and never started is removed by a watcher beside its owner (`watcher.py`).
Should that be killed too: every container carries the identity of its owner (kernel boot, pid
namespace, process and start time), and whoever connects next removes those whose owner is
provably dead.
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import struct
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from turngym.errors import (
    MissingDependencyError,
    SandboxCreateError,
    SandboxError,
    SandboxUnavailableError,
    SessionLostError,
)
from turngym.sandboxes.docker.watcher import Watcher
from turngym.sandboxes.executor import ExitSafeExecutor
from turngym.sandboxes.transport import OnData, OnEnd, SocketStream

__all__ = ["Container", "Death", "Engine", "connect", "owner_of_this_process"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

OWNER_LABEL = "turngym.owner"
BACKEND_LABEL = "turngym.backend"
_HEADER = struct.Struct(">BxxxI")
_STDERR = 2
_OOM_TO_DEATH_S = 5
_REMOVAL_S = 10.0
_PODMAN_FOLDERS = ("/run", "/var/tmp")
_UNWRITABLE = "ro,noexec,nosuid,nodev,size=4k,mode=0555"


def connect() -> tuple[Any, bool]:
    """Return a client of the engine that `DOCKER_HOST` names, and whether it is a Podman.

    Raises:
        MissingDependencyError: the `docker` package is not installed.
        SandboxUnavailableError: no engine answers.
    """
    try:
        import docker
    except ImportError as error:
        raise MissingDependencyError(
            "the 'docker' sandbox needs the package docker; "
            "install it with: pip install 'turngym[docker]'"
        ) from error
    where = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    hint = "start one and set DOCKER_HOST, or use sandbox='local', which needs no daemon"
    if where.startswith("unix://") and not os.path.exists(where.removeprefix("unix://")):
        raise SandboxUnavailableError(f"no Docker engine listens at {where}; {hint}")
    try:
        client = docker.APIClient(
            **docker.utils.kwargs_from_env(), version="auto", timeout=60, max_pool_size=64
        )
        # On a local socket connections cost nothing, kept ones would look like leaks.
        client.headers["Connection"] = "close"
        version = client.version()
    except docker.errors.DockerException as error:
        raise SandboxUnavailableError(
            f"no Docker engine answers at {where} ({error}); {hint}"
        ) from error
    if client.base_url.startswith("https://") or "ssh" in client.base_url:
        client.close()
        raise SandboxUnavailableError(
            f"the 'docker' sandbox attaches over unix:// or plain tcp://, got {where}; "
            "forward the engine's socket, for example with ssh -L"
        )
    parts = [part.get("Name", "") for part in version.get("Components") or ()]
    return client, any("Podman" in part for part in parts)


def _url() -> str:
    """Where the engine listens: ``http+unix:///path`` or ``http://host:port``."""
    import docker

    return str(docker.utils.parse_host(os.environ.get("DOCKER_HOST")))


def owner_of_this_process() -> str:
    """Return what no other process, now or later, can be: boot, pid namespace, pid, start time."""
    return _owner(os.getpid()) or "unknown"


def _owner(pid: int) -> str | None:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        # Fields after the command, which may contain anything but ends at the last parenthesis.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return f"{boot}/{namespace}/{pid}/{fields[19]}"


def _is_dead(owner: str) -> bool:
    """Tell whether an owner is certainly gone; one on another machine might well be alive."""
    boot, namespace, pid, _ = (owner.split("/") + [""] * 4)[:4]
    mine = owner_of_this_process().split("/")
    if [boot, namespace] != mine[:2] or not pid.isdigit():
        return False
    return _owner(int(pid)) != owner


@dataclass(frozen=True, slots=True)
class Death:
    """How a container ended, from the engine's record of events."""

    exit_code: int | None
    out_of_memory: bool


class Container:
    """The byte stream to a container's PID 1 (a `Transport`); losing it ends the container."""

    def __init__(self, engine: "Engine", id: str, attached: Any) -> None:
        self.id = id
        self._engine = engine
        # The SDK's view of the connection buffers and blocks; it is only kept to be closed.
        self._attached = attached
        self._stream = SocketStream(socket.socket(fileno=os.dup(attached.fileno())), self._lost)
        self._buffer = bytearray()
        self._last_words = b""
        self._closed = False

    def listen(self, on_data: OnData, on_end: OnEnd) -> None:
        """Hand over what arrives on its standard output."""

        def demultiplex(data: bytes) -> None:
            self._buffer += data
            while (piece := self._next()) is not None:
                stream, data = piece
                if stream == _STDERR:
                    self._last_words = (self._last_words + data)[-2048:]
                else:
                    on_data(data)

        self._stream.listen(demultiplex, on_end)

    async def send(self, data: bytes) -> None:
        """Write to its standard input."""
        await self._stream.send(data)

    def _lost(self, reason: str) -> SessionLostError:
        words = self._last_words.decode("utf-8", "replace").strip()
        return SessionLostError(f"container {self.id[:12]} is gone: {reason} {words}".rstrip())

    def _next(self) -> tuple[int, bytes] | None:
        """Cut a frame of the engine's multiplexing: stream number, length, data."""
        if len(self._buffer) < _HEADER.size:
            return None
        stream, size = _HEADER.unpack_from(self._buffer)
        end = _HEADER.size + size
        if len(self._buffer) < end:
            return None
        data = bytes(self._buffer[_HEADER.size : end])
        del self._buffer[:end]
        return stream, data

    def hang_up(self) -> None:
        """Close the stream, upon which PID 1 ends and the engine removes the container."""
        with contextlib.suppress(OSError):
            self._stream.socket.shutdown(socket.SHUT_RDWR)
        self._stream.let_go()
        self._attached._response.close()

    async def close(self) -> None:
        """Hang up and have the engine remove what is left; returns when it is gone."""
        if not self._closed:
            self._closed = True
            self.hang_up()
            await self._engine.remove(self.id)

    async def death(self) -> Death:
        """Say how the container ended, also after the engine has removed it."""
        return await self._engine.call(self._engine._death, self.id)


class Engine:
    """The calls that the backend makes, off the event loop, with errors of our own."""

    def __init__(self, client: Any, podman: bool) -> None:
        self.podman = podman
        self._client = client
        self._orphans: set[asyncio.Task[None]] = set()
        self._id = uuid.uuid4().hex
        self._threads = ExitSafeExecutor(8, thread_name_prefix="turngym-docker")
        self._watcher = Watcher(f"{BACKEND_LABEL}={self._id}", _url())

    @classmethod
    async def connect(cls) -> "Engine":
        """Find the engine (see `connect`) and clear away what dead owners left."""
        engine = cls(*await asyncio.to_thread(connect))
        await engine.call(engine._reap)
        await engine.call(engine._watcher.start)
        return engine

    async def call(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Run a blocking call on a thread of this engine."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: function(*arguments, **options))

    async def start(
        self, image: str, command: list[str], host: dict[str, Any], **options: Any
    ) -> Container:
        """Start a container and attach to its PID 1 before that says anything.

        Args:
            image: name of the image.
            command: what PID 1 runs.
            host: settings of the SDK's `create_host_config`.
            **options: settings of the SDK's `create_container`.

        Raises:
            SandboxUnavailableError: the image does not exist here.
            SandboxCreateError: the engine refuses.
        """
        starting = asyncio.ensure_future(self.call(self._start, image, command, host, options))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            orphan = asyncio.create_task(_close_when_started(starting))
            self._orphans.add(orphan)
            orphan.add_done_callback(self._orphans.discard)
            raise

    def _start(
        self, image: str, command: list[str], host: dict[str, Any], options: dict[str, Any]
    ) -> Container:
        import docker

        client, container = self._client, ""
        try:
            with self._watcher.request(name := f"turngym-{uuid.uuid4().hex}"):
                container = client.create_container(
                    image,
                    command,
                    name=name,
                    stdin_open=True,
                    host_config=client.create_host_config(**self._adapted(host)),
                    labels={OWNER_LABEL: owner_of_this_process(), BACKEND_LABEL: self._id},
                    **options,
                )["Id"]
            attached = client.attach_socket(
                container, {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
            )
            client.start(container)
        except docker.errors.ImageNotFound as error:
            raise SandboxUnavailableError(
                f"the engine has no image {image!r}; make it with "
                f"turngym.sandboxes.docker.build_image({image!r}) or: docker pull {image}"
            ) from error
        except (docker.errors.DockerException, OSError) as error:
            if container:
                self._remove(container)
            raise SandboxCreateError(
                f"the engine did not start a container from {image!r}: {error}"
            ) from error
        return Container(self, container, attached)

    def _adapted(self, host: dict[str, Any]) -> dict[str, Any]:
        """Fit the settings to a Podman.

        Its tmpfs has no `nr_inodes`. A read-only root gets writable folders of its own choice,
        without bounds, unless something is mounted there.
        """
        if not self.podman:
            return host
        tmpfs = {path: re.sub(",nr_inodes=[0-9]+", "", how) for path, how in host["tmpfs"].items()}
        return host | {"tmpfs": tmpfs | dict.fromkeys(_PODMAN_FOLDERS, _UNWRITABLE)}

    async def remove(self, container: str) -> None:
        """Remove a container, running or not, if it still exists."""
        await self.call(self._remove, container)

    def _remove(self, container: str) -> None:
        import docker

        deadline = time.monotonic() + _REMOVAL_S
        while True:
            try:
                self._client.remove_container(container, force=True)
            except docker.errors.NotFound:
                return
            except docker.errors.APIError:
                # PID 1 has just ended and the engine is removing its container itself.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def _death(self, container: str) -> Death:
        filters = {"container": container, "event": ["oom", "die"]}
        now = int(time.time())
        code, died_at, oom_at = None, 0, -_OOM_TO_DEATH_S
        for event in self._client.events(
            since=now - 3600, until=now + 1, filters=filters, decode=True
        ):
            if event.get("Action", event.get("status")) == "oom":
                oom_at = event["time"]
            else:
                died_at = event["time"]
                code = int(event["Actor"]["Attributes"].get("exitCode", 0))
        # An engine reports every kill in the container; only the last one took PID 1 along.
        killed = code == 128 + signal.SIGKILL
        return Death(code, killed and died_at - oom_at < _OOM_TO_DEATH_S)

    def _reap(self) -> None:
        for container in self._client.containers(all=True, filters={"label": OWNER_LABEL}):
            if _is_dead(container["Labels"][OWNER_LABEL]):
                self._remove(container["Id"])

    async def close(self) -> None:
        """Remove what this backend left behind, then disconnect."""
        await asyncio.gather(*self._orphans)
        mine = {"label": f"{BACKEND_LABEL}={self._id}"}
        for container in await self.call(self._client.containers, all=True, filters=mine):
            await self.remove(container["Id"])
        await self.call(self._watcher.dismiss)
        await self.call(self._client.close)
        self._threads.shutdown(wait=False)


async def _close_when_started(starting: "asyncio.Future[Container]") -> None:
    # Hanging up is not enough so early: an engine forgets to pass on the end of a standard input
    # that ends before the process has begun.
    try:
        await (await starting).close()
    except SandboxError as error:
        logger.debug("an abandoned container did not start: %s", error)
