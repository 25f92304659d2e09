"""The processes of a session, as init sees them."""

import contextlib
import ctypes
import os
import signal
import time

__all__ = ["Processes", "Watch", "death_notices"]

_PF_EXITING = 4
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Processes:
    """Who else lives in the session, and how to end them.

    Args:
        isolated: init is PID 1 of a PID namespace, so that everything but itself is the session's;
            otherwise only `worker` (and, without confinement, its process group) is known.
    """

    def __init__(self, *, isolated: bool) -> None:
        self._isolated = isolated
        self.worker = 0
        self._schedule = -1

    def follow(self, worker: int) -> None:
        """Take a new process as the worker."""
        self.worker = worker
        if self._schedule >= 0:
            os.close(self._schedule)
            self._schedule = -1
        with contextlib.suppress(OSError):
            self._schedule = os.open(f"/proc/{worker}/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def schedule_s(self) -> tuple[float, float]:
        """Seconds the worker's main thread ran, and waited for a processor; 0 if unknown."""
        try:
            run, delay = os.pread(self._schedule, 64, 0).split()[:2]
            return int(run) / 1e9, int(delay) / 1e9
        except (OSError, ValueError):
            return 0.0, 0.0

    def worker_is_dying(self) -> bool:
        """The worker is on its way out, which can take long on a busy machine."""
        try:
            with open(f"/proc/{self.worker}/stat", "rb") as file:
                flags = int(file.read().rpartition(b")")[2].split()[6])
        except (OSError, ValueError, IndexError):
            return True
        return bool(flags & _PF_EXITING)

    def others(self) -> list[int]:
        """PIDs of the session except init and the worker."""
        if not self._isolated:
            return []
        try:
            names = os.listdir("/proc")
        except OSError:
            return []
        skip = (os.getpid(), self.worker)
        return [int(name) for name in names if name.isdigit() and int(name) not in skip]

    def all(self) -> list[int]:
        """PIDs of the session except init."""
        return [self.worker, *self.others()]

    def kill_others(self) -> None:
        """SIGKILL all but init and the worker, which is left stopped.

        All are stopped at one stroke first, so that none can fork meanwhile.
        """
        if not self._isolated:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGSTOP)
        for pid in self.others():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_all(self) -> None:
        """SIGKILL everything but init."""
        if self.worker == 0:
            return
        with contextlib.suppress(ProcessLookupError):
            if self._isolated:
                os.kill(-1, signal.SIGKILL)
            else:
                os.killpg(self.worker, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.worker, signal.SIGKILL)

    def reap_all(self) -> None:
        """Wait for every child, adopted ones included, after `kill_all`."""
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)

    def interrupt(self) -> None:
        """SIGINT the worker, and let it go on if it was stopped."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.worker, signal.SIGINT)
            os.kill(self.worker, signal.SIGCONT)


def death_notices() -> int:
    """A descriptor that is readable when a child, adopted ones included, has died.

    Blocks SIGCHLD, which needs no handler this way; forked workers must unblock it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    mask = (1 << (signal.SIGCHLD - 1)).to_bytes(128, "little")
    flags = os.O_NONBLOCK | os.O_CLOEXEC
    fd = int(ctypes.CDLL(None, use_errno=True).signalfd(-1, mask, flags))
    if fd < 0:
        raise OSError(ctypes.get_errno(), "signalfd failed")
    return fd


def name_of(pid: int) -> str:
    """The command of a process, for messages."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(200).replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        words = ""
    return f"{pid} ({words or 'unknown'})"


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a live process, 0 when it is gone."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # CPUCLOCK_SCHED of another process
    except OSError:
        return 0.0


class Watch:
    """Soft memory limit over all processes of a session.

    Proportional set size counts a page shared by n processes as 1/n; resident size would count
    the zygote's pages once per process. Reading it costs up to milliseconds, so the pause between
    two readings is ten times what the last one took.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._pause = 0.05
        self._due = 0.0
        self._used = -1.0

    def start(self, now: float) -> None:
        """A cell starts: look again after the shortest pause."""
        self._due = now + 0.05

    def due_in(self, now: float) -> float:
        """Seconds until the next reading."""
        return max(0.0, self._due - now)

    def exceeded_idle(self, processes: Processes, now: float) -> bool:
        """Between cells: read only when something of the session has used CPU since last time."""
        if now < self._due:
            return False
        used = sum(cpu_s(pid) for pid in processes.all())
        if used == self._used:
            self._due = now + 1.0
            return False
        self._used = used
        return self.exceeded(processes, now)

    def exceeded(self, processes: Processes, now: float) -> bool:
        """Read, when due, whether `processes` use more than the limit together."""
        if now < self._due:
            return False
        total = sum(pss_bytes(pid) for pid in processes.all())
        self._pause = min(2.0, max(0.05, 10 * (time.monotonic() - now)))
        self._due = now + self._pause
        return total > self._limit


def pss_bytes(pid: int) -> int:
    """Proportional set size of a process, 0 when it is gone or may not be read."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) << 10
    except OSError:
        return 0
    return 0


def rss_bytes() -> int:
    """Resident set size of this process."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 64 << 20
