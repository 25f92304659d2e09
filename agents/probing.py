"""What is found out about a chat template when a renderer is built."""

from collections.abc import Sequence
from typing import Any

from turngym.agents.codec import Codec
from turngym.agents.parsing.common import THINK_CLOSE, THINK_OPEN, Style
from turngym.agents.suffix import SuffixRenderer
from turngym.agents.templating import Template
from turngym.errors import TemplateError

__all__ = [
    "closing_token",
    "find_style",
    "generation_prompt",
    "opens_reasoning",
    "rewrites_history",
    "starts_in_reasoning",
    "takes_json",
]

PlainMessage = dict[str, Any]

_ANSWER = "zqanswerzq"
_THOUGHT = "zqthoughtzq"
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "probe",
            "description": "A tool.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
        },
    }
]


def _user(content: str) -> PlainMessage:
    return {"role": "user", "content": content}


def _say(content: str = _ANSWER, thought: str = "", calls: Sequence[str] = ()) -> PlainMessage:
    message: PlainMessage = {"role": "assistant", "content": content}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            {"id": id_, "type": "function", "function": {"name": "probe", "arguments": {"x": id_}}}
            for id_ in calls
        ]
    return message


def _result(call_id: str, content: str) -> PlainMessage:
    return {"role": "tool", "content": content, "tool_call_id": call_id, "name": "probe"}


def generation_prompt(template: Template) -> str:
    """Return what the template writes to make the assistant speak.

    A template that has no generation prompt gets one: the header it puts before an assistant's
    message. It is stored on the template.

    Raises:
        TemplateError: there is neither.
    """
    frozen = template.with_frozen_clock()
    closed = frozen.render([_user("hello")], None, prompt=False)
    opened = frozen.render([_user("hello")], None, prompt=True)
    if opened != closed:
        return opened.removeprefix(closed)
    answered = frozen.render([_user("hello"), _say()], None, prompt=False)
    header, found, _ = answered.removeprefix(closed).partition(_ANSWER)
    if not found or not header or not answered.startswith(closed):
        raise TemplateError(
            "the chat template writes no generation prompt and no header before the assistant's "
            "message, so the model cannot know that it is its turn; handle add_generation_prompt "
            "in tokenizer.chat_template"
        )
    template.header = header
    return header


def opens_reasoning(prompt: str) -> bool:
    """Tell whether a generation prompt ends inside a reasoning block."""
    return prompt.rfind(THINK_OPEN) > prompt.rfind(THINK_CLOSE)


def starts_in_reasoning(suffixes: SuffixRenderer, prompt: str) -> bool:
    """Tell whether every completion starts inside a reasoning block.

    Some templates open the block behind a user's message but not behind a tool's result; there the
    tag that closes it has to tell.
    """
    if not opens_reasoning(prompt):
        return False
    try:
        suffix = suffixes.render([_result("call00000", "4")], with_tools=True)
    except TemplateError:
        return True
    return opens_reasoning(suffix.rest.text)


def takes_json(template: Template) -> bool:
    """Tell whether a template wants the arguments of calls as JSON text.

    Given an object it then fails, or writes a Python literal.
    """
    dialogue = [_user("hello"), _say("", calls=("call00000",)), _result("call00000", "r")]
    try:
        return "{'x'" in template.render(dialogue, _TOOLS, prompt=False)
    except TemplateError:
        template.takes_json = True
    try:
        template.render(dialogue, _TOOLS, prompt=False)
    except TemplateError:
        return False
    finally:
        template.takes_json = False
    return True


def closing_token(template: Template, codec: Codec) -> str:
    """Return the control token that closes an assistant's message, "" when there is none."""
    frozen = template.with_frozen_clock()
    text = frozen.render([_user("one"), _say(), _user("two")], None, prompt=True)
    start = text.rfind(_ANSWER) + len(_ANSWER)
    tokens = codec.encode(text[start : text.find("two", start)])
    names = {id_: name for name, id_ in codec.control.items()}
    return next((names[id_] for id_ in tokens.ids if id_ in names), "")


