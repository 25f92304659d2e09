"""From an action's tool calls to results and tool messages: one of each a call, in call order."""

from collections.abc import Iterator, Mapping
from typing import Any

from turngym.envs.tools import Tool, cut
from turngym.rewards.base import ToolResult
from turngym.types import Action, FunctionCall, InvalidToolCall, Message, ToolCall

__all__ = ["answer_calls", "make_call", "only_unreadable"]

_MAX_ECHO = 500


def make_call(name: str, arguments: dict[str, Any], *, turn: int) -> ToolCall:
    """Write a tool call as an expert's action holds it."""
    function: FunctionCall = {"name": name, "arguments": arguments}
    return {"id": f"call_{turn}", "type": "function", "function": function}


def only_unreadable(action: Action) -> bool:
    """Tell whether an action tried to call tools and none of its calls could be read."""
    return bool(action.get("invalid_tool_calls")) and not action.get("tool_calls")


def answer_calls(
    action: Action, tools: Mapping[str, Tool], *, turn: int
) -> tuple[tuple[ToolResult, ...], tuple[Message, ...]]:
    """Run an action's calls one after another.

    Calls that could not be read, name no tool or do not fit its schema are answered too.

    Args:
        action: the assistant message.
        tools: what is offered, by name.
        turn: index of the turn; names calls that carry no id.

    Returns:
        One result and one tool message a call, in call order.

    Raises:
        EnvError: the surroundings of a tool failed.
    """
    results: list[ToolResult] = []
    messages: list[Message] = []
    for position, (call, unread) in enumerate(_in_order(action)):
        call_id = f"call_{turn}_{position}"
        if unread is not None:
            result = _unreadable(unread)
        else:
            assert call is not None
            call_id = call.get("id") or call_id
            result = _run(call, tools)
        message: Message = {"role": "tool", "content": result.text, "tool_call_id": call_id}
        if result.name:
            message["name"] = result.name
        results.append(result)
        messages.append(message)
    return tuple(results), tuple(messages)


def _in_order(action: Action) -> Iterator[tuple[ToolCall | None, InvalidToolCall | None]]:
    """Merge read and unread calls: an unread one stands where its `index` says, else last."""
    calls = list(action.get("tool_calls", ()))
    unread = list(action.get("invalid_tool_calls", ()))
    placed = {entry["index"]: entry for entry in unread if "index" in entry}
    rest = [entry for entry in unread if placed.get(entry.get("index", -1)) is not entry]
    position = 0
    for call in calls:
        while position in placed:
            yield None, placed.pop(position)
            position += 1
        yield call, None
        position += 1
    for index in sorted(placed):
        yield None, placed[index]
    for entry in rest:
        yield None, entry


def _unreadable(entry: InvalidToolCall) -> ToolResult:
    kind = entry["error"]
    text = entry.get("detail") or f"the call could not be read: {kind}"
    return ToolResult(name="", arguments={}, error=kind, text=cut(text, _MAX_ECHO))


def _run(call: ToolCall, tools: Mapping[str, Tool]) -> ToolResult:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    tool = tools.get(name)
    if tool is None:
        offered = ", ".join(tools) or "none"
        text = f"unknown tool {name[:_MAX_ECHO]!r}; available: {offered}"
        return ToolResult(name=name, arguments=arguments, error="unknown_tool", text=text)
    return tool.call(arguments)
