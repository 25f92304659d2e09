"""From a JSON value to a call: the checks every JSON dialect makes, and their repairs."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from turngym.agents.parsing.common import Attempt, Context, ParsedCall, ParseError
from turngym.agents.parsing.jsonscan import Scan, scan_value, skip_space

__all__ = [
    "ARGUMENT_KEYS",
    "coerce_arguments",
    "dump",
    "failure",
    "make_call",
    "read_value",
    "repair",
    "repair_calls",
]

ARGUMENT_KEYS = ("arguments", "parameters")
"""What dialects call the arguments; each accepts its own only, unless it is lenient."""

_DETAILS = {
    "malformed_json": "the call is not valid JSON",
    "truncated": "the call was cut off",
    "extra_data": "only one JSON object may stand in a call",
    "not_an_object": "a call must be a JSON object",
    "missing_name": "a call needs the tool's name, a string, under 'name'",
    "missing_arguments": "the arguments must stand under {key!r}",
    "arguments_not_object": "{key!r} must be a JSON object, not text or a list",
    "duplicate_key": "a key appears twice in the call",
    "non_finite_number": "a number in the call is too large",
    "invalid_unicode": "a string in the call holds half of a surrogate pair",
    "too_deep": "the call is nested too deeply",
    "malformed_markup": "the markup of the call is broken",
    "not_a_literal": "arguments must be literal values",
}
_FENCE = re.compile(r"\A\s*```\w*\n(.*?)\n?```\s*\Z", re.DOTALL)


def failure(kind: str, span: tuple[int, int], key: str = "arguments") -> ParseError:
    """Build an error of a known kind, with the sentence that explains it to the model."""
    return ParseError(kind=kind, span=span, detail=_DETAILS[kind].format(key=key))


def make_call(
    value: Any, span: tuple[int, int], context: Context, *, key: str = "arguments"
) -> Attempt:
    """Check that a JSON value is a call.

    A call without arguments may leave them out; a call that writes them under another key may not,
    for it would run without them.
    """
    if not isinstance(value, dict):
        return failure("not_an_object", span)
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return failure("missing_name", span)
    flags: set[str] = set()
    found: Any = value.get(key)
    if key not in value:
        if len(value) == 1:
            found = {}
        elif context.lenient and (other := [k for k in ARGUMENT_KEYS if k in value]):
            found = value[other[0]]
            flags.add("repaired")
        else:
            return failure("missing_arguments", span, key)
    if context.lenient and not isinstance(found, dict):
        found, flags = _repair_arguments(found)
    if not isinstance(found, dict):
        return failure("arguments_not_object", span, key)
    if context.lenient:
        found, coerced = coerce_arguments(found, context.parameters.get(name, {}))
        flags |= {"coerced"} if coerced else set()
    return ParsedCall(name=name, arguments=found, span=span, flags=frozenset(flags))


def _repair_arguments(found: Any) -> tuple[Any, set[str]]:
    if found is None:
        return {}, {"repaired"}
    if isinstance(found, str):
        scan = scan_value(found)
        if scan.error is None and skip_space(found, scan.end) == len(found):
            return scan.value, {"double_encoded"}
    return found, set()


def read_value(
    scan: Scan, span: tuple[int, int], context: Context, *, key: str = "arguments"
) -> Attempt:
    """Turn a complete scan into a call or the reason why it is none."""
    if scan.error is not None:
        return failure(scan.error, span)
    return make_call(scan.value, span, context, key=key)


def repair_calls(
    body: str, span: tuple[int, int], context: Context, *, key: str = "arguments"
) -> list[ParsedCall]:
    """Read whatever calls a broken body holds; empty when it is beyond repair."""
    calls = []
    for value in repair(body):
        attempt = make_call(value, span, context, key=key)
        if isinstance(attempt, ParseError):
            return []
        flags = attempt.flags | {"repaired"}
        calls.append(
            ParsedCall(name=attempt.name, arguments=attempt.arguments, span=span, flags=flags)
        )
    return calls


def repair(body: str) -> Iterator[Any]:
    """Yield the values of a text that is nearly JSON: fences, lists and sequences taken apart."""
    if fence := _FENCE.match(body):
        body = fence[1]
    position = skip_space(body, 0)
    while position < len(body):
        scan = scan_value(body, position, grammar="lenient")
        if scan.error is not None:
            return
        yield from scan.value if isinstance(scan.value, list) else [scan.value]
        position = skip_space(body, scan.end)


def coerce_arguments(
    arguments: Mapping[str, Any], schema: Mapping[str, Any]
) -> tuple[dict[str, Any], bool]:
    """Convert scalars to the type their parameter declares; report whether anything changed.

    Args:
        arguments: as written.
        schema: JSON schema of the parameters.
    """
    properties = schema.get("properties", {})
    result = {name: _coerce(value, properties.get(name, {})) for name, value in arguments.items()}
    return result, any(result[name] is not value for name, value in arguments.items())


def _coerce(value: Any, schema: Mapping[str, Any]) -> Any:
    declared = schema.get("type")
    types = declared if isinstance(declared, list) else [declared]
    if isinstance(value, str) and "string" not in types:
        scan = scan_value(value, grammar="lenient")
        if scan.error is None and skip_space(value, scan.end) == len(value):
            return scan.value if _is_of(scan.value, types) else value
    if types == ["string"] and isinstance(value, int | float) and not isinstance(value, bool):
        return json.dumps(value)
    return value


def _is_of(value: Any, types: Sequence[Any]) -> bool:
    kinds: dict[str, Any] = {"object": dict, "array": list, "boolean": bool, "number": (int, float)}
    if isinstance(value, bool):
        return "boolean" in types
    if value is None:
        return "null" in types
    if isinstance(value, int) and "integer" in types:
        return True
    return any(isinstance(value, kinds[t]) for t in types if t in kinds)


def dump(value: Any) -> str:
    """Write JSON the way chat templates do: characters as they are, a blank after separators."""
    return json.dumps(value, ensure_ascii=False)
