"""Mistral: `[TOOL_CALLS]`, then a list of JSON calls, or `name[ARGS]{...}` one mark a call."""

import re
from collections.abc import Sequence
from typing import Any

from turngym.agents.parsing.calls import dump, failure, make_call, repair
from turngym.agents.parsing.common import (
    THINK_CLOSE,
    THINK_MARKERS,
    Attempt,
    Context,
    Dialect,
    Parsed,
    ParsedCall,
    RoleTable,
    Segment,
    Style,
    walk,
)
from turngym.agents.parsing.jsonscan import Scan, scan_value, skip_space
from turngym.agents.parsing.writing import attempts_of, content_of, write_reasoning
from turngym.types import Message

__all__ = ["MISTRAL"]

MARK = "[TOOL_CALLS]"
_NAME = re.compile(r"\s*+([^\s\[\]{}]++)\s*+(?:\[CALL_ID\][^\s\[\]{}]*+\s*+)?(?:\[ARGS\]\s*+)?")


def parse(text: str, context: Context) -> Parsed:
    """Parse a completion."""

    def read(start: int, body: int) -> tuple[Sequence[Attempt], int]:
        position = skip_space(text, body)
        head = None if text[position : position + 1] in "[{" else _NAME.match(text, position)
        scan = scan_value(text, head.end() if head else position)
        if scan.is_complete:
            span = (start, scan.end)
            if head:
                return [_named(head[1], scan, span, context)], scan.end
            if scan.error:
                return [failure(scan.error, span)], scan.end
            values = scan.value if isinstance(scan.value, list) else [scan.value]
            return [make_call(value, span, context) for value in values], scan.end
        following = text.find(MARK, scan.resume)
        end = following if following >= 0 else len(text)
        return _mend(text[body:end], head, scan, (start, end), context), end

    return walk(text, context, {MARK: read}, fabricated=("[TOOL_RESULTS]",))


def _named(name: str, scan: Scan, span: tuple[int, int], context: Context) -> Attempt:
    if scan.error:
        return failure(scan.error, span)
    return make_call({"name": name, "arguments": scan.value}, span, context)


def _mend(
    body: str,
    head: re.Match[str] | None,
    scan: Scan,
    span: tuple[int, int],
    context: Context,
) -> list[Attempt]:
    if context.lenient and not scan.at_end:
        inner = body if head is None else body[head.end() - head.start() :]
        values: list[Any] = list(repair(inner))
        if head is not None:
            values = [{"name": head[1], "arguments": value} for value in values[:1]]
        mended = [make_call(value, span, context) for value in values]
        if mended and all(isinstance(attempt, ParsedCall) for attempt in mended):
            return mended
    return [failure("truncated" if scan.at_end else "malformed_json", span)]


def write(action: Message, style: Style, in_reasoning: bool) -> list[Segment]:
    """Write an action in the `name[ARGS]{...}` form."""
    segments = write_reasoning(action, style, in_reasoning)
    segments.append((content_of(action), False))
    for call in attempts_of(action):
        if isinstance(call, str):
            segments += [(MARK, True), (call.removeprefix(MARK), False)]
        else:
            segments += [(MARK, True), (call["name"], False), ("[ARGS]", True)]
            segments.append((dump(call["arguments"]), False))
    return segments


MISTRAL = Dialect(
    name="mistral",
    parse=parse,
    format=write,
    roles=RoleTable(
        markers={
            "text": THINK_MARKERS | {MARK: "action"},
            "think": {THINK_CLOSE: "text"},
            "action": {},
        }
    ),
    signs=((MARK,),),
)
