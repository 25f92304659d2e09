"""What every dialect shares: the outcome of parsing, and the walk over a completion.

A parser never raises and takes linear time: text comes from a sampler, and a sampler writes
anything.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turngym.types import FinishReason, Message

__all__ = [
    "THINK_CLOSE",
    "THINK_MARKERS",
    "THINK_OPEN",
    "Attempt",
    "Context",
    "Dialect",
    "ParseError",
    "Parsed",
    "ParsedCall",
    "Reader",
    "RoleTable",
    "Segment",
    "Style",
    "skip_thought",
    "to_message",
    "walk",
]

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """A call that could be read; whether the tool exists is the environment's business."""

    name: str
    arguments: dict[str, Any]
    span: tuple[int, int]
    """Start and end in the parsed text, markup included, in characters."""

    flags: frozenset[str] = frozenset()
    """What had to be forgiven, in the repairing mode: `repaired`, `double_encoded`, `coerced`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseError:
    """A call that could not be read."""

    kind: str
    """`malformed_json`, `malformed_markup`, `truncated`, `extra_data`, `not_an_object`,
    `missing_name`, `missing_arguments`, `arguments_not_object`, `duplicate_key`,
    `non_finite_number`, `invalid_unicode`, `too_deep` or `not_a_literal`."""

    span: tuple[int, int]
    detail: str = ""
    """One sentence the model can act on."""


Attempt = ParsedCall | ParseError


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """One completion, taken apart."""

    text: str
    content: str = ""
    """Visible text, without calls and reasoning, stripped."""

    reasoning: str = ""
    attempts: tuple[Attempt, ...] = ()
    """Calls and failed calls, in the order they were written."""

    flags: frozenset[str] = frozenset()
    """`fabricated_result`: the model wrote a tool result of its own after a call; it and all that
    follows is dropped. `unclosed_reasoning`: the reasoning never ended. Flags of the calls."""

    @property
    def calls(self) -> tuple[ParsedCall, ...]:
        """The calls that could be read."""
        return tuple(a for a in self.attempts if isinstance(a, ParsedCall))

    @property
    def errors(self) -> tuple[ParseError, ...]:
        """The calls that could not."""
        return tuple(a for a in self.attempts if isinstance(a, ParseError))


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a parser may know besides the text."""

    finish_reason: FinishReason = "stop"
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """JSON schema of the parameters, by tool name; dialects without types need it."""

    lenient: bool = False
    in_reasoning: bool = False
    """The prompt ended inside an opened reasoning block."""


Reader = Callable[[int, int], tuple[Sequence[Attempt], int]]
"""`(start of the marker, end of the marker) -> (attempts, where the walk goes on)`; no attempts
means that the text in between is content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """Blanks a template puts around markup; demonstrations are written the same way."""

    think_gap: str = "\n"
    """Inside the reasoning tags, on both sides."""

    think_tail: str = "\n\n"
    """Between reasoning and content."""

    call_lead: str = "\n"
    """Between content and the first call, and between calls."""

    call_gap: str = "\n"
    """Inside the call tags, on both sides."""


Segment = tuple[str, bool]
"""A piece of text, and whether it is markup (True) or text of the action (False)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleTable:
    """Where a completion turns from reasoning to action: states, and the markers that leave them.

    States are `text`, `think`, `header` (both count as reasoning) and `action`.
    """

    markers: Mapping[str, Mapping[str, str]]
    """state -> marker text -> next state."""

    leading: tuple[str, ...] = ()
    """Markers that open an action only as the first thing said."""


