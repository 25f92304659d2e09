"""One execution, from request to verdict."""

import signal
import time
from typing import Any

from turngym.sandboxes.inside.frames import FrameError
from turngym.sandboxes.inside.interpreter import Interpreter
from turngym.sandboxes.inside.processes import Watch, cpu_s

__all__ = ["Cell"]

_NAP_S = 0.05
_MUTE_S = 0.1
"""How long a worker that closed its channel may take to begin to die before it counts as mute."""

_DYING_S = 2.0
"""How long it may take to be dead, starved as it may be."""


class Cell:
    """A running cell or program.

    The ladder: at the limit the worker gets SIGINT and every other process of the session SIGKILL;
    a worker that has not answered after the grace period is killed with all the rest.
    """

    def __init__(
        self,
        number: int,
        token: bytes,
        interpreter: Interpreter,
        watch: Watch,
        timeout_s: float,
        *,
        program: bool,
    ) -> None:
        self.id = number
        self._token = token
        self._interpreter = interpreter
        self._watch = watch
        self._timeout_s = timeout_s
        self.program = program
        limits = interpreter.limits
        self._grace_s = float(limits["grace_s"])
        self._hard_bytes = int(limits["output_hard_mb"]) << 20
        self._start = time.monotonic()
        self._deadline = self._start + timeout_s
        self._reason: str | None = None
        self._interrupted = False
        self._killed = False
        self._answer: list[bytes] | None = None
        self._broken = False
        self._mute_from: float | None = None
        self._processes = interpreter.processes
        self._cpu_start = cpu_s(self._processes.worker)
        self._cpu_s = self._delay_s = 0.0
        self._starved = self._nap_known = False
        watch.start(self._start)

    def start(self, packet: bytes) -> None:
        """Send the request."""
        self._interpreter.send(packet)
        self._run_start, self._delay_start, self._oom_start = self._interpreter.counters()

    @property
    def done(self) -> bool:
        """The verdict is known: the worker answered, spoke nonsense, or died."""
        if self._interpreter.exit_status is not None or self._broken:
            return True
        return self._answer is not None and not self.program

    def next_check_s(self) -> float:
        """Seconds until `check` must run again."""
        now = time.monotonic()
        wait = min(self._deadline - now, self._watch.due_in(now))
        if not self._nap_known:
            wait = min(wait, self._start + _NAP_S - now)
        return max(0.0, wait if self._mute_from is None else min(wait, _MUTE_S))

    def fell_asleep(self) -> bool:
        """True once, when the cell turns out to wait rather than to compute."""
        now = time.monotonic()
        if self._nap_known or now - self._start < _NAP_S:
            return False
        self._nap_known = True
        return cpu_s(self._processes.worker) - self._cpu_start < _NAP_S / 5 and not (
            self._processes.schedule_s()[1] - self._delay_start > _NAP_S / 5
        )

    def interrupt(self) -> None:
        """Stop at the host's wish; ends as a timeout."""
        self._stop("timeout", time.monotonic())

    def on_output(self) -> None:
        """Something was printed."""
        printed = self._interpreter.out.total + self._interpreter.err.total
        if printed > self._hard_bytes and self._reason is None:
            self._stop("output_limit", time.monotonic())

    def on_channel(self) -> None:
        """The worker said something."""
        self._interpreter.pull()
        if self._interpreter.hung_up and not self.program and self._mute_from is None:
            self._mute_from = time.monotonic()
        try:
            fields = self._interpreter.answer()
        except FrameError:
            self._broken = True
            return
        if fields is None:
            return
        if self._answer is not None or fields[:1] != [self._token] or not _is_answer(fields[1:]):
            self._broken = True
            return
        self._answer = fields[1:]

    def check(self) -> None:
        """Enforce time and memory."""
        now = time.monotonic()
        if self._mute_from is not None and self._is_mute(now - self._mute_from):
            self._broken = True
        elif now >= self._deadline:
            if not self._interrupted:
                self._stop("timeout", now)
            elif not self._killed and self._starved_in_grace(now):
                self._deadline = now + 0.1
            else:
                self._kill()
        elif not self._killed and self._watch.exceeded(self._processes, now):
            self._reason = "memory"
            self._kill()

    def _is_mute(self, since_s: float) -> bool:
        return since_s > _DYING_S or (since_s > _MUTE_S and not self._processes.worker_is_dying())

    def _stop(self, reason: str, now: float) -> None:
        if self._reason is None:
            self._reason = reason
            self._note_usage()
            self._starved = reason == "timeout" and self._was_starved()
        if self.program:
            self._kill()
        elif not self._interrupted:
            self._interrupted = True
            self._deadline = now + self._grace_s
            self._processes.kill_others()
            self._processes.interrupt()

    def _kill(self) -> None:
        self._note_usage()
        self._killed = True
        self._deadline = time.monotonic() + 60.0
        self._processes.kill_all()

    def _note_usage(self) -> None:
        """Read the clocks of the worker, which are gone once it is dead."""
        worker = self._processes.worker
        if self._interpreter.exit_status is None:
            self._cpu_s = max(self._cpu_s, cpu_s(worker) - self._cpu_start)
            self._delay_s = max(self._delay_s, self._processes.schedule_s()[1] - self._delay_start)

    def _starved_in_grace(self, now: float) -> bool:
        """The worker was hardly scheduled since the interrupt; true for one second at most."""
        before = self._delay_s
        self._note_usage()
        late = now - self._start - self._timeout_s
        return late < 1.0 and self._delay_s - before > self._grace_s / 2

    def _was_starved(self) -> bool:
        """The machine, not the code, used up the time.

        Delay that the session's own threads and processes caused does not count: code must not
        be able to pass its time-out off as the machine's fault.
        """
        if self._delay_s <= self._timeout_s / 2:
            return False
        main = self._processes.schedule_s()[0] - self._run_start
        own = sum(cpu_s(pid) for pid in self._processes.all()) - self._cpu_start - main
        return own < self._delay_s / 2

    def result(self) -> tuple[dict[str, Any], bytes]:
        """Return the verdict and the artifacts' bytes; replace the interpreter if it was lost."""
        self._note_usage()
        duration = time.monotonic() - self._start
        status, lost = self._verdict()
        self._interpreter.out.drain()
        self._interpreter.err.drain()
        code, number = self._interpreter.exit_code_and_signal()
        out, out_bytes, out_cut = self._interpreter.out.take()
        err, err_bytes, err_cut = self._interpreter.err.take()
        message = {
            "id": self.id,
            "status": status,
            "stdout": out,
            "stderr": err,
            "stdout_bytes": out_bytes,
            "stderr_bytes": err_bytes,
            "truncated": out_cut or err_cut,
            "duration_s": duration,
            "cpu_s": self._cpu_s,
            "delay_s": self._delay_s,
            "exit_code": code,
            "exit_signal": number,
            "state_lost": lost,
            **_shown(self._answer),
        }
        body = b"".join(self._answer[4::2]) if self._answer and self._answer[0] == b"ok" else b""
        return message, body

    def _verdict(self) -> tuple[str, bool]:
        """Return status and whether the interpreter must be replaced."""
        dead = self._interpreter.exit_status is not None
        code, number = self._interpreter.exit_code_and_signal()
        if self._broken and self._reason is None:
            # A large process that the kernel kills hangs up long before it is dead.
            return "memory" if self._ran_out_of_memory() else "protocol", True
        if self._reason is not None:
            lost = not self.program and (dead or self._broken or self._killed)
            return "infra" if self._starved else self._reason, lost
        if number == signal.SIGXCPU:
            return "timeout", True
        if number == signal.SIGKILL and self._ran_out_of_memory():
            return "memory", True
        if dead and self.program:
            return ("ok" if code == 0 else "error" if self._answer else "exited"), False
        if dead or self._answer is None:
            return "exited", True
        return self._answer[0].decode("ascii"), False

    def _ran_out_of_memory(self) -> bool:
        return self._interpreter.oom_kills() > self._oom_start


def _is_answer(fields: list[bytes]) -> bool:
    if fields[:1] == [b"ok"]:
        return len(fields) >= 3 and len(fields) % 2 == 1
    return fields[:1] == [b"error"] and len(fields) == 4


def _shown(answer: list[bytes] | None) -> dict[str, Any]:
    shown: dict[str, Any] = {"result": None, "error": None, "artifacts": []}
    if answer is None:
        return shown
    text = [field.decode("utf-8", "replace") for field in answer[:4]]
    if answer[0] == b"error":
        shown["error"] = {"name": text[1], "value": text[2], "traceback": text[3]}
        return shown
    shown["result"] = text[2] if answer[1] else None
    kinds = [mime.decode("ascii", "replace") for mime in answer[3::2]]
    shown["artifacts"] = [[kind, len(data)] for kind, data in zip(kinds, answer[4::2], strict=True)]
    return shown
