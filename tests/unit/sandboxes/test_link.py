import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from turngym.errors import SandboxCreateError, SessionLostError
from turngym.sandboxes.base import Limits
from turngym.sandboxes.driver_session import Link
from turngym.sandboxes.inside.frames import FrameReader, encode
from turngym.sandboxes.transport import SocketTransport


class Init:
    """The far end, played by the test."""

    def __init__(self, far: socket.socket) -> None:
        far.setblocking(False)
        self.far = far
        self._frames = FrameReader()

    async def hears(self) -> dict[str, Any]:
        while (frame := self._frames.next()) is None:
            self._frames.feed(await asyncio.get_running_loop().sock_recv(self.far, 4096))
        return frame[0]

    def says(self, message: dict[str, Any], body: bytes = b"") -> None:
        self.far.send(encode(message, body))


def linked(scenario: Callable[[Link, Init], Awaitable[None]]) -> None:
    async def main() -> None:
        ours, far = socket.socketpair()
        link, init = Link(SocketTransport(ours)), Init(far)
        try:
            await asyncio.wait_for(scenario(link, init), 10.0)
        finally:
            far.close()
            await link.close()

    asyncio.run(main())


async def ready(link: Link, init: Init) -> None:
    init.says({"event": "ready"})
    await link.await_ready()


def test_answers_find_their_requests_in_any_order_and_any_pieces() -> None:
    async def scenario(link: Link, init: Init) -> None:
        await ready(link, init)
        asked = [asyncio.create_task(link.ask({"op": "ping"})) for _ in range(2)]
        first, second = [(await init.hears())["id"] for _ in range(2)]
        data = encode({"id": second, "ok": 2}, b"two") + encode({"id": first, "ok": 1})
        for place in range(len(data)):
            init.far.send(data[place : place + 1])
            await asyncio.sleep(0)
        assert await asyncio.gather(*asked) == [
            ({"id": first, "ok": 1}, b""),
            ({"id": second, "ok": 2}, b"two"),
        ]

    linked(scenario)


def test_a_cancelled_cell_is_stopped_before_the_cancellation_goes_on() -> None:
    async def scenario(link: Link, init: Init) -> None:
        await ready(link, init)
        cell = asyncio.create_task(link.ask({"op": "execute"}))
        number = (await init.hears())["id"]
        cell.cancel()
        request = await init.hears()
        assert request["op"] == "interrupt"
        init.says({"id": request["id"], "ok": True})
        await asyncio.sleep(0.05)
        assert not cell.done()
        init.says({"id": number, "status": "timeout"})
        with pytest.raises(asyncio.CancelledError):
            await cell

    linked(scenario)


def test_a_cell_that_ended_as_it_was_cancelled_is_not_waited_for() -> None:
    async def scenario(link: Link, init: Init) -> None:
        await ready(link, init)
        cell = asyncio.create_task(link.ask({"op": "execute"}))
        number = (await init.hears())["id"]
        init.says({"id": number, "status": "ok"})
        cell.cancel()  # before the loop can read the answer
        request = await init.hears()
        init.says({"id": request["id"], "ok": False})
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(cell, 2.0)

    linked(scenario)


@pytest.mark.parametrize("far_end", ["garbage", "end", "silence"])
def test_a_far_end_that_cannot_answer_is_a_lost_session(far_end: str) -> None:
    async def scenario(link: Link, init: Init) -> None:
        await ready(link, init)
        asked = asyncio.create_task(link.ask({"op": "ping"}, within_s=0.2))
        await init.hears()
        if far_end == "garbage":
            init.far.send(b"\xff" * 64)
        elif far_end == "end":
            init.far.shutdown(socket.SHUT_RDWR)
        message = {"garbage": "speak the protocol", "end": "gone", "silence": "no answer"}[far_end]
        with pytest.raises(SessionLostError, match=message):
            await asked

    linked(scenario)


def test_a_set_up_that_failed_says_why() -> None:
    async def scenario(link: Link, init: Init) -> None:
        init.says({"event": "failed", "message": "no tmpfs"})
        with pytest.raises(SandboxCreateError, match="no tmpfs"):
            await link.start(Limits(), "/workspace")

    linked(scenario)


def test_a_far_end_that_goes_before_it_is_ready_is_a_lost_session() -> None:
    async def scenario(link: Link, init: Init) -> None:
        init.far.shutdown(socket.SHUT_RDWR)
        with pytest.raises(SessionLostError, match="gone"):
            await link.await_ready()

    linked(scenario)
