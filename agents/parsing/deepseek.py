"""DeepSeek V3 (name, then fenced JSON) and V3.1 (name, then JSON), between their own tokens.

The tokens are spelled with full-width bars and block characters; ASCII look-alikes are text.
"""

import re
from collections.abc import Sequence
from functools import partial

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
from turngym.agents.parsing.jsonscan import scan_value, skip_space
from turngym.agents.parsing.markup import Positions
from turngym.agents.parsing.writing import attempts_of, content_of, write_reasoning
from turngym.types import Message

__all__ = ["DEEPSEEK_V3", "DEEPSEEK_V31"]

_BAR = "\uff5c"
CALLS = f"<{_BAR}tool▁calls▁begin{_BAR}>"
CALLS_END = f"<{_BAR}tool▁calls▁end{_BAR}>"
CALL = f"<{_BAR}tool▁call▁begin{_BAR}>"
CALL_END = f"<{_BAR}tool▁call▁end{_BAR}>"
SEP = f"<{_BAR}tool▁sep{_BAR}>"
_RESULTS = (f"<{_BAR}tool▁outputs▁begin{_BAR}>", f"<{_BAR}tool▁output▁begin{_BAR}>")
_EDGE = re.compile(f"{CALL}|{CALL_END}")
_FENCED_HEAD = re.compile(rf"\w*+{SEP}([^<>\n]+)\n```(?:json)?\n")
_BARE_HEAD = re.compile(rf"\s*+([^<>\s]+)\s*+{SEP}")
_FENCE_END = re.compile(r"\s*+```")


def parse(text: str, context: Context, *, is_fenced: bool) -> Parsed:
    """Parse a completion."""
    edges = Positions(_EDGE, text)
    head_pattern = _FENCED_HEAD if is_fenced else _BARE_HEAD

    def read(start: int, body: int) -> tuple[Sequence[Attempt], int]:
        head = head_pattern.match(text, body)
        position = head.end() if head else body
        scan = scan_value(text, position)
        edge = edges.after(scan.end if head and scan.is_complete else scan.resume)
        after = skip_space(text, scan.end)
        if is_fenced and (fence := _FENCE_END.match(text, after)):
            after = skip_space(text, fence.end())
        if edge is None:
            is_whole = head is not None and scan.is_complete and after == len(text)
            if not is_whole or context.finish_reason == "length":
                return [failure("truncated", (start, len(text)))], len(text)
            end = len(text)
        else:
            end = edge.end() if edge.group() == CALL_END else edge.start()
        span = (start, end)
        if head is None:
            return [failure("malformed_markup", span)], end
        if scan.error is None and (edge is None or after == edge.start()):
            return [make_call({"name": head[1], "arguments": scan.value}, span, context)], end
        kind = scan.error or "extra_data"
        return [_mend(text[position:end], head[1], kind, span, context)], end

    return walk(text, context, {CALL: read}, ignored=(CALLS, CALLS_END), fabricated=_RESULTS)


def _mend(body: str, name: str, kind: str, span: tuple[int, int], context: Context) -> Attempt:
    if context.lenient:
        for value in repair(body.removesuffix(CALL_END).rstrip().removesuffix("```")):
            attempt = make_call({"name": name, "arguments": value}, span, context)
            if isinstance(attempt, ParsedCall):
                return attempt
    return failure(kind, span)


def write(action: Message, style: Style, in_reasoning: bool, *, is_fenced: bool) -> list[Segment]:
    """Write an action."""
    segments = write_reasoning(action, style, in_reasoning)
    segments.append((content_of(action), False))
    attempts = attempts_of(action)
    if not attempts:
        return segments
    segments.append((CALLS, True))
    for call in attempts:
        if isinstance(call, str):
            inner = call.removeprefix(CALL).removesuffix(CALL_END)
            segments += [(CALL, True), (inner, False), (CALL_END, True)]
        elif is_fenced:
            segments += [(f"{CALL}function{SEP}", True), (call["name"], False)]
            segments += [("\n```json\n", True), (dump(call["arguments"]), False)]
            segments.append((f"\n```{CALL_END}", True))
        else:
            segments += [(CALL, True), (call["name"], False), (SEP, True)]
            segments += [(dump(call["arguments"]), False), (CALL_END, True)]
    segments.append((CALLS_END, True))
    return segments


_ROLES = RoleTable(
    markers={
        "text": THINK_MARKERS | {CALL: "action"},
        "think": {THINK_CLOSE: "text"},
        "action": {CALL_END: "text"},
    }
)

DEEPSEEK_V3 = Dialect(
    name="deepseek_v3",
    parse=partial(parse, is_fenced=True),
    format=partial(write, is_fenced=True),
    roles=_ROLES,
    signs=((CALL, "```json"),),
)

DEEPSEEK_V31 = Dialect(
    name="deepseek_v31",
    parse=partial(parse, is_fenced=False),
    format=partial(write, is_fenced=False),
    roles=_ROLES,
    signs=((CALL,),),
)
