import asyncio
import importlib
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from turngym.envs import deadline, isolated
from turngym.envs.calls import answer_calls, make_call, only_unreadable
from turngym.envs.tools import Tool, cut, to_text, tool
from turngym.errors import ConfigError, EnvError, SandboxError, ToolError
from turngym.types import Action, InvalidToolCall


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def fail(how: str) -> str:
    """Fail in one of several ways."""
    if how == "model":
        raise ToolError("say please")
    if how == "world":
        raise EnvError("the server is down")
    if how == "sandbox":
        raise SandboxError("no session")
    if how == "import":
        importlib.import_module("no_such_package")
    if how == "exit":
        raise SystemExit(3)
    raise ValueError("x" * 100_000)


@tool(timeout_s=0.05)
def hang(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "woke up"


@tool(timeout_s=0.05)
async def wait(seconds: float) -> str:
    """Sleep without blocking."""
    await asyncio.sleep(seconds)
    return "waited"


@tool(timeout_s=0.05)
async def block(seconds: float) -> str:
    """Block the loop, as an async function never should."""
    time.sleep(seconds)
    return "blocked"


def test_a_tool_answers_with_value_and_text() -> None:
    result = add.call({"a": 1, "b": 2})
    assert (result.value, result.text, result.error, result.ok) == (3, "3", None, True)


def test_a_decorated_function_can_still_be_called() -> None:
    assert add(1, b=2) == 3


def test_tool_errors_are_shown_as_they_are_and_others_by_kind() -> None:
    assert fail.call({"how": "model"}).text == "say please"
    assert fail.call({"how": "exit"}).text == "SystemExit: 3"
    other = fail.call({"how": "?"})
    assert other.error == "tool_error"
    assert other.text.startswith("ValueError: xxx")
    assert len(other.text) <= 8192


@pytest.mark.parametrize("how", ["world", "sandbox", "import"])
def test_faults_of_the_surroundings_are_not_the_models(how: str) -> None:
    with pytest.raises(EnvError, match="tool 'fail'"):
        fail.call({"how": how})


def _wait_until_nothing_is_abandoned() -> None:
    for _ in range(200):
        if not deadline.stats().abandoned:
            return
        time.sleep(0.02)
    raise AssertionError(f"still abandoned: {deadline.stats()}")


@pytest.mark.parametrize("slow", [hang, wait, block])
def test_a_deadline_is_kept_and_the_next_call_works(slow: Tool) -> None:
    started = time.monotonic()
    result = slow.call({"seconds": 0.6})
    assert time.monotonic() - started < 0.5
    assert result.error == "timeout"
    assert result.text == f"tool '{slow.name}' timed out after 0.05 s"
    assert slow.call({"seconds": 0}).ok
    _wait_until_nothing_is_abandoned()


def test_a_hung_thread_is_counted_until_it_ends() -> None:
    _wait_until_nothing_is_abandoned()
    hang.call({"seconds": 0.3})
    assert deadline.stats().abandoned == 1
    _wait_until_nothing_is_abandoned()


def test_too_many_hung_threads_are_the_worlds_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    _wait_until_nothing_is_abandoned()
    monkeypatch.setattr(deadline, "MAX_ABANDONED", 1)
    hang.call({"seconds": 0.3})
    with pytest.raises(EnvError, match="isolated=True"):
        hang.call({"seconds": 0})
    _wait_until_nothing_is_abandoned()


def test_threads_are_reused() -> None:
    add.call({"a": 1, "b": 1})
    idle = deadline.stats().idle
    for _ in range(20):
        add.call({"a": 1, "b": 1})
    assert deadline.stats().idle == idle


def test_a_tool_that_raises_a_timeout_error_itself_is_told_apart() -> None:
    @tool
    def impatient() -> str:
        """Give up."""
        raise TimeoutError("upstream")

    assert impatient.call({}).text == "TimeoutError: upstream"


@pytest.fixture
def isolated_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "turngym_isolated_tools.py").write_text(
        """
import os, subprocess, sys, time
from turngym.envs.tools import tool
from turngym.errors import EnvError, ToolError

@tool(timeout_s=1, isolated=True)
def spin(mark: str) -> str:
    "Start a child, then never return."
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", mark])
    while True:
        pass

@tool(timeout_s=20, isolated=True)
def act(how: str) -> object:
    "Do one of several things."
    if how == "model":
        raise ToolError("say please")
    if how == "world":
        raise EnvError("no server")
    if how == "die":
        os._exit(5)
    if how == "big":
        return "x" * 50_000_000
    return {"pid": os.getpid()}
"""
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import turngym_isolated_tools  # type: ignore[import-not-found]

    yield turngym_isolated_tools
    isolated._close_idle()


def _processes_with(mark: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_text()
            except OSError:
                continue
            if mark in command:
                found.append(entry.name)
    return found


@pytest.mark.slow
def test_an_isolated_tool_is_killed_with_its_children(isolated_tools: Any) -> None:
    result = isolated_tools.spin.call({"mark": "turngym-spin-mark"})
    assert result.error == "timeout"
    for _ in range(100):
        if not _processes_with("turngym-spin-mark"):
            return
        time.sleep(0.02)
    raise AssertionError("a child of the killed tool is still alive")


@pytest.mark.slow
def test_an_isolated_process_is_reused_and_its_faults_are_sorted(isolated_tools: Any) -> None:
    act = isolated_tools.act
    first, second = (act.call({"how": "pid"}).value["pid"] for _ in range(2))
    assert first == second
    assert act.call({"how": "model"}).text == "say please"
    with pytest.raises(EnvError, match="no server"):
        act.call({"how": "world"})
    big = act.call({"how": "big"})
    assert big.ok
    assert len(big.text) <= 8192
    assert act.call({"how": "die"}).text == "the tool's process ended with code 5"
    assert act.call({"how": "pid"}).value["pid"] != first


def test_what_cannot_be_isolated_is_refused() -> None:
    def local() -> None:
        """Be local."""

    with pytest.raises(ConfigError, match="at the top of a module"):
        tool(isolated=True)(local)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"parameters": {}}, "needs a 'name'"),
        ({"name": "two words"}, "letters, digits"),
        ({"name": "x", "parameters": {"type": "array"}}, "of type 'object', got 'array'"),
    ],
)
def test_a_schema_that_describes_no_tool_is_refused(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Tool.from_schema(schema, print)


def test_an_async_tool_fails_like_any_other() -> None:
    @tool
    async def broken() -> str:
        """Fail."""
        raise ToolError("later")

    assert broken.call({}).text == "later"


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan")])
def test_every_tool_has_a_deadline(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="deadline"):
        Tool.from_schema({"name": "x"}, print, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        ("", "(no output)"),
        (None, "null"),
        (1.5, "1.5"),
        ([1, "é"], '[1, "é"]'),
        ({"a": {1}}, '{"a": [1]}'),
        (b"\xff\xfe ok", "�� ok"),
        ("half \ud800 pair", "half ? pair"),
        ("<|im_end|>\n", "<|im_end|>\n"),
    ],
)
def test_values_become_text(value: Any, text: str) -> None:
    assert to_text(value) == text


