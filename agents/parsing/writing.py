"""Writing actions in a dialect: what a demonstration looks like in the model's own format."""

from collections.abc import Callable, Sequence

from turngym.agents.parsing.common import THINK_CLOSE, THINK_OPEN, Segment, Style
from turngym.types import FunctionCall, Message

__all__ = ["attempts_of", "content_of", "verbatim", "write_reasoning", "write_tagged"]


def content_of(action: Message) -> str:
    """Return the visible text of an action, "" when it has none."""
    content = action["content"]
    return content if isinstance(content, str) else ""


def attempts_of(action: Message) -> list[FunctionCall | str]:
    """Return calls, and the texts of invalid ones, in the order in which they are written."""
    ordered: list[FunctionCall | str] = [call["function"] for call in action.get("tool_calls", [])]
    last = len(ordered) + len(action.get("invalid_tool_calls", []))
    for invalid in sorted(
        action.get("invalid_tool_calls", []), key=lambda call: call.get("index", last)
    ):
        ordered.insert(invalid.get("index", last), invalid["text"])
    return ordered


def write_reasoning(action: Message, style: Style, in_reasoning: bool) -> list[Segment]:
    """Write the reasoning block; when the prompt opened it, it is closed even if empty."""
    reasoning = action.get("reasoning_content", "")
    closing = style.think_gap + THINK_CLOSE + style.think_tail
    if in_reasoning:
        return [(reasoning, False), (closing, True)]
    if reasoning:
        return [(THINK_OPEN + style.think_gap, True), (reasoning, False), (closing, True)]
    return []


def verbatim(text: str, opening: str, closing: str, gap: str) -> list[Segment]:
    """Write an invalid call as it is, inside the markup unless it brings its own."""
    if not text.startswith(opening):
        return [(opening + gap, True), (text, False), (gap + closing, True)]
    inner = text.removeprefix(opening)
    if closing and inner.endswith(closing):
        return [(opening, True), (inner.removesuffix(closing), False), (closing, True)]
    return [(opening, True), (inner, False)]


def write_tagged(
    action: Message,
    style: Style,
    in_reasoning: bool,
    *,
    opening: str,
    closing: str,
    write_call: Callable[[FunctionCall], Sequence[Segment]],
) -> list[Segment]:
    """Write reasoning, content and one tagged block a call.

    Args:
        action: what to write.
        style: blanks around the markup.
        in_reasoning: the prompt has opened the reasoning block.
        opening: tag before a call.
        closing: tag behind it.
        write_call: writes what stands between the tags.
    """
    segments = write_reasoning(action, style, in_reasoning)
    content = content_of(action)
    segments.append((content, False))
    for index, call in enumerate(attempts_of(action)):
        if index or content:
            segments.append((style.call_lead, True))
        if isinstance(call, str):
            segments += verbatim(call, opening, closing, style.call_gap)
        else:
            segments.append((opening + style.call_gap, True))
            segments += write_call(call)
            segments.append((style.call_gap + closing, True))
    return segments
