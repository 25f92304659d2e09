"""Qwen3-Coder: `<function=name>` and `<parameter=key>` elements between `<tool_call>` tags."""

import re
from collections.abc import Sequence
from typing import Any

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
from turngym.agents.parsing.writing import write_tagged
from turngym.types import FunctionCall, Message

__all__ = ["QWEN3_XML"]

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
FUNCTION_CLOSE = "</function>"
_FUNCTION = re.compile(r"<function=([^<>\n]+)>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>")
_EITHER = re.compile(f"{OPEN}|{CLOSE}")
# A closing tag inside a value is followed by more of the value.
_VALUE_END = re.compile(r"</parameter>(?=\s*+(?:<parameter=|</function>))")
_UNCLOSED = re.compile(r"\n<parameter=([^<>\n]+)>(?=\n)")


class _BrokenError(Exception):
    """The markup of a function is broken; carries where."""


class _Function:
    """Reads one function element after another, within one `<tool_call>`."""

    def __init__(self, text: str, context: Context) -> None:
        self.text = text
        self.context = context
        self.value_ends = Positions(_VALUE_END, text)
        self.unclosed = Positions(_UNCLOSED, text)

    def read(self, position: int) -> tuple[str, list[tuple[str, str]], int]:
        """Return name, parameters and end of the function element at a position.

        Raises:
            _BrokenError: there is no whole element.
        """
        text = self.text
        head = _FUNCTION.match(text, position)
        if head is None:
            raise _BrokenError(position)
        known = self.context.parameters.get(head[1], {}).get("properties")
        parameters: list[tuple[str, str]] = []
        position = skip_space(text, head.end())
        while match := _PARAMETER.match(text, position):
            close = self.value_ends.after(match.end())
            if close is None or self._is_unclosed(match.end(), close.start(), known):
                raise _BrokenError(match.end())
            value = text[match.end() : close.start()]
            parameters.append((match[1], value.removeprefix("\n").removesuffix("\n")))
            position = skip_space(text, close.end())
        if not text.startswith(FUNCTION_CLOSE, position):
            raise _BrokenError(position)
        return head[1], parameters, position + len(FUNCTION_CLOSE)

    def _is_unclosed(self, start: int, end: int, known: Any) -> bool:
        """Tell whether another parameter opens inside a value (and is not just text)."""
        match = self.unclosed.after(start)
        while match is not None and match.start() < end:
            if known is None or match[1] in known:
                return True
            match = self.unclosed.after(match.end())
        return False


def parse(text: str, context: Context) -> Parsed:
    """Parse a completion."""
    functions = _Function(text, context)
    tags = Positions(_EITHER, text)
    last_close = text.rfind(CLOSE)

    def read(start: int, body: int) -> tuple[Sequence[Attempt], int]:
        attempts: list[Attempt] = []
        begun = position = skip_space(text, body)
        try:
            while not (attempts and text.startswith(CLOSE, position)):
                begun = position
                name, parameters, end = functions.read(position)
                attempts.append(typed_call(name, parameters, (start, end), context))
                position = skip_space(text, end)
                if position == len(text) and context.finish_reason == "stop":
                    return attempts, position
        except _BrokenError as broken:
            position = int(broken.args[0])
            if last_close < position:
                return [*attempts, failure("truncated", (start, len(text)))], len(text)
            tag = tags.after(position)
            assert tag is not None
            end = tag.end() if tag.group() == CLOSE else tag.start()
            return [*attempts, _mend(text[begun : tag.start()], (start, end), context)], end
        return attempts, position + len(CLOSE)

    return walk(text, context, {OPEN: read}, fabricated=("<tool_response>", "<|im_start|>"))


def _mend(body: str, span: tuple[int, int], context: Context) -> Attempt:
    """Close parameters that were left open, in the repairing mode."""
    if context.lenient:
        body = re.sub(r"(?<![>])\n(?=<parameter=)", "\n</parameter>\n", body)
        try:
            name, parameters, _ = _Function(body, context).read(0)
        except _BrokenError:
            return failure("malformed_markup", span)
        return typed_call(name, parameters, span, context, flags=frozenset({"repaired"}))
    return failure("malformed_markup", span)


def write(action: Message, style: Style, in_reasoning: bool) -> list[Segment]:
    """Write an action."""
    return write_tagged(
        action, style, in_reasoning, opening=OPEN, closing=CLOSE, write_call=_write_call
    )


def _write_call(call: FunctionCall) -> Sequence[Segment]:
    lines = [f"<function={call['name']}>"]
    for key, value in call["arguments"].items():
        lines += [f"<parameter={key}>", untyped(value, dump(value)), "</parameter>"]
    return [("\n".join([*lines, FUNCTION_CLOSE]), False)]


QWEN3_XML = Dialect(
    name="qwen3_xml",
    parse=parse,
    format=write,
    roles=RoleTable(
        markers={
            "text": THINK_MARKERS | {OPEN: "action"},
            "think": {THINK_CLOSE: "text"},
            "action": {CLOSE: "text"},
        }
    ),
    signs=(("<function=",),),
)
