"""Hermes, Qwen 2.5 and Qwen 3: one JSON object between `<tool_call>` tags."""

import re
from collections.abc import Sequence

from turngym.agents.parsing.calls import dump, failure, read_value, repair_calls
from turngym.agents.parsing.common import (
    THINK_CLOSE,
    THINK_MARKERS,
    Attempt,
    Context,
    Dialect,
    Parsed,
    ParseError,
    RoleTable,
    Segment,
    Style,
    walk,
)
from turngym.agents.parsing.jsonscan import scan_value, skip_space
from turngym.agents.parsing.writing import write_tagged
from turngym.types import FunctionCall, Message

__all__ = ["HERMES"]

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_EITHER = re.compile(f"{OPEN}|{CLOSE}")


def parse(text: str, context: Context) -> Parsed:
    """Parse a completion. A closing tag inside a JSON string is data."""
    last_close = text.rfind(CLOSE)

    def read(start: int, body: int) -> tuple[Sequence[Attempt], int]:
        scan = scan_value(text, body)
        after = skip_space(text, scan.end)
        if scan.is_complete and text.startswith(CLOSE, after):
            end = after + len(CLOSE)
            attempt = read_value(scan, (start, end), context)
        elif scan.is_complete and after == len(text) and context.finish_reason == "stop":
            end = after
            attempt = read_value(scan, (start, end), context)
        elif last_close < scan.resume:
            return [failure("truncated", (start, len(text)))], len(text)
        else:
            after = _region_end(text, after if scan.is_complete else scan.resume)
            end = after + len(CLOSE) if text.startswith(CLOSE, after) else after
            kind = "extra_data" if scan.is_complete else "malformed_json"
            attempt = failure(kind, (start, end))
        if context.lenient and isinstance(attempt, ParseError):
            return repair_calls(text[body:after], (start, end), context) or [attempt], end
        return [attempt], end

    return walk(text, context, {OPEN: read}, fabricated=("<tool_response>", "<|im_start|>"))


def _region_end(text: str, position: int) -> int:
    match = _EITHER.search(text, position)
    return match.start() if match else len(text)


def write(action: Message, style: Style, in_reasoning: bool) -> list[Segment]:
    """Write an action."""
    return write_tagged(
        action, style, in_reasoning, opening=OPEN, closing=CLOSE, write_call=_write_call
    )


def _write_call(call: FunctionCall) -> Sequence[Segment]:
    return [(dump({"name": call["name"], "arguments": call["arguments"]}), False)]


HERMES = Dialect(
    name="hermes",
    parse=parse,
    format=write,
    roles=RoleTable(
        markers={
            "text": THINK_MARKERS | {OPEN: "action"},
            "think": {THINK_CLOSE: "text"},
            "action": {CLOSE: "text"},
        }
    ),
    signs=((OPEN,),),
)