THINK_MARKERS = {THINK_OPEN: "think"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One way of writing tool calls."""

    name: str
    parse: Callable[[str, Context], Parsed]
    format: Callable[[Message, Style, bool], list[Segment]]
    """`(action, style, starts inside reasoning) -> segments`, the end token not included."""

    roles: RoleTable
    signs: tuple[tuple[str, ...], ...]
    """Sets of strings that betray the dialect in a chat template; one set must be there whole."""

    stops: tuple[str, ...] = ()
    """Tokens that end a turn whatever the template closes messages with."""

    not_stops: tuple[str, ...] = ()
    """Tokens that close a message of the assistant but not its turn."""

    headers: tuple[str, ...] = ()
    """Stop tokens that open the next message, in templates that close none."""

    end: Callable[[Message], str] | None = None
    """The token that ends this action, where it depends on the action."""


@dataclass(slots=True)
class _Walk:
    """What has been collected so far."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)

    def finish(self, text: str) -> Parsed:
        flags = self.flags.union(*(a.flags for a in self.attempts if isinstance(a, ParsedCall)))
        return Parsed(
            text=text,
            content="".join(self.content).strip().removeprefix("\ufeff"),
            reasoning="\n".join(filter(None, map(str.strip, self.reasoning))),
            attempts=tuple(self.attempts),
            flags=frozenset(flags),
        )


def walk(
    text: str,
    context: Context,
    readers: Mapping[str, Reader],
    *,
    ignored: Sequence[str] = (),
    fabricated: Sequence[str] = (),
) -> Parsed:
    """Walk over a completion from marker to marker.

    Calls inside reasoning are not calls; a closing tag nobody opened makes reasoning of all that
    precedes it (the prompt opened it) unless a block has ended already; reasoning that never ends
    hides what follows.

    Args:
        text: the completion.
        context: see there.
        readers: by opening marker; reads the call behind it and says where to go on.
        ignored: markup that is neither content nor a call.
        fabricated: markers of tool results; after a call the model has no business writing them.
    """
    found = _Walk()
    markers = (*readers, THINK_OPEN, THINK_CLOSE, *ignored, *fabricated)
    pattern = re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))
    position = _reason(text, 0, 0, context, found) if context.in_reasoning else 0
    while match := pattern.search(text, position):
        marker = match.group()
        found.content.append(text[position : match.start()])
        position = match.end()
        if marker in fabricated and found.attempts:
            found.flags.add("fabricated_result")
            return found.finish(text)
        if marker in readers:
            attempts, position = readers[marker](match.start(), match.end())
            found.attempts.extend(attempts)
            if not attempts:
                found.content.append(text[match.start() : position])
        elif marker == THINK_OPEN:
            position = _reason(text, match.start(), match.end(), context, found)
        elif marker == THINK_CLOSE and not found.reasoning:
            found.reasoning.append(text[: match.start()])
            found.content.clear()
            found.attempts.clear()
        elif marker in fabricated:
            found.content.append(marker)
    found.content.append(text[position:])
    return found.finish(text)


def _reason(text: str, start: int, body: int, context: Context, found: _Walk) -> int:
    close = text.find(THINK_CLOSE, body)
    if close >= 0:
        found.reasoning.append(text[body:close])
        return close + len(THINK_CLOSE)
    found.reasoning.append(text[body:])
    found.flags.add("unclosed_reasoning")
    if context.finish_reason == "length":
        span = (start, len(text))
        found.attempts.append(
            ParseError(kind="truncated", span=span, detail="the reply was cut off while reasoning")
        )
    return len(text)


def skip_thought(text: str, context: Context) -> int:
    """Return where a reply begins to speak: behind blanks and a leading reasoning block."""
    start = len(text) - len(text.lstrip("\ufeff \t\r\n"))
    if context.in_reasoning or text.startswith(THINK_OPEN, start):
        close = text.find(THINK_CLOSE, start)
        if close < 0:
            return len(text)
        start = close + len(THINK_CLOSE)
        start = len(text) - len(text[start:].lstrip())
    return start


def to_message(parsed: Parsed) -> Message:
    """Turn a parsed completion into an action.

    Call ids are nine letters and digits (some templates insist) and unique in the message.
    """
    message: Message = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    for index, attempt in enumerate(parsed.attempts):
        if isinstance(attempt, ParsedCall):
            message.setdefault("tool_calls", []).append(
                {
                    "id": f"call{index:05d}",
                    "type": "function",
                    "function": {"name": attempt.name, "arguments": attempt.arguments},
                }
            )
        else:
            start, end = attempt.span
            message.setdefault("invalid_tool_calls", []).append(
                {
                    "text": parsed.text[start:end],
                    "error": attempt.kind,
                    "span": attempt.span,
                    "detail": attempt.detail,
                    "index": index,
                }
            )
    return message
