"""Fenced Python: every ```` ```python ```` block is a call of the tool `python` with `code`."""

import re
from collections.abc import Sequence

from turngym.agents.parsing.calls import failure
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
from turngym.agents.parsing.writing import attempts_of, content_of, write_reasoning
from turngym.types import Message

__all__ = ["PYTHON_CODE_BLOCK"]

TOOL = "python"
FENCE = "```"
OUTPUT = "```output"
_PYTHON = re.compile(r"python[\d.]*|py\d*", re.IGNORECASE)
_INFO = re.compile(r"([^`\n]*)(?:\n|\Z)")
_CLOSE = r"\n {0,3}```[ \t\r]*(?=\n|\Z)"
_CLOSING = re.compile(_CLOSE)
# A quote that is not closed on its line runs to the end of the line, so that none is read twice.
_CODE = re.compile(
    rf"(?P<close>{_CLOSE})|(?P<triple>'{{3}}|\"{{3}})|\#[^\n]*+"
    r"|'(?:[^'\\\n]++|\\(?s:.)|\\\Z)*+'?|\"(?:[^\"\\\n]++|\\(?s:.)|\\\Z)*+\"?"
)


def parse(text: str, context: Context) -> Parsed:
    """Parse a completion. A fence inside a triple-quoted string is code."""
    last = {quote: text.rfind(quote) for quote in ("'''", '"""')}

    def read(start: int, _: int) -> tuple[Sequence[Attempt], int]:
        body = start + len(FENCE)
        info = _INFO.match(text, body)
        if info is None or not _begins_line(text, start):
            return [], body
        word = (info[1].split() or [""])[0]
        if not _PYTHON.fullmatch(word):
            close = _CLOSING.search(text, info.end(1))
            return [], close.end() if close else len(text)
        code = info.end()
        close = _close_of(text, code, last)
        end = close.end() if close else len(text)
        if close is None and context.finish_reason == "length":
            return [failure("truncated", (start, end))], end
        code_end = close.start() + 1 if close else end
        arguments = {"code": text[code : max(code, code_end)]}
        return [ParsedCall(name=TOOL, arguments=arguments, span=(start, end))], end

    readers = {FENCE: read, OUTPUT: read}
    return walk(text, context, readers, fabricated=(OUTPUT, "<tool_response>"))


def _begins_line(text: str, position: int) -> bool:
    if position >= len(THINK_CLOSE) and text.startswith(THINK_CLOSE, position - len(THINK_CLOSE)):
        return True
    before = text[max(position - 4, 0) : position]
    line = before.rpartition("\n")[2]
    return not line.strip(" ") and len(line) < 4


def _close_of(text: str, code: int, last: dict[str, int]) -> re.Match[str] | None:
    """Find the fence that closes a block, strings and comments skipped.

    Args:
        text: the completion.
        code: where the code begins; the line break before it may belong to the fence.
        last: last position of each triple quote.
    """
    position = max(code - 1, 0)
    while match := _CODE.search(text, position):
        if match["close"] is not None:
            return match
        position = match.end()
        if match["triple"] is not None:
            if last[match["triple"]] < position:
                break
            position = text.index(match["triple"], position) + 3
    # No fence, or a string that never ends: then the code is broken, and any fence closes it.
    return _CLOSING.search(text, max(code - 1, 0))


def write(action: Message, style: Style, in_reasoning: bool) -> list[Segment]:
    """Write an action; calls of other tools cannot be written in this dialect."""
    segments = write_reasoning(action, style, in_reasoning)
    content = content_of(action)
    segments.append((content, False))
    for index, call in enumerate(attempts_of(action)):
        code = call if isinstance(call, str) else str(call["arguments"].get("code", ""))
        lead = "\n" if index or content else ""
        if code.startswith(FENCE):
            segments += [(lead, True), (code, False)]
        else:
            segments += [(f"{lead}{FENCE}python\n", True), (code, False)]
            segments.append((FENCE if code.endswith("\n") else f"\n{FENCE}", True))
    return segments


PYTHON_CODE_BLOCK = Dialect(
    name="python_code_block",
    parse=parse,
    format=write,
    roles=RoleTable(
        markers={
            "text": THINK_MARKERS | {f"{FENCE}py": "action"},
            "think": {THINK_CLOSE: "text"},
            "action": {f"\n{FENCE}": "text"},
        }
    ),
    signs=(("```python",),),
)
