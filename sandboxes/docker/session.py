"""A session in a container of its own."""

from collections.abc import Awaitable, Callable
from typing import Any

from turngym.errors import SessionLostError
from turngym.sandboxes.base import Limits
from turngym.sandboxes.docker.engine import Container
from turngym.sandboxes.driver_session import DriverSession, Link, Slot

__all__ = ["DockerSession"]

StartLink = Callable[[], Awaitable[tuple[Container, Link]]]


class DockerSession(DriverSession):
    """A `Session` whose init is PID 1 of a container.

    A container can run out of memory in a way that takes init along. That is the code's doing,
    unlike any other way to lose a container, so it is a result (`memory`), and the session goes
    on in a new container, without its variables and its files.

    Args:
        container: where it runs.
        link: to the init in there, started.
        start_link: makes the next container and its link.
        limits: the session's own.
        slot: see `DriverSession`.
        on_close: see `DriverSession`.
    """

    def __init__(
        self,
        container: Container,
        link: Link,
        start_link: StartLink,
        limits: Limits,
        slot: Slot,
        on_close: Callable[[Any], None],
    ) -> None:
        super().__init__(link, limits, slot, on_close)
        self._container = container
        self._start_link = start_link
        self._generation = 0
        self._first_generation = 0

    @property
    def container_id(self) -> str:
        """The engine's name of the container."""
        return self._container.id

    async def _ask_interruptibly(
        self, message: dict[str, Any], body: bytes, within_s: float
    ) -> tuple[dict[str, Any], bytes]:
        try:
            answer, data = await super()._ask_interruptibly(message, body, within_s)
        except SessionLostError:
            if self._closed or not (await self._container.death()).out_of_memory:
                raise
            return await self._replace_container(), b""
        answer["generation"] += self._first_generation
        self._generation = answer["generation"]
        return answer, data

    async def _replace_container(self) -> dict[str, Any]:
        """Go on in a new container; return the answer that the old init no longer gave."""
        await self._link.close()
        self._container, self._link = await self._start_link()
        self._generation += 1
        self._first_generation = self._generation
        self._lost = ("files in /workspace and /tmp",)
        return {
            "status": "memory",
            "stdout": "",
            "stderr": "",
            "stdout_bytes": 0,
            "stderr_bytes": 0,
            "truncated": False,
            "result": None,
            "error": None,
            "artifacts": [],
            "duration_s": 0.0,
            "cpu_s": 0.0,
            "delay_s": 0.0,
            "state_lost": True,
            "exit_code": None,
            "exit_signal": 9,
            "generation": self._generation,
        }
