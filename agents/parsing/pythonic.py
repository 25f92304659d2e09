"""Pythonic calls (Llama 4, ToolACE): a list of `name(key=literal)`; nothing is evaluated."""

import re
from collections.abc import Iterator
from dataclasses import replace

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
    skip_thought,
    walk,
)
from turngym.agents.parsing.jsonscan import scan_value, skip_space
from turngym.agents.parsing.writing import attempts_of, content_of, write_reasoning
from turngym.types import Message

__all__ = ["PYTHONIC"]

START, END = "<|python_start|>", "<|python_end|>"
_LIST = re.compile(r"\[\s*+[A-Za-z_][\w.]*+\s*+\(")
_NAME = re.compile(r"([A-Za-z_][\w.]*+)\s*+\(")
_KEY = re.compile(r"([A-Za-z_]\w*+)\s*+=(?!=)")
_SKIP = re.compile(r"'(?:[^'\\\n]++|\\(?s:.))*+'?|\"(?:[^\"\\\n]++|\\(?s:.))*+\"?|[()\[\]{},]")


class _BrokenError(Exception):
    """The list of calls breaks off or is not one."""


def parse(text: str, context: Context) -> Parsed:
    """Parse a completion. The list must be the whole reply (reasoning apart)."""
    lead = skip_thought(text, context)
    begin = lead + len(START) if text.startswith(START, lead) else lead
    if not _LIST.match(text, begin):
        return walk(text, context, {})
    before = walk(text[:lead], context, {})
    whole = text.rstrip().removesuffix(END).rstrip()
    attempts = list(_read_list(whole, lead, begin, context))
    return replace(before, text=text, attempts=tuple(attempts))


def _read_list(text: str, lead: int, begin: int, context: Context) -> Iterator[Attempt]:
    """Yield the calls; a list that breaks off gives one error and nothing else."""
    attempts: list[Attempt] = []
    position = skip_space(text, begin + 1)
    try:
        while not text.startswith("]", position):
            attempt, position = _read_call(text, position, context)
            attempts.append(attempt)
            position = skip_space(text, position)
            if text.startswith(",", position):
                position = skip_space(text, position + 1)
            elif not text.startswith("]", position):
                raise _BrokenError
        if skip_space(text, position + 1) != len(text):
            attempts = [failure("extra_data", (lead, len(text)))]
    except _BrokenError:
        kind = "truncated" if context.finish_reason == "length" else "malformed_markup"
        if not (context.lenient and attempts and position == len(text)):
            attempts = [failure(kind, (lead, len(text)))]
        else:
            attempts = [_repaired(attempt) for attempt in attempts]
    yield from attempts


def _repaired(attempt: Attempt) -> Attempt:
    if isinstance(attempt, ParsedCall):
        return replace(attempt, flags=attempt.flags | {"repaired"})
    return attempt


def _read_call(text: str, start: int, context: Context) -> tuple[Attempt, int]:
    """Read one call.

    Raises:
        _BrokenError: it does not end.
    """
    head = _NAME.match(text, start)
    if head is None:
        raise _BrokenError
    arguments: dict[str, object] = {}
    kind: str | None = None
    position = skip_space(text, head.end())
    while not text.startswith(")", position):
        key = _KEY.match(text, position)
        scan = scan_value(text, key.end() if key else position, grammar="python")
        after = skip_space(text, scan.end)
        if key is None:
            kind = kind or "malformed_markup"
        elif not scan.is_complete or text[after : after + 1] not in (",", ")"):
            kind = kind or "not_a_literal"
        else:
            kind = kind or scan.error
            if key[1] in arguments and not context.lenient:
                kind = kind or "duplicate_key"
            arguments[key[1]] = scan.value
        position = _skip_argument(text, position)
        if text.startswith(",", position):
            position = skip_space(text, position + 1)
    end = position + 1
    if kind is not None:
        return failure(kind, (start, end)), end
    return ParsedCall(name=head[1], arguments=arguments, span=(start, end)), end


def _skip_argument(text: str, position: int) -> int:
    """Return where an argument ends: a comma or bracket outside strings and inner brackets."""
    depth = 0
    for match in _SKIP.finditer(text, position):
        mark = match.group()
        if depth == 0 and mark in (",", ")"):
            return match.start()
        if mark in ("(", "[", "{"):
            depth += 1
        elif mark in (")", "]", "}"):
            depth -= 1
            if depth < 0:
                break
    raise _BrokenError


def write(action: Message, style: Style, in_reasoning: bool) -> list[Segment]:
    """Write an action; content cannot stand beside calls in this dialect."""
    segments = write_reasoning(action, style, in_reasoning)
    attempts = attempts_of(action)
    texts = [
        call
        if isinstance(call, str)
        else f"{call['name']}({', '.join(f'{k}={v!r}' for k, v in call['arguments'].items())})"
        for call in attempts
    ]
    segments.append((f"[{', '.join(texts)}]" if attempts else content_of(action), False))
    return segments


PYTHONIC = Dialect(
    name="pythonic",
    parse=parse,
    format=write,
    roles=RoleTable(
        markers={"text": THINK_MARKERS, "think": {THINK_CLOSE: "text"}, "action": {}},
        leading=("[", START),
    ),
    signs=(("func_name1(",), ("<|python_start|>",)),
    stops=("<|eot|>", "<|eom|>"),
)
