"""A sandbox that runs nothing: the public fake for tests of what uses one."""

from collections.abc import Callable, Mapping

from turngym.errors import SandboxError, SessionClosedError
from turngym.sandboxes.base import ExecResult, Guarantees, Limits

__all__ = ["EchoSandbox", "EchoSession"]

Script = Mapping[str, ExecResult] | Callable[[str], ExecResult]


class EchoSandbox:
    """Answer every cell from a script, by default with the code itself as stdout.

    Files are kept in memory, sessions are independent, `fork` copies the files. Nothing is
    executed, so a test needs no kernel feature and no subprocess.

    Args:
        script: results by exact code, or a function of the code; code that a mapping does not
            know is echoed.
        limits: reported as the defaults.

    >>> import asyncio
    >>> async def one_cell() -> str:
    ...     session = await EchoSandbox().session()
    ...     return (await session.execute("1 + 1")).stdout
    >>> asyncio.run(one_cell())
    '1 + 1'
    """

    def __init__(self, script: Script | None = None, *, limits: Limits | None = None) -> None:
        self._script: Script = {} if script is None else script
        self.limits = limits or Limits()
        self.guarantees = Guarantees(
            backend="echo",
            level="none",
            filesystem="hard",
            network="hard",
            processes="hard",
            memory="hard",
            disk="none",
            session_isolation="hard",
            fork=True,
            notes=("nothing is executed",),
        )
        self.executed: list[str] = []
        """Every cell and program, in the order asked."""

        self.open_sessions = 0
        self._closed = False

    async def session(self, *, limits: Limits | None = None) -> "EchoSession":
        """Return a fresh session."""
        if self._closed:
            raise SandboxError("the sandbox is closed; create a new one")
        return EchoSession(self, {})

    async def run(
        self,
        code: str,
        *,
        files: dict[str, bytes] | None = None,
        argv: tuple[str, ...] = (),
        stdin: bytes = b"",
        limits: Limits | None = None,
    ) -> ExecResult:
        """Answer a program like a cell."""
        if self._closed:
            raise SandboxError("the sandbox is closed; create a new one")
        return self.answer(code)

    async def aclose(self) -> None:
        """Refuse further sessions."""
        self._closed = True

    def answer(self, code: str) -> ExecResult:
        """Return the scripted result of `code`."""
        self.executed.append(code)
        if callable(self._script):
            return self._script(code)
        echo = ExecResult(status="ok", stdout=code, stdout_bytes=len(code.encode("utf-8")))
        return self._script.get(code, echo)


class EchoSession:
    """One session of an `EchoSandbox`."""

    def __init__(self, sandbox: EchoSandbox, files: dict[str, bytes]) -> None:
        self._sandbox = sandbox
        self._files = files
        self._closed = False
        sandbox.open_sessions += 1

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosedError("the session is closed; ask the sandbox for a new one")

    async def execute(self, code: str, timeout_s: float | None = None) -> ExecResult:
        """Return the scripted result."""
        self._check_open()
        return self._sandbox.answer(code)

    async def write_file(self, path: str, data: bytes) -> None:
        """Keep a file in memory."""
        self._check_open()
        self._files[path.removeprefix("/workspace/")] = bytes(data)

    async def read_file(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        """Return what was written."""
        self._check_open()
        name = path.removeprefix("/workspace/")
        if name not in self._files:
            raise FileNotFoundError(name)
        return self._files[name][:max_bytes]

    async def list_files(self) -> list[str]:
        """Names of the files, sorted."""
        self._check_open()
        return sorted(self._files)

    async def interrupt(self) -> None:
        """Do nothing: nothing runs."""
        self._check_open()

    async def reset(self) -> None:
        """Keep the files."""
        self._check_open()

    async def fork(self) -> "EchoSession":
        """Return a session with a copy of the files."""
        self._check_open()
        return EchoSession(self._sandbox, dict(self._files))

    async def close(self) -> None:
        """Refuse further use."""
        if not self._closed:
            self._closed = True
            self._sandbox.open_sessions -= 1
