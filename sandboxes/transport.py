"""Byte streams to an init process."""

import asyncio
import contextlib
import socket
from typing import Protocol

from turngym.errors import SessionLostError

__all__ = ["SocketTransport", "Transport"]


class Transport(Protocol):
    """A two-way byte stream to one init; what a backend must provide for its sessions."""

    async def send(self, data: bytes) -> None:
        """Write all of `data`; SessionLostError when the far end is gone."""
        ...

    async def receive(self) -> bytes:
        """Return the next bytes, at least one; SessionLostError when the stream has ended."""
        ...

    async def close(self) -> None:
        """Hang up, and wait until nothing of the session is alive. Idempotent."""
        ...


class SocketTransport:
    """A local socket whose far end belongs to init."""

    def __init__(self, ours: socket.socket) -> None:
        ours.setblocking(False)
        self._socket = ours

    async def send(self, data: bytes) -> None:
        """Write all of `data`."""
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, data)
        except OSError as error:
            raise SessionLostError(f"the session's init process is gone: {error}") from error

    async def send_with_descriptor(self, data: bytes, descriptor: int) -> None:
        """Write all of `data`; the far end receives a copy of the file descriptor with it."""
        while True:
            try:
                sent = socket.send_fds(self._socket, [data], [descriptor])
            except BlockingIOError:
                await asyncio.sleep(0.005)
            except OSError as error:
                raise SessionLostError(f"the session's init process is gone: {error}") from error
            else:
                return await self.send(data[sent:])

    async def receive(self) -> bytes:
        """Return the next bytes."""
        try:
            data = await asyncio.get_running_loop().sock_recv(self._socket, 1 << 16)
        except OSError as error:
            raise SessionLostError(f"the session's init process is gone: {error}") from error
        if not data:
            raise SessionLostError("the session's init process is gone")
        return data

    async def close(self) -> None:
        """Shut down, then wait for init to close its end, which it does by dying."""
        if self._socket.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        with contextlib.suppress(SessionLostError, TimeoutError):
            async with asyncio.timeout(5.0):
                while await self.receive():
                    continue
        self._socket.close()
