"""What a template writes between two completions, found as the difference of renderings.

New messages are never rendered alone (some templates refuse that): they are rendered behind a dummy
user and a dummy assistant message, and cut where the dummy's text ends. The result depends on the
kinds of the messages only, so the scaffold is kept and later messages are put into it, unless the
template does something to their text.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from turngym.agents.codec import Codec, Span
from turngym.agents.parsing.calls import dump
from turngym.agents.templating import Rendered, Template, fresh_mark
from turngym.errors import TemplateError

__all__ = ["Suffix", "SuffixRenderer"]

PlainMessage = Mapping[str, Any]
Shape = tuple[tuple[str, ...], ...]
Marks = Mapping[tuple[int, str], str]

_FIELDS = ("content", "name", "tool_call_id")
_NASTY = (
    "", " ", "plain words", " padded \n", "two\n\nlines", 'say "hi" \\ {"a": [1, null]}',
    "é 漢字 🙂", "<b>&amp;</b>", "<think>x</think>y", "<tool_response>z</tool_response>", "0",
)  # fmt: skip
_TOOL = {
    "type": "function",
    "function": {
        "name": "tool",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Suffix:
    """Text that follows a completion."""

    end: str
    """The control token that ends the assistant's turn, "" when the template has none."""

    rest: Rendered
    """All that follows it, generation prompt included."""


@dataclass(frozen=True, slots=True)
class _Scaffold:
    """The template's own text around the fields of some messages."""

    end: str
    pieces: tuple[str, ...]
    fields: tuple[tuple[int, str], ...]
    """Message index and field that stands between two pieces."""

    transform: Callable[[str], str]
    """What the template does to the fields."""

    def fill(self, messages: Sequence[PlainMessage]) -> Suffix:
        text = self.pieces[0]
        outside: list[Span] = []
        for (index, field), piece in zip(self.fields, self.pieces[1:], strict=True):
            value = self.transform(messages[index][field])
            outside.append((len(text), len(text) + len(value)))
            text += value + piece
        return Suffix(end=self.end, rest=Rendered(text, outside))


def _escaped(text: str) -> str:
    return dump(text)[1:-1]


_TRANSFORMS = (str, str.strip, _escaped)


