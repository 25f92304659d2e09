"""One or several servers of the same model: which one takes a request, and what if it fails.

A request goes to the server with the fewest requests; a session stays with its server, whose prefix
cache knows it, for as long as that one is healthy. What a server failed at is done again elsewhere.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard, TypeVar

from turngym.agents.http_client import HttpClient, RefusedError, UnreachableError
from turngym.errors import EngineError, EngineTimeoutError

__all__ = ["Fleet", "ServerFaultError"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ATTEMPTS = 5
_DEAD = "EngineCore encountered an issue"
"""vLLM's words."""

_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})


def _is_dying(error: BaseException) -> TypeGuard[RefusedError]:
    """Whether a server still answers, though its engine is gone."""
    return isinstance(error, RefusedError) and (error.status == 503 or _DEAD in error.text)


class ServerFaultError(EngineError):
    """Work cannot be done on this server now, but may be on another: it lost its weights, say."""


@dataclass(slots=True, eq=False)
class _Server:
    client: HttpClient
    running: int = 0
    sessions: set[str] = field(default_factory=set)
    fault: str | None = None
    """Why it takes no requests; None = it does."""

    retry_at: float = 0.0
    pause_s: float = 0.0
    reviving: "asyncio.Task[None] | None" = None


class Fleet:
    """Servers that can stand in for each other. Used from one event loop.

    Args:
        clients: one a server.
        ready: raises `EngineError` when a server that failed may not take requests again yet; puts
            it right where it can.
        timeout_s: seconds after which a silent server has failed. After twice that no further
            attempt at a piece of work is begun.
        pause_s: first pause before a failed server is tried again; doubles up to 30 s.
    """

    def __init__(
        self,
        clients: Sequence[HttpClient],
        *,
        ready: Callable[[HttpClient], Awaitable[None]],
        timeout_s: float,
        pause_s: float = 0.25,
    ) -> None:
        self._servers = [_Server(client) for client in clients]
        self._ready = ready
        self._timeout_s = timeout_s
        self._pause_s = pause_s
        self._seat: dict[str, _Server] = {}

    @property
    def faults(self) -> dict[str, str]:
        """Addresses of the servers that take no requests, and why."""
        return {s.client.url: s.fault for s in self._servers if s.fault is not None}

    async def do(self, work: Callable[[HttpClient], Awaitable[T]], *, session: str = "") -> T:
        """Do a piece of work on one server, and on the next one when that server fails.

        Raises:
            EngineError: the request itself is at fault, or no server is left.
        """
        give_up = time.monotonic() + 2 * self._timeout_s
        last: EngineError
        for _ in range(_ATTEMPTS):
            server = await self._choose(session, give_up)
            server.running += 1
            try:
                return await work(server.client)
            except (UnreachableError, EngineTimeoutError, ServerFaultError) as error:
                last = error
            except RefusedError as error:
                if error.status not in _BUSY:
                    raise
                last = error
            finally:
                server.running -= 1
            self._blame(server, last)
            if time.monotonic() > give_up:
                break
        raise EngineError(f"gave up after several attempts; the last: {last}")

    async def everywhere(
        self, work: Callable[[HttpClient], Awaitable[None]], *, heals: bool = False
    ) -> None:
        """Do a piece of work on all servers at once; one that fails takes no further requests.

        Args:
            work: what to do.
            heals: do it on those too that take no requests; one that succeeds does so again.

        Raises:
            EngineError: a server refused it, or none could be reached.
        """
        servers = [server for server in self._servers if heals or server.fault is None]
        results = await asyncio.gather(
            *(work(server.client) for server in servers), return_exceptions=True
        )
        for server, result in zip(servers, results, strict=True):
            if result is None:
                self._welcome(server)
            elif isinstance(result, (UnreachableError, EngineTimeoutError)) or _is_dying(result):
                self._blame(server, result)
            else:
                raise result
        if len(self.faults) == len(self._servers):
            raise EngineError(f"no server can be reached: {'; '.join(self.faults.values())}")

    def release(self, session: str) -> None:
        """Forget which server a session sat on."""
        if server := self._seat.pop(session, None):
            server.sessions.discard(session)

    async def _choose(self, session: str, give_up: float) -> _Server:
        """Return a healthy server; waits for one to come back while there is time."""
        while True:
            self._revive()
            healthy = [server for server in self._servers if server.fault is None]
            if healthy:
                break
            if time.monotonic() > give_up:
                whys = "; ".join(self.faults.values())
                raise EngineError(f"no server can take requests: {whys}")
            await asyncio.sleep(self._pause_s / 4)
        seat = self._seat.get(session)
        if seat is not None and seat.fault is None:
            return seat
        self.release(session)
        server = min(healthy, key=lambda one: (one.running, len(one.sessions)))
        if session:
            self._seat[session] = server
            server.sessions.add(session)
        return server

    def _blame(self, server: _Server, error: EngineError) -> None:
        if server.fault is None:
            logger.warning("%s takes no requests for now: %s", server.client.url, error)
        server.fault = str(error)
        server.pause_s = min(30.0, max(self._pause_s, 2 * server.pause_s))
        server.retry_at = time.monotonic() + server.pause_s

    def _welcome(self, server: _Server) -> None:
        if server.fault is not None:
            logger.warning("%s takes requests again", server.client.url)
        server.fault, server.pause_s = None, 0.0

    def _revive(self) -> None:
        """Begin to try failed servers whose pause is over."""
        now = time.monotonic()
        for server in self._servers:
            idle = server.reviving is None or server.reviving.done()
            if server.fault is not None and idle and now >= server.retry_at:
                server.reviving = asyncio.create_task(self._try_again(server))

    async def _try_again(self, server: _Server) -> None:
        try:
            await self._ready(server.client)
        except EngineError as error:
            self._blame(server, error)
        else:
            self._welcome(server)
