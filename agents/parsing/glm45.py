"""GLM 4.5: the name, then `<arg_key>` and `<arg_value>` elements, between `<tool_call>` tags."""

import re
from collections.abc import Sequence

from turngym.agents.parsing.calls import dump, failure
from turngym.agents.parsing.common import (
    THINK_CLOSE,
    THINK_MARKERS,
    Attempt,
    Context,
    Dialect,
    Parsed,
    RoleTable,
    Segment,
    Style,
    walk,
)
from turngym.agents.parsing.jsonscan import skip_space
from turngym.agents.parsing.markup import Positions, typed_call, untyped
from turngym.agents.parsing.writing import attempts_of, write_tagged
from turngym.types import FunctionCall, Message

__all__ = ["GLM45"]

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_NAME = re.compile(r"\s*+([^\s<>]++)[ \t]*+(?=\n|\r\n|<|\Z)")
_KEY = re.compile(r"<arg_key>([^<>]*+)</arg_key>\s*+<arg_value>")
_VALUE_END = re.compile(rf"</arg_value>(?=\s*+(?:<arg_key>|{CLOSE}|\Z))")
_CLOSE = re.compile(CLOSE)


def parse(text: str, context: Context) -> Parsed:
    """Parse a completion."""
    value_ends = Positions(_VALUE_END, text)
    closes = Positions(_CLOSE, text)

    def read(start: int, body: int) -> tuple[Sequence[Attempt], int]:
        name, arguments, position = _read_body(text, body, value_ends)
        if name and text.startswith(CLOSE, position):
            end = position + len(CLOSE)
            return [typed_call(name, arguments, (start, end), context)], end
        if name and position == len(text) and context.finish_reason == "stop":
            return [typed_call(name, arguments, (start, position), context)], position
        close = closes.after(position)
        if close is None:
            return [failure("truncated", (start, len(text)))], len(text)
        span = (start, close.end())
        return [_mend(text[body : close.start()], span, context)], close.end()

    return walk(text, context, {OPEN: read}, fabricated=("<tool_response>", "<|observation|>"))


def _read_body(
    text: str, position: int, value_ends: Positions
) -> tuple[str, list[tuple[str, str]], int]:
    """Return name ("" = none), arguments, and where reading stopped."""
    head = _NAME.match(text, position)
    if head is None:
        return "", [], position
    arguments: list[tuple[str, str]] = []
    position = skip_space(text, head.end())
    while key := _KEY.match(text, position):
        close = value_ends.after(key.end())
        if close is None:
            break
        arguments.append((key[1].strip(), text[key.end() : close.start()]))
        position = skip_space(text, close.end())
    return head[1], arguments, position


def _mend(body: str, span: tuple[int, int], context: Context) -> Attempt:
    """Put key tags right, in the repairing mode."""
    if context.lenient:
        body = re.sub(rf"{OPEN}(?=[^<>]*</arg_key>)", "<arg_key>", body)
        body = re.sub(r"</arg_key>(?:\s*</arg_key>)+", "</arg_key>", body)
        name, arguments, position = _read_body(body, 0, Positions(_VALUE_END, body))
        if name and position == len(body):
            return typed_call(name, arguments, span, context, flags=frozenset({"repaired"}))
    return failure("malformed_markup", span)


def write(action: Message, style: Style, in_reasoning: bool) -> list[Segment]:
    """Write an action."""
    bare = Style(
        think_gap=style.think_gap,
        think_tail=style.think_tail,
        call_lead=style.call_lead,
        call_gap="",
    )
    return write_tagged(
        action, bare, in_reasoning, opening=OPEN, closing=CLOSE, write_call=_write_call
    )


def _write_call(call: FunctionCall) -> Sequence[Segment]:
    segments: list[Segment] = [(call["name"], False), ("\n", True)]
    for key, value in call["arguments"].items():
        segments += [("<arg_key>", True), (key, False), ("</arg_key>\n<arg_value>", True)]
        segments += [(untyped(value, dump(value)), False), ("</arg_value>\n", True)]
    return segments


GLM45 = Dialect(
    name="glm45",
    parse=parse,
    format=write,
    roles=RoleTable(
        markers={
            "text": THINK_MARKERS | {OPEN: "action"},
            "think": {THINK_CLOSE: "text"},
            "action": {CLOSE: "text"},
        }
    ),
    signs=(("<arg_key>",),),
    stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
    headers=("<|user|>", "<|observation|>"),
    end=lambda action: "<|observation|>" if attempts_of(action) else "<|user|>",
)
