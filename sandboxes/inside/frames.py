"""How bytes become messages, on both channels of a session.

Host <-> init: a frame is two big-endian 32-bit lengths, a JSON object of the first length and raw
bytes (the body) of the second. Init is trusted, so JSON is fine here.

Init <-> worker: a packet is one 32-bit length and a list of byte strings, each with a 32-bit
length. The worker is not trusted: unpacking cannot recurse, allocates no more than it received,
and uses no module whose Python half executed code could have patched.
"""

import json
import struct
from typing import Any

__all__ = ["FrameError", "FrameReader", "encode", "pack", "unpack"]

_LENGTHS = struct.Struct(">II")
_LENGTH = struct.Struct(">I")

# What json.dumps and json.loads come to, without their choice of options.
_write_json = json.JSONEncoder().encode
_read_json = json.JSONDecoder().decode

MAX_HEAD = 8 << 20
MAX_BODY = 512 << 20


class FrameError(ValueError):
    """The bytes are not a frame: the peer is broken or hostile; nothing after them can be read."""


def encode(message: dict[str, Any], body: bytes = b"") -> bytes:
    """Return one frame of the host channel."""
    head = _write_json(message).encode("ascii")
    if len(head) > MAX_HEAD or len(body) > MAX_BODY:
        raise FrameError(
            f"a frame may have {MAX_HEAD} bytes of message and {MAX_BODY} of body, "
            f"got {len(head)} and {len(body)}"
        )
    return _LENGTHS.pack(len(head), len(body)) + head + body


class FrameReader:
    """Cut a stream of the host channel into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._buffer += data

    def next(self) -> tuple[dict[str, Any], bytes] | None:
        """Return the next whole frame, or None when more bytes are needed.

        Raises:
            FrameError: lengths above the caps, or a head that is not a JSON object.
        """
        if len(self._buffer) < _LENGTHS.size:
            return None
        head_size, body_size = _LENGTHS.unpack_from(self._buffer)
        if head_size > MAX_HEAD or body_size > MAX_BODY:
            raise FrameError(f"frame of {head_size} + {body_size} bytes is above the caps")
        end = _LENGTHS.size + head_size + body_size
        if len(self._buffer) < end:
            return None
        head = bytes(self._buffer[_LENGTHS.size : _LENGTHS.size + head_size])
        body = bytes(self._buffer[_LENGTHS.size + head_size : end])
        del self._buffer[:end]
        try:
            message = _read_json(head.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise FrameError(f"frame head is not JSON: {error}") from error
        if not isinstance(message, dict):
            raise FrameError(f"frame head must be an object, got {type(message).__name__}")
        return message, body


def pack(fields: list[bytes]) -> bytes:
    """Return one packet of the worker channel."""
    parts = [part for field in fields for part in (_LENGTH.pack(len(field)), field)]
    payload = b"".join(parts)
    return _LENGTH.pack(len(payload)) + payload


def unpack(payload: bytes) -> list[bytes]:
    """Return the fields of a packet's payload (its own length taken off).

    Raises:
        FrameError: a field reaches past the end.
    """
    fields = []
    position = 0
    while position < len(payload):
        if position + 4 > len(payload):
            raise FrameError("packet ends inside a length")
        (size,) = _LENGTH.unpack_from(payload, position)
        position += 4
        if position + size > len(payload):
            raise FrameError("packet ends inside a field")
        fields.append(payload[position : position + size])
        position += size
    return fields
