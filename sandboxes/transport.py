"""Byte streams to init processes."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Protocol

from turngym.errors import SessionLostError

__all__ = ["SocketStream", "SocketTransport", "Transport"]

_CHUNK = 1 << 16

OnData = Callable[[bytes], None]
OnEnd = Callable[[SessionLostError], None]


class Transport(Protocol):
    """A two-way byte stream to one init; what a backend must provide for its sessions."""

    def listen(self, on_data: OnData, on_end: OnEnd) -> None:
        """From now on hand over what arrives, and at last why nothing can arrive any more."""
        ...

    async def send(self, data: bytes) -> None:
        """Write all of `data`; SessionLostError when the far end is gone."""
        ...

    async def close(self) -> None:
        """Hang up, and wait until nothing of the session is alive. Idempotent."""
        ...


class SocketStream:
    """A socket whose owner is an event loop.

    What arrives is handed over from within the loop's own callback: a task that waits for it would
    cost a cell two more turns of the loop.

    Args:
        own: closed by `let_go`.
        lost: makes the error that says why the far end is gone.
    """

    def __init__(self, own: socket.socket, lost: Callable[[str], SessionLostError]) -> None:
        own.setblocking(False)
        self.socket = own
        self._lost = lost
        self._loop: asyncio.AbstractEventLoop | None = None

    def listen(self, on_data: OnData, on_end: OnEnd) -> None:
        """See `Transport`."""
        self._on_data, self._on_end = on_data, on_end
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.socket, self._read)

    def _read(self) -> None:
        try:
            data = self.socket.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.ignore()
            return self._on_end(self._lost(repr(error)))
        if not data:
            self.ignore()
            return self._on_end(self._lost("it ended"))
        self._on_data(data)

    def ignore(self) -> None:
        """Hand over nothing more."""
        if self._loop is not None:
            self._loop.remove_reader(self.socket)
            self._loop = None

    async def send(self, data: bytes) -> None:
        """Write all of `data`."""
        try:
            sent = self.socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise self._lost(repr(error)) from error
        if sent == len(data):
            return
        try:
            await asyncio.get_running_loop().sock_sendall(self.socket, data[sent:])
        except OSError as error:
            raise self._lost(repr(error)) from error

    def let_go(self) -> None:
        """Close the socket. Idempotent."""
        self.ignore()
        self.socket.close()


class SocketTransport(SocketStream):
    """A local socket whose far end belongs to init."""

    def __init__(self, ours: socket.socket) -> None:
        super().__init__(ours, _init_is_gone)

    async def send_with_descriptor(self, data: bytes, descriptor: int) -> None:
        """Write all of `data`; the far end receives a copy of the file descriptor with it."""
        while True:
            try:
                sent = socket.send_fds(self.socket, [data], [descriptor])
            except BlockingIOError:
                await asyncio.sleep(0.005)
            except OSError as error:
                raise _init_is_gone(repr(error)) from error
            else:
                return await self.send(data[sent:])

    async def close(self) -> None:
        """Shut down, then wait for init to close its end, which it does by dying."""
        if self.socket.fileno() < 0:
            return
        self.ignore()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(5.0):
                while await loop.sock_recv(self.socket, _CHUNK):
                    continue
        self.let_go()


def _init_is_gone(reason: str) -> SessionLostError:
    return SessionLostError(f"the session's init process is gone: {reason}")
