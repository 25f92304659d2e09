"""Tool-call dialects: text of one completion in, an action out (and back).

    >>> parsed = parse('<tool_call>{"name": "now", "arguments": {}}</tool_call>', "hermes")
    >>> parsed.calls[0].name
    'now'

Nothing here raises on what a model wrote: a call that cannot be read becomes a `ParseError` with
its kind and span.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from turngym.agents.parsing.code_block import PYTHON_CODE_BLOCK
from turngym.agents.parsing.common import (
    Attempt,
    Context,
    Dialect,
    Parsed,
    ParsedCall,
    ParseError,
    Style,
    to_message,
)
from turngym.agents.parsing.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from turngym.agents.parsing.glm45 import GLM45
from turngym.agents.parsing.harmony import HARMONY
from turngym.agents.parsing.hermes import HERMES
from turngym.agents.parsing.llama3_json import LLAMA3_JSON
from turngym.agents.parsing.mistral import MISTRAL
from turngym.agents.parsing.pythonic import PYTHONIC
from turngym.agents.parsing.qwen3_xml import QWEN3_XML
from turngym.errors import ConfigError
from turngym.types import FinishReason, Message

__all__ = [
    "DIALECTS",
    "Attempt",
    "Dialect",
    "ParseError",
    "Parsed",
    "ParsedCall",
    "Style",
    "dialect_of",
    "get_dialect",
    "parse",
    "parse_action",
    "to_message",
]

DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        HARMONY,
        DEEPSEEK_V3,
        DEEPSEEK_V31,
        GLM45,
        QWEN3_XML,
        HERMES,
        MISTRAL,
        PYTHONIC,
        LLAMA3_JSON,
        PYTHON_CODE_BLOCK,
    )
}
"""By name, in the order in which templates are searched for their signs."""


def get_dialect(name: str) -> Dialect:
    """Return a dialect by name.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in DIALECTS:
        raise ConfigError(f"dialect must be one of {', '.join(DIALECTS)}; got {name!r}")
    return DIALECTS[name]


def dialect_of(template: str) -> str:
    """Tell the dialect from a chat template, by the markup it writes.

    A template that writes no calls at all says nothing; `hermes` is taken, the most common one.
    """
    for dialect in DIALECTS.values():
        if any(all(sign in template for sign in signs) for signs in dialect.signs):
            return dialect.name
    return HERMES.name


def parse(
    text: str,
    dialect: str,
    *,
    finish_reason: FinishReason = "stop",
    tools: Iterable[Mapping[str, Any]] | None = None,
    role: str = "assistant",
    lenient: bool = False,
    in_reasoning: bool = False,
) -> Parsed:
    """Take one completion apart. Never raises on the text; linear in its length.

    Args:
        text: the completion, decoded, without the token that ended it.
        dialect: name of the dialect.
        finish_reason: `length` makes calls that are not closed `truncated`.
        tools: JSON schemas in OpenAI's shape (or bare functions); dialects that write values
            without types (`qwen3_xml`, `glm45`) need them to tell the string "3" from the number.
        role: who wrote the text; only an assistant can call.
        lenient: repair what can be repaired, and flag it. Training should leave this off: a model
            that is forgiven learns to be sloppy.
        in_reasoning: the prompt ended inside an opened reasoning block.

    Raises:
        ConfigError: there is no such dialect.
    """
    chosen = get_dialect(dialect)
    if role != "assistant":
        return Parsed(text=text, content=text)
    context = Context(
        finish_reason=finish_reason,
        parameters=_parameters(tools or ()),
        lenient=lenient,
        in_reasoning=in_reasoning,
    )
    return chosen.parse(text, context)


def parse_action(
    text: str, dialect: str = "hermes", *, tools: Iterable[Mapping[str, Any]] | None = None
) -> Message:
    """Read an assistant's text as an action, for environments driven by plain text."""
    return to_message(parse(text, dialect, tools=tools))


def _parameters(tools: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    functions = [tool.get("function", tool) for tool in tools]
    return {function["name"]: function.get("parameters") or {} for function in functions}
