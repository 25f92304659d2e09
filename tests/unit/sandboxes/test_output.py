import os

import pytest

from turngym.sandboxes.inside.output import Capture, clip


@pytest.fixture
def pipe() -> tuple[int, int]:
    return os.pipe()


def drained(pipe: tuple[int, int], data: bytes, max_chars: int) -> tuple[str, int, bool]:
    reader, writer = pipe
    capture = Capture(reader, max_chars)
    for start in range(0, len(data), 60_000):
        os.write(writer, data[start : start + 60_000])
        capture.drain()
    os.close(writer)
    capture.read()
    assert capture.ended
    os.close(reader)
    return capture.take()


def test_short_output_is_kept_whole(pipe: tuple[int, int]) -> None:
    assert drained(pipe, "é€😀\n".encode(), 100) == ("é€😀\n", 10, False)


def test_long_output_keeps_head_and_tail_and_counts_everything(pipe: tuple[int, int]) -> None:
    text, total, cut = drained(pipe, b"a" * 10 + b"x" * 500_000 + b"z" * 10, 20)
    assert (text[:10], text[-10:], total, cut) == ("a" * 10, "z" * 10, 500_020, True)
    assert len(text) < 100


def test_bytes_that_are_not_utf8_become_replacement_characters(pipe: tuple[int, int]) -> None:
    assert drained(pipe, b"\xff\xfe ok\x00", 100) == ("\ufffd\ufffd ok\x00", 6, False)


def test_taking_starts_afresh(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    capture = Capture(reader, 100)
    for word in (b"one", b"two"):
        os.write(writer, word)
        capture.read()
        assert capture.take() == (word.decode(), 3, False)
    os.close(reader)
    os.close(writer)


def test_draining_does_not_wait_for_a_writer_that_stays(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    capture = Capture(reader, 100)
    capture.drain()
    assert capture.take() == ("", 0, False)
    os.close(reader)
    os.close(writer)


def test_clipping_says_how_much_is_missing() -> None:
    assert clip("abcdef", 6) == "abcdef"
    assert clip("abcdef", 4) == "ab\n[... 2 characters cut ...]\nef"
