import contextlib
import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngym.sandboxes.inside.frames import FrameError, FrameReader, encode, pack, unpack


def test_a_frame_survives_any_way_of_being_cut() -> None:
    data = encode({"op": "write", "path": "é"}, b"\x00\xff") + encode({"op": "ping"})
    for size in (1, 3, 7, len(data)):
        reader = FrameReader()
        found = []
        for start in range(0, len(data), size):
            reader.feed(data[start : start + size])
            while (frame := reader.next()) is not None:
                found.append(frame)
        assert found == [({"op": "write", "path": "é"}, b"\x00\xff"), ({"op": "ping"}, b"")]


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">II", 1 << 30, 0),
        struct.pack(">II", 2, 1 << 30),
        struct.pack(">II", 2, 0) + b"xx",
        struct.pack(">II", 2, 0) + b"[]",
        struct.pack(">II", 200_000, 0) + b"[" * 200_000,
    ],
)
def test_bytes_that_are_no_frame_are_refused(data: bytes) -> None:
    reader = FrameReader()
    reader.feed(data)
    with pytest.raises(FrameError):
        reader.next()


def test_a_packet_carries_its_fields() -> None:
    fields = [b"", b"\x00" * 3, "é".encode()]
    packet = pack(fields)
    assert struct.unpack(">I", packet[:4])[0] == len(packet) - 4
    assert unpack(packet[4:]) == fields


@pytest.mark.parametrize("payload", [b"\x00\x00", b"\x00\x00\x00\x05abc", b"\xff\xff\xff\xff"])
def test_a_field_that_reaches_past_the_end_is_refused(payload: bytes) -> None:
    with pytest.raises(FrameError):
        unpack(payload)


@given(st.lists(st.binary(max_size=64), max_size=8))
@settings(deadline=None)
def test_packing_is_undone_by_unpacking(fields: list[bytes]) -> None:
    assert unpack(pack(fields)[4:]) == fields


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_garbage_never_breaks_the_readers(data: bytes) -> None:
    reader = FrameReader()
    reader.feed(data)
    with contextlib.suppress(FrameError):
        while (frame := reader.next()) is not None:
            assert isinstance(json.loads(json.dumps(frame[0])), dict)
    with contextlib.suppress(FrameError):
        assert b"".join(pack([field])[4:] for field in unpack(data)) == data
