"""A JSON reader that knows where it stopped, and why.

The standard reader accepts duplicate keys, NaN, infinities and lone surrogates, recurses, and does
not tell a text that breaks off from one that is wrong. This one is iterative and linear; it reads
strict JSON, Python literals, or anything close to JSON (the repairing mode).
"""

import json
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["MAX_DEPTH", "MAX_DIGITS", "Scan", "scan_value", "skip_space"]

MAX_DEPTH = 128
"""Deepest nesting accepted: what is read here is later copied and rendered recursively."""

MAX_DIGITS = 4000
"""Longest number accepted: Python refuses to convert integers much longer than this."""

Grammar = Literal["json", "python", "lenient"]

_SPACE = re.compile(r"[ \t\n\r]*+")
_PUNCTUATION = r"(?P<punctuation>[{}\[\]:,])"
_NUMBER = r"(?P<number>-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?)(?![\w.])"
_JSON_STRING = r'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+'
_LOOSE_STRING = r"\"(?:[^\"\\]++|\\(?s:.))*+|'(?:[^'\\]++|\\(?s:.))*+"
_LINE_STRING = r"\"(?:[^\"\\\n]++|\\(?s:.))*+|'(?:[^'\\\n]++|\\(?s:.))*+"
_WORDS: dict[Grammar, dict[str, Any]] = {
    "json": {"true": True, "false": False, "null": None},
    "python": {"True": True, "False": False, "None": None},
}
_WORDS["lenient"] = _WORDS["json"] | _WORDS["python"]
_STRINGS: dict[Grammar, str] = {
    "json": _JSON_STRING,
    "python": _LINE_STRING,
    "lenient": _LOOSE_STRING,
}
_TOKENS: dict[Grammar, re.Pattern[str]] = {
    grammar: re.compile(
        rf"(?:{_PUNCTUATION}|(?P<string>(?:{string})[\"'])|{_NUMBER}"
        rf"|(?P<word>{'|'.join(_WORDS[grammar])})(?!\w))"
    )
    for grammar, string in _STRINGS.items()
}
_UNFINISHED: dict[Grammar, re.Pattern[str]] = {
    grammar: re.compile(rf"(?:(?:{string})(?:\\(?:u[0-9a-fA-F]{{0,3}})?)?|[-+.\w]++|)\Z")
    for grammar, string in _STRINGS.items()
}
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|(?s:(.)))")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "/": "/", "\n": "", "0": "\0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What was read."""

    value: Any = None
    end: int
    """One past the value; where reading stopped when the text is malformed."""

    error: str | None = None
    """`malformed_json` when the text is not of the grammar; `duplicate_key`, `too_deep`,
    `non_finite_number` or `invalid_unicode` when it is, but the value cannot be used."""

    at_end: bool = False
    """Malformed only because the text breaks off."""

    resume: int = 0
    """Where markup may be looked for after an error: text before it was well-formed data."""

    @property
    def is_complete(self) -> bool:
        """The text is of the grammar, so `end` is the end of the value."""
        return self.error != "malformed_json"


def skip_space(text: str, position: int) -> int:
    """Return the position of the next character that is not a blank."""
    match = _SPACE.match(text, position)
    return match.end() if match else position


class _Scanner:
    """State of one scan: a stack of open containers and what may come next."""

    def __init__(self, text: str, grammar: Grammar) -> None:
        self.text = text
        self.grammar = grammar
        self.flaw: str | None = None
        self.stack: list[Any] = []
        self.keys: list[str | None] = []
        self.root: Any = None

    def note(self, flaw: str) -> None:
        """Keep the first reason why a well-formed value cannot be used."""
        self.flaw = self.flaw or flaw

    def add(self, value: Any) -> None:
        """Put a value into the innermost open container."""
        if not self.stack:
            self.root = value
        elif isinstance(self.stack[-1], list):
            self.stack[-1].append(value)
        else:
            key = self.keys[-1]
            if key in self.stack[-1] and self.grammar != "lenient":
                self.note("duplicate_key")
            self.stack[-1][key] = value

    def open(self, container: dict[str, Any] | list[Any]) -> None:
        """Start an object or array."""
        self.add(container)
        self.stack.append(container)
        self.keys.append(None)
        if len(self.stack) > MAX_DEPTH:
            self.note("too_deep")

    def close(self) -> str:
        """End the innermost container; return what may come next."""
        self.stack.pop()
        self.keys.pop()
        return "after" if self.stack else "done"

    def string(self, token: str) -> str:
        """Decode a string token, quotes included."""
        if self.grammar == "json":
            value: str = json.loads(token) if "\\" in token else token[1:-1]
        else:
            value = _ESCAPE.sub(_unescape, token[1:-1])
        try:
            value.encode()
        except UnicodeEncodeError:
            # Outside JSON an escaped pair of surrogates has not been joined yet.
            value = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            if self.grammar == "json" or "\ufffd" in value:
                self.note("invalid_unicode")
        return value

    def number(self, token: str) -> int | float:
        """Decode a number, every digit of an integer kept."""
        if len(token) > MAX_DIGITS:
            self.note("non_finite_number")
            return 0
        if token.lstrip("-").isdigit():
            return int(token)
        value = float(token)
        if math.isinf(value):
            self.note("non_finite_number")
        return value


def _unescape(match: re.Match[str]) -> str:
    code = match[1] or match[2] or match[3]
    if code:
        return chr(int(code, 16)) if int(code, 16) <= 0x10FFFF else match[0]
    return _ESCAPED.get(match[4], match[4] if match[4] in "\\'\"" else match[0])


def scan_value(text: str, position: int = 0, *, grammar: Grammar = "json") -> Scan:
    """Read one value.

    Args:
        text: where to read.
        position: where the value, or blanks before it, begins.
        grammar: `json` (RFC 8259), `python` (literals: strings on one line, numbers, True, False,
            None, lists, dicts) or `lenient` (either, with raw line breaks in strings, trailing
            commas, and containers that the end of the text closes).
    """
    scanner = _Scanner(text, grammar)
    expect = "value"
    string_start: int | None = None
    while expect != "done":
        position = skip_space(text, position)
        match = _TOKENS[grammar].match(text, position)
        after = _step(scanner, expect, match) if match else None
        if match is None or after is None:
            if grammar == "lenient" and position == len(text) and expect == "after":
                return Scan(value=scanner.root, end=position, error=scanner.flaw)
            # A string that lost its quote runs over markup to the next quote, and the error shows
            # up just behind it: look for markup from where that string began.
            return Scan(
                end=position,
                error="malformed_json",
                at_end=_UNFINISHED[grammar].match(text, position) is not None,
                resume=position if string_start is None else string_start,
            )
        string_start = position if match["string"] is not None else None
        position = match.end()
        expect = after
    return Scan(value=scanner.root, end=position, error=scanner.flaw, resume=position)


def _step(scanner: _Scanner, expect: str, match: re.Match[str]) -> str | None:
    """Take one token; return what may come next, None when it may not come here."""
    mark = match["punctuation"]
    if expect in ("value", "item"):
        return _value(scanner, expect, match)
    if expect in ("key", "first_key"):
        if match["string"] is not None:
            scanner.keys[-1] = scanner.string(match["string"])
            return "colon"
        may_close = expect == "first_key" or scanner.grammar != "json"
        return scanner.close() if mark == "}" and may_close else None
    if expect == "colon":
        return "value" if mark == ":" else None
    in_list = isinstance(scanner.stack[-1], list)
    if mark == ",":
        return "item" if in_list and scanner.grammar != "json" else "value" if in_list else "key"
    return scanner.close() if mark == ("]" if in_list else "}") else None


def _value(scanner: _Scanner, expect: str, match: re.Match[str]) -> str | None:
    mark = match["punctuation"]
    if mark == "{":
        scanner.open({})
        return "first_key"
    if mark == "[":
        scanner.open([])
        return "item"
    if mark == "]" and expect == "item":
        return scanner.close()
    if mark is not None:
        return None
    if match["string"] is not None:
        scanner.add(scanner.string(match["string"]))
    elif match["number"] is not None:
        scanner.add(scanner.number(match["number"]))
    else:
        scanner.add(_WORDS[scanner.grammar][match["word"]])
    return "after" if scanner.stack else "done"
