"""Rendering a chat template without losing track of which text came from outside.

The template's own text (scaffold) and the text of messages and tools are told apart by rendering
twice: once as is, once with unique marks around every string from outside. Where both renderings
agree but for the marks, the marks say exactly which spans came from outside, whatever the template
did to the strings in between (escaping, JSON). A template whose logic looks at a string's edges may
render otherwise with marks; then only strings that spell a control token are broken up.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from turngym.agents.codec import Span
from turngym.agents.parsing.calls import dump
from turngym.errors import TemplateError

__all__ = ["Rendered", "Template", "fresh_mark"]

Tool = Mapping[str, Any]

_FROZEN_CLOCK = "{%- macro strftime_now(format) -%}26 Jul 2024{%- endmacro +%}"


class Rendered(NamedTuple):
    """A rendered dialogue."""

    text: str
    outside: list[Span]
    """Spans that came from messages or tools, in order, not overlapping."""


def fresh_mark(text: str) -> str:
    """Return a short word of letters and digits that does not occur in a text."""
    number = 0
    while (mark := f"zq{number}k") in text:
        number += 1
    return mark


class Template:
    """The chat template of a tokenizer.

    Args:
        tokenizer: Hugging Face tokenizer.
        kwargs: extra variables of the template (`enable_thinking`, ...).
        control: texts of the control tokens.

    Raises:
        TemplateError: the tokenizer has no chat template.
    """

    def __init__(
        self, tokenizer: Any, kwargs: Mapping[str, Any], control: Sequence[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs)
        self._control = re.compile(
            "|".join(map(re.escape, sorted(control, key=len, reverse=True))) or r"(?!)"
        )
        try:
            self.source: str = tokenizer.get_chat_template(tools=[{"name": "tool"}])
        except (ValueError, AttributeError) as error:
            raise TemplateError(
                "the tokenizer has no chat template; set tokenizer.chat_template to a Jinja "
                f"template that writes messages as the model was trained on them ({error})"
            ) from error
        self.header = ""
        """Opens the assistant's message where the template has no generation prompt."""

        self.takes_json = False
        """The template wants the arguments of calls as JSON text."""

    def with_frozen_clock(self) -> "Template":
        """Return the same template with `strftime_now` standing still, to compare renderings."""
        if "strftime_now" not in self.source:
            return self
        twin = Template(self._tokenizer, self._kwargs)
        twin._kwargs["chat_template"] = _FROZEN_CLOCK + self.source
        twin.header = self.header
        twin.takes_json = self.takes_json
        twin._control = self._control
        return twin

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] | None, *, prompt: bool
    ) -> str:
        """Render a dialogue; with `prompt` the assistant is about to speak.

        Raises:
            TemplateError: the template refuses the dialogue.
        """
        import jinja2

        dialogue = [_with_json(m) for m in messages] if self.takes_json else list(messages)
        try:
            text: str = self._tokenizer.apply_chat_template(
                dialogue,
                tools=list(tools) if tools else None,
                add_generation_prompt=prompt,
                tokenize=False,
                **self._kwargs,
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError, IndexError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise TemplateError(
                f"the chat template refuses the dialogue ({roles}): {error}"
            ) from error
        return text + self.header if prompt else text

    def render_marked(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] | None, *, prompt: bool
    ) -> Rendered:
        """Render a dialogue and say which spans of the text came from outside."""
        plain = self.render(messages, tools, prompt=prompt)
        mark = fresh_mark(plain)
        for marker in (_Edges(mark, self._control), _Breaks(mark, self._control)):
            marked = [marker.message(message) for message in messages]
            schemas = [marker.tree(tool) for tool in tools] if tools else None
            is_last_resort = isinstance(marker, _Breaks)
            try:
                rendered = marker.read(self.render(marked, schemas, prompt=prompt))
            except TemplateError:
                if is_last_resort:
                    raise
                continue
            # Broken-up control strings may steer the template otherwise than whole ones: its answer
            # to the broken ones stands, for it cannot be forged.
            if rendered is not None and (rendered.text == plain or is_last_resort):
                return rendered
        raise AssertionError("the last marker always returns or raises")


def _with_json(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Write the arguments of a message's calls as JSON."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        calls.append({**call, "function": {**function, "arguments": dump(function["arguments"])}})
    return {**message, "tool_calls": calls}


class _Marker(ABC):
    """Puts marks into the strings from outside."""

    def __init__(self, mark: str, control: re.Pattern[str]) -> None:
        self.mark = mark
        self.control = control

    @abstractmethod
    def string(self, text: str) -> str:
        """Mark one string."""

    @abstractmethod
    def read(self, text: str) -> Rendered | None:
        """Take the marks out of a rendering; None when they do not make sense."""

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Mark a message; its role is never from outside."""
        return {key: value if key == "role" else self.tree(value) for key, value in message.items()}

    def tree(self, value: Any, key: str = "") -> Any:
        """Mark every string of a JSON value, keys included where they are data.

        Schema words (`type`) steer templates, so they are left alone unless they are forged.
        """
        if isinstance(value, str):
            return value if key == "type" and not self.control.search(value) else self.string(value)
        if isinstance(value, Mapping):
            is_data = key in ("arguments", "properties")
            return {
                (self.string(name) if is_data or self.control.search(name) else name): self.tree(
                    item, "" if is_data else name
                )
                for name, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.tree(item, key) for item in value]
        return value


class _Edges(_Marker):
    """Marks both edges of a string, inside its outer blanks so that trimming does not matter."""

    def __init__(self, mark: str, control: re.Pattern[str]) -> None:
        super().__init__(mark, control)
        self.pattern = re.compile(f"{mark}([se])")

    def string(self, text: str) -> str:
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        end = start + len(core)
        return f"{text[:start]}{self.mark}s{core}{self.mark}e{text[end:]}"

    def read(self, text: str) -> Rendered | None:
        """Take the marks out; None when they do not pair up."""
        pieces: list[str] = []
        spans: list[Span] = []
        length = position = 0
        opened: int | None = None
        for match in self.pattern.finditer(text):
            pieces.append(text[position : match.start()])
            length += match.start() - position
            position = match.end()
            if (match[1] == "s") != (opened is None):
                return None
            if opened is None:
                opened = length
            else:
                spans.append((opened, length))
                opened = None
        pieces.append(text[position:])
        return None if opened is not None else Rendered("".join(pieces), spans)


class _Breaks(_Marker):
    """Puts a mark behind the first character of every control string and nowhere else."""

    def string(self, text: str) -> str:
        return self.control.sub(lambda match: match[0][0] + self.mark + match[0][1:], text)

    def read(self, text: str) -> Rendered:
        """Take the marks out; the outside is one character on each side of a mark."""
        first, *rest = text.split(self.mark)
        spans: list[Span] = []
        length = len(first)
        for piece in rest:
            spans.append((max(length - 1, spans[-1][1] if spans else 0), length + 1))
            length += len(piece)
        return Rendered("".join((first, *rest)), spans)