class SuffixRenderer:
    """Renders what follows a completion.

    Args:
        template: the chat template.
        codec: the tokenizer.
        stops: texts of tokens that end a turn.
    """

    def __init__(self, template: Template, codec: Codec, stops: Sequence[str]) -> None:
        self._template = template
        self._codec = codec
        self._stops = tuple(stops)
        self._find = lru_cache(maxsize=256)(self._find_shape)

    def render(self, new: Sequence[PlainMessage], *, with_tools: bool) -> Suffix:
        """Render the suffix for new messages.

        Args:
            new: what the environment said.
            with_tools: the dialogue offers tools.

        Raises:
            TemplateError: the template refuses the messages whatever precedes them, or drops their
                text.
        """
        shape = tuple((m["role"], *(f for f in _FIELDS if f in m)) for m in new)
        context, scaffold = self._find(shape, with_tools)
        is_text = all(isinstance(m[f], str) for m in new for f in _FIELDS if f in m)
        if scaffold is not None and is_text:
            return scaffold.fill(new)
        return self._render(new, context, with_tools)

    def _find_shape(self, shape: Shape, with_tools: bool) -> tuple[int, _Scaffold | None]:
        """Return the context that messages of a shape need, and the scaffold around them.

        There is no scaffold when the template does to their text what no transform explains.
        """
        marks = {
            (index, field): f"zq{index}{field[0]}{'x' * (6 - len(str(index)))}"
            for index, (_, *fields) in enumerate(shape)
            for field in fields
        }
        refusals: list[TemplateError] = []
        contexts = len(self._contexts(_filled(shape, marks)))
        for context in range(contexts):
            try:
                suffix = self._render(_filled(shape, marks), context, with_tools)
            except TemplateError as error:
                refusals.append(error)
                continue
            contents = [mark for (_, field), mark in marks.items() if field == "content"]
            if all(mark in suffix.rest.text for mark in contents):
                return context, self._find_scaffold(suffix, shape, marks, context, with_tools)
        if len(refusals) == contexts:
            raise refusals[0]
        roles = ", ".join(role for role, *_ in shape)
        raise TemplateError(
            f"the chat template drops the text of messages ({roles}) that follow the assistant's; "
            "use a template that shows them"
        )

    def _find_scaffold(
        self, suffix: Suffix, shape: Shape, marks: Marks, context: int, with_tools: bool
    ) -> _Scaffold | None:
        text = suffix.rest.text
        found = sorted((text.find(mark), key) for key, mark in marks.items() if mark in text)
        if any(text.count(mark) > 1 for mark in marks.values()):
            return None
        pieces: list[str] = []
        position = 0
        for start, key in found:
            pieces.append(text[position:start])
            position = start + len(marks[key])
        pieces.append(text[position:])
        keys = tuple(key for _, key in found)
        trials = [
            _filled(shape, {k: nasty if k[1] == "content" else mark for k, mark in marks.items()})
            for nasty in (*_NASTY, *self._control_words())
        ]
        try:
            actual = [self._render(trial, context, with_tools) for trial in trials]
        except TemplateError:
            return None
        for transform in _TRANSFORMS:
            scaffold = _Scaffold(suffix.end, tuple(pieces), keys, transform)
            expected = [scaffold.fill(trial) for trial in trials]
            if [(s.end, s.rest.text) for s in actual] == [(s.end, s.rest.text) for s in expected]:
                return scaffold
        return None

    def _control_words(self) -> list[str]:
        """Control texts a template might look for, and all others in one string."""
        named = [text for text in self._codec.control if text in self._template.source]
        return [*named, "".join(self._codec.control)]

    def _render(self, new: Sequence[PlainMessage], context: int, with_tools: bool) -> Suffix:
        """Render messages behind one of the contexts.

        Raises:
            TemplateError: the template refuses the dialogue, or it cannot be cut.
        """
        before = self._contexts(new)[context]
        anchor = fresh_mark(repr(new))
        dialogue = [*(_anchored(message, anchor) for message in before), *new]
        rendered = self._template.render_marked(
            dialogue, [_TOOL] if with_tools else None, prompt=True
        )
        return self._cut(rendered, anchor, has_calls="tool_calls" in before[-1])

    def _contexts(self, new: Sequence[PlainMessage]) -> list[list[dict[str, Any]]]:
        """Return dialogues that may precede the messages, the most natural one first."""
        user = {"role": "user", "content": "question"}
        says = {"role": "assistant", "content": "@"}
        results = [message for message in new if message["role"] == "tool"]
        calls = [
            {
                "id": message.get("tool_call_id", "call00000"),
                "type": "function",
                "function": {"name": message.get("name", "tool"), "arguments": {"x": "@"}},
            }
            for message in results
        ]
        acts = [says | {"tool_calls": calls}, says | {"content": "", "tool_calls": calls}]
        system = {"role": "system", "content": "rules"}
        return [
            [*before, message]
            for before in ([user], [system, user])
            for message in (*(acts if calls else ()), says)
        ]

    def _cut(self, rendered: Rendered, anchor: str, *, has_calls: bool) -> Suffix:
        """Cut a dialogue behind the dummy's text and the token that ends its turn."""
        anchored = rendered.text.rfind(anchor)
        start = anchored + len(anchor)
        ends = [(at, stop) for stop in self._stops if (at := rendered.text.find(stop, start)) >= 0]
        limit = min((a for a, _ in rendered.outside if a >= start), default=len(rendered.text))
        if anchored >= 0 and ends and min(ends)[0] < limit:
            at, end = min(ends, key=lambda found: (found[0], -len(found[1])))
            start = at + len(end)
        elif anchored < 0 or has_calls:
            raise TemplateError(
                "cannot tell where the chat template ends the assistant's message; it must write "
                "the message's content and end it with a token of the vocabulary"
            )
        else:
            end = ""
        outside = [(a - start, b - start) for a, b in rendered.outside if a >= start]
        return Suffix(end=end, rest=Rendered(rendered.text[start:], outside))


def _filled(shape: Shape, values: Marks) -> list[PlainMessage]:
    return [
        {"role": role, **{field: values[index, field] for field in fields}}
        for index, (role, *fields) in enumerate(shape)
    ]


def _anchored(message: dict[str, Any], anchor: str) -> dict[str, Any]:
    if message["role"] != "assistant":
        return message
    calls = [
        call | {"function": call["function"] | {"arguments": {"x": anchor}}}
        for call in message.get("tool_calls", [])
    ]
    content = message["content"].replace("@", anchor)
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
