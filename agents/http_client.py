"""HTTP/1.1 over asyncio, just what an inference server takes: JSON calls and event streams.

One connection a request; a cancelled call closes its own, at which vLLM drops the request. Standard
library only. Nothing waits for ever: a server that says nothing for `silence_s` has failed.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

from turngym.errors import ConfigError, EngineError, EngineTimeoutError

__all__ = ["HttpClient", "RefusedError", "UnreachableError"]

_MOST_TEXT = 600
"""Characters of a server's answer that an error quotes."""


class UnreachableError(EngineError):
    """No connection, or one that broke before the answer was whole."""


class RefusedError(EngineError):
    """The server answered with an error.

    Attributes:
        status: HTTP status.
        text: what the server said.
    """

    def __init__(self, where: str, status: int, text: str) -> None:
        super().__init__(f"{where} answered {status}: {text[:_MOST_TEXT]}")
        self.status = status
        self.text = text


class HttpClient:
    """Speaks to one server.

    Args:
        url: address such as `http://localhost:8000`; a trailing `/v1` is left out.
        api_key: sent as bearer token; None = none.

    Raises:
        ConfigError: the address is none.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise ConfigError(f"a server's address is http://host:port, got {url!r}")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._host = parts.hostname
        self._secure = parts.scheme == "https"
        self._port = port or (443 if self._secure else 80)
        self._prefix = urlsplit(self.url).path
        self._headers = f"Host: {parts.netloc.rpartition('@')[2]}\r\n"
        if api_key:
            self._headers += f"Authorization: Bearer {api_key}\r\n"

    async def call(self, path: str, body: Any = None, *, timeout_s: float) -> Any:
        """Return a JSON answer; without a body the request is a GET. An empty answer is None.

        Raises:
            UnreachableError: no connection, or it broke.
            RefusedError: the answer is an error.
            EngineTimeoutError: no whole answer within `timeout_s`.
        """
        text = await self.text(path, body, timeout_s=timeout_s)
        try:
            return json.loads(text) if text.strip() else None
        except ValueError:
            raise UnreachableError(
                f"{self.url}{path} did not answer in JSON: {text[:80]!r}"
            ) from None

    async def text(self, path: str, body: Any = None, *, timeout_s: float) -> str:
        """Return an answer as it is; see `call`."""
        try:
            async with asyncio.timeout(timeout_s), aclosing(self._parts(path, body)) as parts:
                data = b"".join([part async for part in parts])
        except TimeoutError:
            raise EngineTimeoutError(
                f"{self.url}{path} did not answer in {timeout_s:g} s"
            ) from None
        return data.decode("utf-8", "replace")

    async def events(self, path: str, body: Any, *, silence_s: float) -> AsyncGenerator[Any, None]:
        """Yield the events of a stream until it is `[DONE]`.

        Raises:
            UnreachableError: no connection, or it broke before the stream was done.
            RefusedError: the answer is an error, or an event says so.
            EngineTimeoutError: nothing came for `silence_s` seconds.
        """
        where = f"{self.url}{path}"
        rest = b""
        async with aclosing(self._parts(path, body)) as parts:
            while True:
                try:
                    async with asyncio.timeout(silence_s):
                        part = await anext(parts, None)
                except TimeoutError:
                    raise EngineTimeoutError(f"{where} said nothing for {silence_s:g} s") from None
                if part is None:
                    raise UnreachableError(f"{where} broke off in the middle of an answer")
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    if line.startswith(b"data:"):
                        yield self._event(where, data)

    @staticmethod
    def _event(where: str, data: bytes) -> Any:
        try:
            event = json.loads(data)
        except ValueError:
            raise UnreachableError(f"{where} sent no JSON: {data[:80]!r}") from None
        if error := event.get("error"):
            raise RefusedError(where, int(error.get("code") or 500), str(error.get("message")))
        return event

    async def _parts(self, path: str, body: Any) -> AsyncGenerator[bytes, None]:
        """Send a request and yield the parts of the answer's body."""
        where = f"{self.url}{path}"
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_connection(
                self._host,
                self._port,
                ssl=ssl.create_default_context() if self._secure else None,
            )
            writer.write(self._request(path, body))
            await writer.drain()
            status, headers = await _head(reader)
            if status >= 400:
                text = b"".join([part async for part in _body(reader, headers)])
                raise RefusedError(where, status, _message(text))
            async for part in _body(reader, headers):
                yield part
        except (OSError, EOFError, ValueError) as error:
            raise UnreachableError(f"{where}: {str(error) or type(error).__name__}") from error
        finally:
            if writer is not None:
                writer.close()

    def _request(self, path: str, body: Any) -> bytes:
        method, data = ("GET", b"") if body is None else ("POST", json.dumps(body).encode())
        head = (
            f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}Connection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status = await reader.readline()
    if not status.startswith(b"HTTP/1."):
        raise EOFError("the server closed the connection" if not status else "no HTTP server there")
    headers: dict[str, str] = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    return int(status.split()[1]), headers


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """Yield what the body consists of; raises EOFError where it is cut off."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while line := await reader.readline():
            size = int(line.split(b";")[0], 16)
            if not size:
                return
            yield await reader.readexactly(size)
            await reader.readexactly(2)
        raise EOFError("the answer is cut off")
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while part := await reader.read(1 << 16):
            yield part


def _message(text: bytes) -> str:
    """Return what an error's body says, without its wrapping where that is known."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return text.decode("utf-8", "replace").strip()
