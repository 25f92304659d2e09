"""What a sandbox is: one contract for every backend that runs code nobody wrote.

A `Sandbox` is a backend plus its pool; a `Session` is one agent episode (a stateful interpreter
and a private `/workspace`). What the code does wrong is a value (`ExecResult`); only
`SandboxError`s raise. `status` is decided by the supervisor, never by the code it runs.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

__all__ = [
    "Artifact",
    "ErrorInfo",
    "ExecResult",
    "ExecStatus",
    "Guarantees",
    "Isolation",
    "Limits",
    "Sandbox",
    "Session",
]

ExecStatus = Literal[
    "ok", "error", "timeout", "memory", "output_limit", "exited", "protocol", "infra"
]
"""How one execution ended. `infra` is the machine's fault and never rewarded or punished."""

Isolation = Literal["auto", "strict", "none"]
Strength = Literal["hard", "soft", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one session may use; a backend that cannot enforce a field says so in `Guarantees`."""

    wall_s: float = 10.0
    """Default wall-clock limit of one `execute`, seconds."""

    grace_s: float = 0.2
    """Seconds between SIGINT and SIGKILL at the limit."""

    cpu_s: float = 60.0
    memory_mb: int = 512
    disk_mb: int = 64
    inodes: int = 4096
    processes: int = 64
    open_files: int = 256

    stdout_chars: int = 65_536
    """Characters of stdout (and of stderr) kept: head and tail."""

    output_hard_mb: int = 64
    """Bytes printed by one cell after which it is stopped, MiB."""

    result_chars: int = 16_384
    artifact_mb: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarantees:
    """What was really obtained, found by probing effects; goes into every run's metadata."""

    backend: str
    level: Literal["namespaces", "landlock", "container", "vm", "process", "none"]
    filesystem: Strength
    network: Strength
    processes: Strength
    memory: Strength
    disk: Strength
    session_isolation: Strength
    fork: bool = False
    """`Session.fork` keeps the interpreter's state."""

    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorInfo:
    """An exception of the executed code; text the agent may see, never to be trusted."""

    name: str
    value: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """Something displayed: a figure, an HTML table."""

    mime: str
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What one execution did."""

    status: ExecStatus
    stdout: str = ""
    stderr: str = ""
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    truncated: bool = False

    result: str | None = None
    """`repr` of the last expression."""

    error: ErrorInfo | None = None
    artifacts: tuple[Artifact, ...] = ()

    duration_s: float = 0.0
    cpu_s: float = 0.0

    queued_s: float = 0.0
    """Seconds spent waiting: for a slot, and runnable but not scheduled."""

    state_lost: bool = False
    """The interpreter was replaced: variables are gone, files are kept."""

    exit_code: int | None = None
    exit_signal: int | None = None

    generation: int = 0
    """How often the session's interpreter has been replaced."""

    lost: tuple[str, ...] = ()
    """What could not be carried over (fork, restore), in words."""

    @property
    def ok(self) -> bool:
        """The code ran to its end without an exception."""
        return self.status == "ok"

    @property
    def infra_fault(self) -> bool:
        """The machine's fault: drop or retry, never reward or punish."""
        return self.status == "infra"

    @property
    def agent_fault(self) -> bool:
        """The code's fault: an observation like any other."""
        return not (self.ok or self.infra_fault)

    def to_observation(self, max_chars: int = 8192) -> str:
        """Return the only text that reaches the model.

        Args:
            max_chars: longest text returned; the middle is cut out and marked.
        """
        parts = [self.stdout.rstrip("\n")] if self.stdout else []
        if self.stderr:
            parts.append(f"[stderr]\n{self.stderr.rstrip()}")
        if self.result is not None:
            parts.append(self.result)
        if self.error is not None and self.error.traceback.rstrip() not in self.stderr:
            parts.append(self.error.traceback.rstrip())
        notes = {
            "timeout": f"[timed out after {self.duration_s:.1f} s]",
            "memory": "[out of memory]",
            "output_limit": "[stopped: too much output]",
            "exited": f"[the interpreter exited, code {self.exit_code}]",
            "protocol": "[the interpreter's answer was unreadable]",
            "infra": "[the sandbox failed; not your fault]",
        }
        if self.status in notes:
            parts.append(notes[self.status])
        if self.state_lost:
            parts.append("[variables are lost, files are kept]")
        text = "\n".join(part for part in parts if part) or "(no output)"
        if len(text) <= max_chars:
            return text
        half = max(0, (max_chars - 40) // 2)
        return f"{text[:half]}\n[... {len(text) - 2 * half} characters cut ...]\n{text[-half:]}"


@runtime_checkable
class Session(Protocol):
    """One agent episode's interpreter; cells run strictly one after another."""

    async def execute(self, code: str, timeout_s: float | None = None) -> ExecResult:
        """Run one cell; state persists across cells. Never raises for what the code does.

        Raises:
            SessionClosedError: after `close`.
            SessionLostError: the session died underneath (machine's fault).
        """
        ...

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file below `/workspace` (relative paths are relative to it)."""
        ...

    async def read_file(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        """Read a file below `/workspace`; FileNotFoundError when absent."""
        ...

    async def list_files(self) -> list[str]:
        """Relative paths of the regular files below `/workspace`, sorted."""
        ...

    async def interrupt(self) -> None:
        """Stop the running cell; its `execute` returns status `timeout`."""
        ...

    async def reset(self) -> None:
        """Replace the interpreter; files are kept."""
        ...

    async def fork(self) -> "Session":
        """Return an independent copy, interpreter state included where `Guarantees.fork`.

        Raises:
            SandboxError: the backend cannot fork; the message says what to use instead.
        """
        ...

    async def close(self) -> None:
        """End the session; nothing of it stays alive. Idempotent."""
        ...


@runtime_checkable
class Sandbox(Protocol):
    """A backend and its pool. Get one with `turngym.sandboxes.create`."""

    @property
    def limits(self) -> Limits:
        """Defaults of new sessions."""
        ...

    @property
    def guarantees(self) -> Guarantees:
        """What was really obtained."""
        ...

    async def session(self, *, limits: Limits | None = None) -> Session:
        """Start (or take from the pool) a fresh session."""
        ...

    async def run(
        self,
        code: str,
        *,
        files: dict[str, bytes] | None = None,
        argv: tuple[str, ...] = (),
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> ExecResult:
        """Run a program in a fresh one-shot session: what graders use.

        The program is `code` as `__main__` of its own interpreter, with `files` in `/workspace`.
        """
        ...

    async def aclose(self) -> None:
        """End every session and the backend. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """How many sessions a sandbox keeps."""

    min_idle: int = 0
    """Sessions started in advance."""

    max_sessions: int = 64
    """Sessions alive at once; further requests wait their turn (first come, first served)."""

    max_executing: int = field(default=0)
    """Cells running at once; 0 = number of cores."""
