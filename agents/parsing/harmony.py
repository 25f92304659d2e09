"""Harmony (gpt-oss): messages with a header; a call is a message addressed to a function."""

import re
from typing import Any

from turngym.agents.parsing.calls import dump, failure, make_call, repair
from turngym.agents.parsing.common import (
    Attempt,
    Context,
    Dialect,
    Parsed,
    ParsedCall,
    ParseError,
    RoleTable,
    Segment,
    Style,
)
from turngym.agents.parsing.jsonscan import scan_value, skip_space
from turngym.agents.parsing.writing import attempts_of, content_of
from turngym.types import FunctionCall, Message

__all__ = ["HARMONY"]

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_DELIMITER = re.compile(r"<\|(?:end|call|return|start)\|>")
_BODY = re.compile(r"<\|(?:message|end|call|return|start)\|>")
_HEADER = re.compile(
    r"\s*+(?:assistant\b\s*+)?(?:to=(?P<early>[^\s<]++)\s*+)?"
    r"(?:<\|channel\|>\s*+(?P<channel>analysis|commentary|final)\b\s*+)?"
    r"(?:to=(?P<to>[^\s<]++)\s*+)?(?:<\|constrain\|>\s*+)?(?:\w++\s*+)?"
)
_FOREIGN = re.compile(r"\s*+(?!assistant\b)[\w.]")


class _Reply:
    """The messages of one completion, collected."""

    def __init__(self, text: str, context: Context) -> None:
        self.text = text
        self.context = context
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.attempts: list[Attempt] = []
        self.flags: set[str] = set()

    def read(self, start: int, position: int) -> int:
        """Read the message whose header begins at a position; return where it ends."""
        text = self.text
        stop = _BODY.search(text, position)
        if stop is None:
            self._cut_off(start, text[position:])
            return len(text)
        header = _HEADER.fullmatch(text, position, stop.start())
        if stop.group() != MESSAGE or header is None:
            end = _DELIMITER.search(text, stop.start())
            at = end.start() if end else len(text)
            self.attempts.append(failure("malformed_markup", (start, at)))
            return at
        recipient = header["to"] or header["early"]
        if recipient:
            return self._call(start, stop.end(), recipient.removeprefix("functions."))
        end = _DELIMITER.search(text, stop.end())
        at = end.start() if end else len(text)
        is_reasoning = header["channel"] == "analysis"
        (self.reasoning if is_reasoning else self.content).append(text[stop.end() : at])
        if is_reasoning and end is None:
            self.flags.add("unclosed_reasoning")
            if self.context.finish_reason == "length":
                self.attempts.append(failure("truncated", (start, at)))
        return at

    def _cut_off(self, start: int, header: str) -> None:
        if "to=" in header:
            self.attempts.append(failure("truncated", (start, len(self.text))))

    def _call(self, start: int, body: int, name: str) -> int:
        scan = scan_value(self.text, body)
        after = skip_space(self.text, scan.end)
        delimiter = _DELIMITER.search(self.text, scan.end if scan.is_complete else scan.resume)
        end = delimiter.start() if delimiter else len(self.text)
        span = (start, delimiter.end() if delimiter and delimiter.group() != START else end)
        if scan.error is None and after == end:
            value: Any = {"name": name, "arguments": scan.value}
            self.attempts.append(make_call(value, span, self.context))
            return end
        is_cut = scan.at_end and delimiter is None
        kind = "truncated" if is_cut else scan.error or "extra_data"
        self.attempts.append(self._mend(self.text[body:end], name, failure(kind, span)))
        return end

    def _mend(self, body: str, name: str, error: ParseError) -> Attempt:
        for value in repair(body) if self.context.lenient and error.kind != "truncated" else ():
            attempt = make_call({"name": name, "arguments": value}, error.span, self.context)
            if isinstance(attempt, ParsedCall):
                return attempt
        return error


def parse(text: str, context: Context) -> Parsed:
    """Parse a completion. It begins inside the assistant's header; plain text is content."""
    if MESSAGE not in text and CHANNEL not in text:
        return Parsed(text=text, content=_DELIMITER.sub("", text).strip())
    reply = _Reply(text, context)
    start = position = skip_space(text, 0)
    while position < len(text):
        if text.startswith(START, position):
            position += len(START)
            if _FOREIGN.match(text, position):
                reply.flags |= {"fabricated_result"} if reply.attempts else set()
                break
        position = reply.read(start, position)
        delimiter = _DELIMITER.match(text, position)
        if delimiter and delimiter.group() != START:
            position = delimiter.end()
        start = position = skip_space(text, position)
    return Parsed(
        text=text,
        content="\n".join(part.strip() for part in reply.content if part.strip()),
        reasoning="\n".join(part.strip() for part in reply.reasoning if part.strip()),
        attempts=tuple(reply.attempts),
        flags=frozenset(reply.flags).union(
            *(a.flags for a in reply.attempts if isinstance(a, ParsedCall))
        ),
    )


def write(action: Message, style: Style, in_reasoning: bool) -> list[Segment]:
    """Write an action as messages; the last one is left open for its end token."""
    attempts = attempts_of(action)
    content = content_of(action)
    messages: list[tuple[list[Segment], str]] = []
    if reasoning := action.get("reasoning_content", ""):
        messages.append(([(f"{CHANNEL}analysis{MESSAGE}", True), (reasoning, False)], END))
    if content or not attempts:
        channel = "commentary" if attempts else "final"
        messages.append(([(f"{CHANNEL}{channel}{MESSAGE}", True), (content, False)], END))
    for call in attempts:
        name, body = ("invalid", call) if isinstance(call, str) else _name_and_body(call)
        header = [(f"{CHANNEL}commentary to=functions.", True), (name, False)]
        header += [(f" <|constrain|>json{MESSAGE}", True), (body, False)]
        messages.append((header, CALL))
    segments: list[Segment] = []
    for index, (message, closing) in enumerate(messages):
        segments += message
        if index + 1 < len(messages):
            segments.append((f"{closing}{START}assistant", True))
    return segments


def _name_and_body(call: FunctionCall) -> tuple[str, str]:
    return call["name"], dump(call["arguments"])


def end_of(action: Message) -> str:
    """Return the token that ends an action."""
    return CALL if attempts_of(action) else RETURN


HARMONY = Dialect(
    name="harmony",
    parse=parse,
    format=write,
    roles=RoleTable(
        markers={
            "text": {CHANNEL: "header", START: "header"},
            "header": {"to=": "action", MESSAGE: "text"},
            "action": {CALL: "text", END: "text"},
        },
        leading=("to=",),
    ),
    signs=((CHANNEL,),),
    stops=(RETURN, CALL),
    not_stops=(END,),
    end=end_of,
)
