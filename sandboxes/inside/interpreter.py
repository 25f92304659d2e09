"""The worker process from init's side: started, spoken to, killed, replaced."""

import contextlib
import os
import select
import signal
import socket
import struct
from collections.abc import Callable
from typing import Any

from turngym.sandboxes.inside.branch import CHANNEL
from turngym.sandboxes.inside.cgroups import Group, oom_counter, oom_kills
from turngym.sandboxes.inside.frames import FrameError, unpack
from turngym.sandboxes.inside.output import Capture
from turngym.sandboxes.inside.processes import Processes
from turngym.sandboxes.inside.worker import Worker

__all__ = ["Interpreter", "Streams"]

_CHUNK = 1 << 16

Confine = Callable[[dict[str, Any]], None]
Streams = tuple[int, int, int]
"""Descriptors of a worker's own ends: channel, stdout, stderr."""


class Interpreter:
    """One generation of the worker after the other.

    Args:
        limits: every field of `Limits`.
        workspace: working directory of the worker.
        confine: called in the worker before it serves; takes its rights away.
        processes: who lives in the session.
        group: what bounds them together, with its limits set; None where nothing does.
    """

    def __init__(
        self,
        limits: dict[str, Any],
        workspace: str,
        confine: Confine,
        processes: Processes,
        group: Group | None = None,
    ) -> None:
        self.limits = limits
        self._workspace = workspace
        self.confine = confine
        self.processes = processes
        self.group = group
        self._oom_counter = group.oom_counter() if group else oom_counter()
        self._counters: tuple[float, float, int] | None = None
        self.generation = 0
        self.exit_status: int | None = None
        self.hung_up = False
        """The worker's end of the channel is closed: it is dead, dying or mute."""

        self._inbox = bytearray()
        self._outbox = bytearray()
        self._max_packet = (
            4 * int(limits["result_chars"]) + (int(limits["artifact_mb"]) << 20) + (1 << 18)
        )

    def start(self) -> None:
        """Fork a worker from this process."""
        streams = self.make_streams()
        pid = os.fork()
        if pid == 0:
            try:
                self._become_worker(streams)
            finally:
                os._exit(70)
        for fd in streams:
            os.close(fd)
        self.adopt(pid)

    def make_streams(self) -> Streams:
        """Create channel and pipes; returns the worker's ends, to be closed by the caller."""
        self.channel, theirs = socket.socketpair()
        self.channel.setblocking(False)
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        self.out = Capture(out, int(self.limits["stdout_chars"]))
        self.err = Capture(err, int(self.limits["stdout_chars"]))
        return theirs.detach(), out_end, err_end

    def adopt(self, pid: int) -> None:
        """Take the process `pid`, which holds the worker's ends, as the worker."""
        self.processes.follow(pid)
        self.exit_status = None
        self.hung_up = False
        self._counters = None
        self._inbox.clear()
        self._outbox.clear()

    def _become_worker(self, streams: Streams) -> None:
        if self.group is not None:
            self.group.enter()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.setsid()
        channel, out, err = (os.dup2(fd, 200 + n) for n, fd in enumerate(streams))
        null = os.open("/dev/null", os.O_RDONLY)
        for fd, number in ((null, 0), (out, 1), (err, 2)):
            os.dup2(fd, number, inheritable=True)
        os.dup2(channel, CHANNEL, inheritable=False)
        os.closerange(CHANNEL + 1, 1 << 16)
        os.chdir(self._workspace)
        worker = Worker(socket.socket(fileno=CHANNEL), self._workspace, self.limits)
        self.confine(self.limits)
        worker.serve()

    def replace(self) -> None:
        """Kill every process of the session and start the next generation; files are kept."""
        self.stop()
        self.generation += 1
        self.start()

    def stop(self) -> None:
        """Kill every process of the session."""
        self.processes.kill_all()
        self.processes.reap_all()
        self.close()

    def close(self) -> None:
        """Let go of the worker's descriptors."""
        self.channel.close()
        os.close(self.out.fd)
        os.close(self.err.fd)

    def reap(self) -> None:
        """Collect dead children, and the worker's status when it is among them."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.processes.worker:
                    self.exit_status = status

    def send(self, packet: bytes) -> None:
        """Queue a packet; a worker that does not read cannot block init."""
        self._outbox += packet
        self.push()

    def push(self) -> None:
        """Write what the channel takes."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._outbox:
                del self._outbox[: self.channel.send(self._outbox)]

    def wanted_events(self) -> int:
        """What to poll the channel for."""
        return select.POLLIN | (select.POLLOUT if self._outbox else 0)

    def spoke_unasked(self) -> bool:
        """True when bytes wait on the channel though no request is open."""
        self.pull()
        return bool(self._inbox)

    def pull(self) -> None:
        """Read what the channel has, up to just above the largest packet allowed."""
        try:
            while len(self._inbox) <= self._max_packet + 4:
                data = self.channel.recv(_CHUNK)
                self._inbox += data
                if len(data) < _CHUNK:  # all there is, and nothing at the end of the stream
                    self.hung_up = not data
                    return
        except BlockingIOError:
            return
        except ConnectionResetError:
            self.hung_up = True

    def answer(self) -> list[bytes] | None:
        """Return the fields of the next whole packet, None while it is incomplete.

        Raises:
            FrameError: the bytes are not a packet, or one above the cap.
        """
        if len(self._inbox) < 4:
            return None
        (size,) = struct.unpack_from(">I", self._inbox)
        if size > self._max_packet:
            raise FrameError(f"packet of {size} bytes, the cap is {self._max_packet}")
        if len(self._inbox) < 4 + size:
            return None
        payload = bytes(self._inbox[4 : 4 + size])
        del self._inbox[: 4 + size]
        return unpack(payload)

    def oom_kills(self) -> int:
        """Processes of the session that the kernel has killed for memory so far, if it tells."""
        return oom_kills(self._oom_counter)

    def counters(self) -> tuple[float, float, int]:
        """Seconds the worker ran and waited, and the kernel's kills, before the coming cell."""
        if self._counters is None:
            self.read_counters()
        assert self._counters is not None
        return self._counters

    def read_counters(self) -> None:
        """Read what `counters` returns; between cells, when nobody waits for it."""
        self._counters = *self.processes.schedule_s(), self.oom_kills()

    def exit_code_and_signal(self) -> tuple[int | None, int | None]:
        """How the worker ended: exit code, or the signal that killed it."""
        if self.exit_status is None:
            return None, None
        code = os.waitstatus_to_exitcode(self.exit_status)
        return (code, None) if code >= 0 else (None, -code)
