"""A python interpreter for one episode: lazy, stateful, and able to be copied."""

import contextlib

from turngym.envs import resources
from turngym.errors import EnvError, SandboxError, ToolError
from turngym.sandboxes.base import ExecResult
from turngym.sandboxes.sync import SyncSession

__all__ = ["PythonSession"]


class PythonSession:
    """Runs cells in a session of a shared sandbox, started when the first cell comes.

    A copy is a fork of the interpreter where the backend can fork, and otherwise a fresh one that
    runs the same cells again when it is first used.
    """

    def __init__(self, sandbox: str, cells: tuple[str, ...] = ()) -> None:
        """Set up an interpreter that does not run yet.

        Args:
            sandbox: name of a sandbox, see `turngym.envs.resources`.
            cells: run first, when the interpreter starts.

        Raises:
            ConfigError: no sandbox has the name.
        """
        resources.require("sandbox", sandbox)
        self._sandbox = sandbox
        self._cells = cells
        self._session: SyncSession | None = None

    def run(self, code: str, timeout_s: float | None = None) -> ExecResult:
        """Run one cell; what the code does wrong is in the result.

        Raises:
            EnvError: the sandbox failed.
        """
        try:
            result = self._execute(self._started(), code, timeout_s)
        except SandboxError as error:
            raise EnvError(f"sandbox {self._sandbox!r}: {error}") from error
        self._cells += (code,)
        return result

    def observe(self, code: str, timeout_s: float | None = None) -> str:
        """Run one cell for a model; return what it may see.

        Raises:
            ToolError: the code failed; the text is the same observation.
            EnvError: the sandbox failed.
        """
        result = self.run(code, timeout_s)
        if result.agent_fault:
            raise ToolError(result.to_observation())
        return result.to_observation()

    def fork(self) -> "PythonSession":
        """Return an independent copy."""
        copy = PythonSession(self._sandbox, self._cells)
        if self._session is not None:
            # Where the backend cannot fork, the copy's first cell is preceded by all of these.
            with contextlib.suppress(SandboxError):
                copy._session = self._session.fork()
        return copy

    def close(self) -> None:
        """End the interpreter. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _started(self) -> SyncSession:
        if self._session is None:
            self._session = resources.sandbox(self._sandbox).session()
            for cell in self._cells:
                self._execute(self._session, cell)
        return self._session

    def _execute(
        self, session: SyncSession, code: str, timeout_s: float | None = None
    ) -> ExecResult:
        result = session.execute(code, timeout_s)
        if result.infra_fault:
            raise EnvError(f"sandbox {self._sandbox!r} failed while it ran a cell")
        return result