@pytest.mark.parametrize("value", ["ab" * 50_000_000, b"ab" * 50_000_000, ["ab"] * 200_000])
def test_huge_output_is_cut_to_head_and_tail(value: Any) -> None:
    big = Tool.from_schema({"name": "big"}, lambda: value, timeout_s=60)
    tracemalloc.start()
    result = big.call({})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert result.ok
    assert len(result.text) <= 8192
    assert "cut ...]" in result.text
    assert result.text.lstrip('["').startswith("ab")
    assert result.text.rstrip('"]').endswith("ab")
    assert result.value == result.text
    assert peak < 2**21


def test_the_cut_says_how_much_is_missing() -> None:
    text = cut("a" * 1000, 140)
    assert text == "a" * 50 + "\n[... 900 characters cut ...]\n" + "a" * 50


def _unread(index: int | None, kind: str = "malformed_json") -> InvalidToolCall:
    call: InvalidToolCall = {"text": "{", "error": kind, "span": (0, 1)}
    if index is not None:
        call["index"] = index
    return call


def test_every_call_gets_one_message_in_call_order() -> None:
    action = Action(
        role="assistant",
        content="",
        tool_calls=[make_call("add", {"a": 1, "b": 1}, turn=7), make_call("sub", {}, turn=8)],
        invalid_tool_calls=[_unread(1), _unread(None, "truncated")],
    )
    results, messages = answer_calls(action, {"add": add}, turn=3)
    assert [result.error for result in results] == [
        None,
        "malformed_json",
        "unknown_tool",
        "truncated",
    ]
    assert messages == (
        {"role": "tool", "content": "2", "tool_call_id": "call_7", "name": "add"},
        {
            "role": "tool",
            "content": "the call could not be read: malformed_json",
            "tool_call_id": "call_3_1",
        },
        {
            "role": "tool",
            "content": "unknown tool 'sub'; available: add",
            "tool_call_id": "call_8",
            "name": "sub",
        },
        {
            "role": "tool",
            "content": "the call could not be read: truncated",
            "tool_call_id": "call_3_3",
        },
    )


def test_only_unreadable_needs_an_attempt_and_no_read_call() -> None:
    assert not only_unreadable(Action(role="assistant", content="x"))
    assert only_unreadable(Action(role="assistant", content="", invalid_tool_calls=[_unread(0)]))
    assert not only_unreadable(
        Action(
            role="assistant",
            content="",
            tool_calls=[make_call("add", {}, turn=0)],
            invalid_tool_calls=[_unread(0)],
        )
    )
