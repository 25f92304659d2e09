"""What the tagged dialects without JSON share: where things end, and what type a value has."""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from turngym.agents.parsing.calls import coerce_arguments, failure
from turngym.agents.parsing.common import Attempt, Context, ParsedCall
from turngym.agents.parsing.jsonscan import scan_value, skip_space

__all__ = ["Positions", "typed_call", "untyped"]


class Positions:
    """All matches of a pattern in a text, found once, so that looking ahead stays cheap.

    Args:
        pattern: what to look for.
        text: where.
    """

    def __init__(self, pattern: re.Pattern[str], text: str) -> None:
        self._matches = list(pattern.finditer(text))
        self._starts = [match.start() for match in self._matches]

    def after(self, position: int) -> re.Match[str] | None:
        """Return the first match that starts at a position or later."""
        index = bisect_left(self._starts, position)
        return self._matches[index] if index < len(self._matches) else None


def typed_call(
    name: str,
    parameters: Sequence[tuple[str, str]],
    span: tuple[int, int],
    context: Context,
    flags: frozenset[str] = frozenset(),
) -> Attempt:
    """Make a call of a name and of parameters written without types, in order."""
    raw = dict(parameters)
    if len(raw) < len(parameters) and not context.lenient:
        return failure("duplicate_key", span)
    schema = context.parameters.get(name)
    arguments, coerced = _typed_arguments(raw, schema, lenient=context.lenient)
    if coerced:
        flags |= {"coerced"}
    return ParsedCall(name=name, arguments=arguments, span=span, flags=flags)


def _typed_arguments(
    raw: Mapping[str, str], schema: Mapping[str, Any] | None, *, lenient: bool
) -> tuple[dict[str, Any], bool]:
    """Read values that were written without types.

    A string parameter takes its text as it is; any other is JSON, and stays text when it is not,
    so that validation reports the mismatch. Without a declared type, JSON is read if it is JSON.

    Args:
        raw: texts by parameter.
        schema: JSON schema of the parameters, None for an unknown tool.
        lenient: read Python literals too.

    Returns:
        The arguments, and whether anything was repaired.
    """
    properties = (schema or {}).get("properties", {})
    typed = {name: _typed(text, properties.get(name, {})) for name, text in raw.items()}
    return coerce_arguments(typed, schema or {}) if lenient else (typed, False)


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    declared = schema.get("type")
    types = declared if isinstance(declared, list) else [declared]
    if "string" in types and not ("null" in types and text.strip() == "null"):
        return text
    scan = scan_value(text)
    if scan.error is None and skip_space(text, scan.end) == len(text):
        return scan.value
    return text


def untyped(value: Any, dumped: str) -> str:
    """Write a value the way `typed_arguments` reads it: strings bare, everything else JSON."""
    return value if isinstance(value, str) else dumped
