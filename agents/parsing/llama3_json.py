"""Llama 3: the whole reply is one JSON call, or several with semicolons between them."""

import re
from collections.abc import Sequence
from dataclasses import replace

from turngym.agents.parsing.calls import dump, failure, read_value, repair_calls
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
    skip_thought,
    walk,
)
from turngym.agents.parsing.jsonscan import scan_value, skip_space
from turngym.agents.parsing.writing import attempts_of, content_of, write_reasoning
from turngym.types import Message

__all__ = ["LLAMA3_JSON"]

TAG = "<|python_tag|>"
KEY = "parameters"
_ENDS = ("<|eom_id|>", "<|eot_id|>")
# A reply may be JSON without being a call; a call says its name first.
_CALL = re.compile(r'\{\s*+["\']name["\']\s*+:')
_NEXT = re.compile(r"\s*+;\s*+(?=\{)")


def parse(text: str, context: Context) -> Parsed:
    """Parse a completion. JSON behind other text is text, unless the tag precedes it."""
    whole = text.rstrip()
    for end in _ENDS:
        whole = whole.removesuffix(end).rstrip()

    def read(start: int, body: int) -> tuple[Sequence[Attempt], int]:
        return _read_calls(whole, start, body, context), len(text)

    lead = skip_thought(text, context)
    if not _CALL.match(whole, lead):
        return walk(text, context, {TAG: read}, fabricated=("<|start_header_id|>",))
    before = walk(text[:lead], context, {})
    return replace(before, text=text, attempts=tuple(_read_calls(whole, lead, lead, context)))


def _read_calls(text: str, start: int, body: int, context: Context) -> list[Attempt]:
    attempts: list[Attempt] = []
    position = skip_space(text, body)
    while True:
        scan = scan_value(text, position)
        after = skip_space(text, scan.end)
        following = _NEXT.match(text, scan.end) if scan.is_complete else None
        span = (start, scan.end if following else len(text))
        if following or (scan.is_complete and after == len(text)):
            attempts.append(read_value(scan, span, context, key=KEY))
        else:
            kind = "extra_data" if scan.is_complete else "malformed_json"
            kind = "truncated" if scan.at_end else kind
            if context.lenient and (
                mended := repair_calls(text[position:], span, context, key=KEY)
            ):
                return [*attempts, *mended]
            return [*attempts, failure(kind, span)]
        if following is None:
            return attempts
        start = position = following.end()


def write(action: Message, style: Style, in_reasoning: bool) -> list[Segment]:
    """Write an action; the tag marks the calls when something precedes them."""
    segments = write_reasoning(action, style, in_reasoning)
    content = content_of(action)
    attempts = attempts_of(action)
    segments += [(content, False), (TAG if content and attempts else "", True)]
    texts = [
        call if isinstance(call, str) else dump({"name": call["name"], KEY: call["arguments"]})
        for call in attempts
    ]
    segments.append(("; ".join(texts), False))
    return segments


LLAMA3_JSON = Dialect(
    name="llama3_json",
    parse=parse,
    format=write,
    roles=RoleTable(
        markers={
            "text": THINK_MARKERS | {TAG: "action"},
            "think": {THINK_CLOSE: "text"},
            "action": {},
        },
        leading=("{",),
    ),
    signs=((TAG,), ("<|start_header_id|>", '"parameters"')),
    stops=("<|eot_id|>", "<|eom_id|>"),
)