def find_style(template: Template) -> Style:
    """Read off the blanks a template puts around reasoning and calls."""
    default = Style()
    said = _say(thought=_THOUGHT, calls=("zq0call00", "zq1call00"))
    dialogue = [_user("hello"), said, _result("zq0call00", "r"), _result("zq1call00", "r")]
    try:
        text = template.render(dialogue, _TOOLS, prompt=False)
    except TemplateError:
        return default
    thought, answer = text.find(_THOUGHT), text.find(_ANSWER)
    style: dict[str, str] = {}
    opened, closed = text.rfind(THINK_OPEN, 0, thought), text.find(THINK_CLOSE, thought)
    if 0 <= opened < thought < closed < answer:
        style["think_gap"] = text[opened + len(THINK_OPEN) : thought]
        style["think_tail"] = text[closed + len(THINK_CLOSE) : answer]
    tag = "<tool_call>"
    first = text.find(tag, answer)
    if 0 <= answer < first:
        style["call_lead"] = text[answer + len(_ANSWER) : first]
        inside = text[first + len(tag) :]
        style["call_gap"] = inside[: len(inside) - len(inside.lstrip())]
    return Style(**style) if all(not value.strip() for value in style.values()) else default


def rewrites_history(template: Template, suffixes: SuffixRenderer, prompt: str) -> bool:
    """Tell whether a template renders earlier turns differently once later messages come.

    Every synthetic dialogue is rendered up to each of the assistant's turns. The context of a turn
    must be the context of the turn before, then something that holds what the assistant said, then
    exactly the suffix that `SuffixRenderer` gives for what the environment said.

    Raises:
        TemplateError: the template refuses every dialogue.
    """
    frozen = template.with_frozen_clock()
    probed = 0
    refusal: TemplateError | None = None
    for dialogue in _dialogues(frozen, prompt):
        try:
            if _is_rewritten(frozen, suffixes, dialogue):
                return True
            probed += 1
        except TemplateError as error:
            refusal = error
    if not probed and refusal is not None:
        raise refusal
    return False


def _is_rewritten(
    template: Template, suffixes: SuffixRenderer, dialogue: list[PlainMessage]
) -> bool:
    tools = _TOOLS if any(m["role"] == "tool" for m in dialogue) else None
    turns = [k for k, message in enumerate(dialogue) if message["role"] == "assistant"]
    contexts = [template.render(dialogue[:k], tools, prompt=True) for k in turns]
    for k, following, context, later in zip(turns, turns[1:], contexts, contexts[1:], strict=False):
        suffix = suffixes.render(dialogue[k + 1 : following], with_tools=tools is not None)
        tail = suffix.end + suffix.rest.text
        if not (later.startswith(context) and later.endswith(tail)):
            return True
        said = later[len(context) : len(later) - len(tail)]
        at_first = template.render(dialogue[: k + 1], tools, prompt=False)[len(context) :]
        if any(word in at_first and word not in said for word in _words(dialogue[k])):
            return True
    return False


def _words(message: PlainMessage) -> list[str]:
    """Return what an assistant's message says."""
    return [_THOUGHT, _ANSWER, *(call["id"] for call in message.get("tool_calls", []))]


def _dialogues(template: Template, prompt: str) -> list[list[PlainMessage]]:
    """Return the dialogues to probe with, the assistant's reasoning written where it shows."""
    shown = template.render([_user("q"), _say(thought=_THOUGHT)], None, prompt=False)
    prefilled = prompt[prompt.rfind(THINK_OPEN) :] if opens_reasoning(prompt) else ""

    def think(calls: Sequence[str] = ()) -> PlainMessage:
        if _THOUGHT in shown:
            return _say(thought=_THOUGHT, calls=calls)
        opening = prefilled or f"{THINK_OPEN}\n"
        return _say(f"{opening}{_THOUGHT}\n{THINK_CLOSE}\n\n{_ANSWER}", calls=calls)

    plain = think if prefilled else _say
    return [
        [_user("q"), think(), _user("q2"), think(), _user("q3"), plain()],
        [
            *({"role": "system", "content": "rules"}, _user("q")),
            *(plain(), _user("und nun? 漢字 🙂"), think(), _user("q3"), plain()),
        ],
        [
            _user("q"),
            think(("call00000",)),
            _result("call00000", "4"),
            plain(),
            _user("q2"),
            plain(),
        ],
        [
            *(_user("q"), think(("call00000", "call00001"))),
            *(_result("call00000", '{"é": "漢 🙂"}'), _result("call00001", "two\nlines")),
            *(think(("call00000",)), _result("call00000", ""), plain(), _user("q2"), plain()),
        ],
    ]
