"""JSON schemas of tools: built from type hints and docstrings, enforced on a model's arguments.

The schema that the model reads is the schema that is enforced: one strict validator serves typed
functions and tools given by JSON schema alike. There is no coercion between JSON types ("3" is no
integer, 10001 is no string); the only freedom is JSON Schema's own, 3.0 is an integer.
"""

import inspect
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError

from turngym.errors import ConfigError

__all__ = ["Signature", "check_schema", "read_signature", "violation"]

JsonSchema = Mapping[str, Any]

_TYPES = ("string", "integer", "number", "boolean", "object", "array", "null")

_SECTION = re.compile(r"^(\s*)(Args|Arguments|Parameters):\s*$")
_HEADER = re.compile(r"^\s*[A-Z]\w*( \w+)?:\s*$")
_ENTRY = re.compile(r"^(\s*)\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """What a typed function says of itself."""

    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments, an object that forbids further properties."""

    adapters: Mapping[str, TypeAdapter[Any]]
    """Turns a JSON value that satisfies the schema into what the function expects."""

    is_method: bool
    """The function takes `self` first."""


def read_signature(fn: Callable[..., Any]) -> Signature:
    """Read the schema of a function from its type hints and its Google-style docstring.

    Raises:
        ConfigError: a parameter has no usable type hint, is positional-only or variadic, or the
            docstring describes a parameter that does not exist.
    """
    name = getattr(fn, "__name__", repr(fn))
    parameters = list(inspect.signature(fn).parameters.values())
    is_method = bool(parameters) and parameters[0].name == "self"
    parameters = parameters[is_method:]
    try:
        hints = get_type_hints(fn, include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigError(f"tool {name!r}: its type hints cannot be resolved: {error}") from error
    adapters: dict[str, TypeAdapter[Any]] = {}
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"tool {name!r}: parameter {parameter.name!r} is {parameter.kind.description}; "
                "a tool's arguments are named one by one"
            )
        if parameter.name not in hints:
            raise ConfigError(
                f"tool {name!r}: parameter {parameter.name!r} needs a type hint, "
                f"for example `{parameter.name}: str`"
            )
        try:
            adapters[parameter.name] = TypeAdapter(hints[parameter.name])
        except PydanticUserError as error:
            raise ConfigError(
                f"tool {name!r}: parameter {parameter.name!r} has a type with no JSON schema: "
                f"{hints[parameter.name]!r}"
            ) from error
    description, notes = _read_docstring(inspect.getdoc(fn) or "")
    if strangers := [note for note in notes if note not in adapters]:
        raise ConfigError(
            f"tool {name!r}: the docstring describes {strangers[0]!r}, which is no parameter; "
            f"parameters: {', '.join(adapters) or 'none'}"
        )
    return Signature(
        description=description,
        parameters=_object_schema(name, parameters, adapters, notes),
        adapters=adapters,
        is_method=is_method,
    )


def _object_schema(
    name: str,
    parameters: list[inspect.Parameter],
    adapters: Mapping[str, TypeAdapter[Any]],
    notes: Mapping[str, str],
) -> dict[str, Any]:
    try:
        schemas, shared = TypeAdapter.json_schemas(
            [(parameter, "validation", adapter) for parameter, adapter in adapters.items()]
        )
    except PydanticUserError as error:
        raise ConfigError(f"tool {name!r}: a parameter has no JSON schema: {error}") from error
    properties: dict[str, Any] = {}
    for parameter in parameters:
        schema = dict(schemas[parameter.name, "validation"])
        if parameter.name in notes:
            schema["description"] = notes[parameter.name]
        if parameter.default is not parameter.empty:
            schema["default"] = _plain_default(name, parameter, adapters[parameter.name])
        properties[parameter.name] = schema
    required = [p.name for p in parameters if p.default is p.empty]
    result: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        result["required"] = required
    return result | {"additionalProperties": False} | dict(shared)


def _plain_default(name: str, parameter: inspect.Parameter, adapter: TypeAdapter[Any]) -> Any:
    try:
        return json.loads(adapter.dump_json(parameter.default))
    except Exception as error:
        raise ConfigError(
            f"tool {name!r}: the default of parameter {parameter.name!r} is no JSON value: "
            f"{parameter.default!r}"
        ) from error


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a Google-style docstring into what stands before the sections, and the arguments."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if _HEADER.match(line)), len(lines))
    description = " ".join(" ".join(lines[:start]).split())
    notes: dict[str, str] = {}
    args = next((i for i, line in enumerate(lines) if _SECTION.match(line)), None)
    if args is None:
        return description, notes
    indent: int | None = None
    current = ""
    for line in lines[args + 1 :]:
        if not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        if depth == 0:
            break
        entry = _ENTRY.match(line)
        if entry and (indent is None or depth == indent):
            indent, current = depth, entry[2]
            notes[current] = entry[3].strip()
        elif current:
            notes[current] = f"{notes[current]} {line.strip()}".strip()
    return description, notes


def check_schema(schema: Any, root: JsonSchema) -> None:
    """Check what `violation` relies on: type names, patterns, references within the schema.

    Args:
        schema: a schema, or a part of one.
        root: the whole of it.

    Raises:
        ConfigError: something that could never be enforced.
    """
    if not isinstance(schema, Mapping):
        if not isinstance(schema, bool):
            raise ConfigError(f"a JSON schema is an object or a boolean, got {schema!r}")
        return
    names = schema.get("type", [])
    for name in [names] if isinstance(names, str) else names:
        if name not in _TYPES:
            raise ConfigError(f"{name!r} is no JSON type; types are {', '.join(_TYPES)}")
    if "pattern" in schema:
        try:
            re.compile(schema["pattern"])
        except re.error as error:
            raise ConfigError(f"pattern {schema['pattern']!r} is no regex: {error}") from error
    if "$ref" in schema:
        _resolve(schema["$ref"], root)
    parts = [schema[key] for key in ("items", "additionalProperties") if key in schema]
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        parts += schema.get(key, ())
    for key in ("properties", "$defs"):
        parts += schema.get(key, {}).values()
    for part in parts:
        check_schema(part, root)


def violation(schema: JsonSchema, arguments: Mapping[str, Any]) -> str | None:
    """Return why arguments do not fit an object schema, in one line a model can act on, or None.

    At the top level a name that the schema does not list is an error even where
    `additionalProperties` is not mentioned: it is a call for something the tool does not do.
    """
    properties = schema.get("properties", {})
    if missing := [name for name in schema.get("required", ()) if name not in arguments]:
        return f"missing argument {missing[0]!r}; expected: {', '.join(properties)}"
    if not schema.get("additionalProperties", False):
        for name in arguments:
            if name not in properties:
                expected = ", ".join(properties) or "no arguments"
                return f"unknown argument {name!r}; expected: {expected}"
    try:
        for name, value in arguments.items():
            sub = properties.get(name, schema.get("additionalProperties", True))
            for path, problem in _problems(sub, value, name, schema):
                return f"argument {path!r}: {problem}"
    except RecursionError:
        return "the arguments are nested too deeply"
    return None


def _problems(schema: Any, value: Any, path: str, root: JsonSchema) -> Iterator[tuple[str, str]]:
    """Yield (path, problem) pairs of a value."""
    if isinstance(schema, bool):
        if not schema:
            yield path, "is not allowed"
        return
    if "$ref" in schema:
        yield from _problems(_resolve(schema["$ref"], root), value, path, root)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            yield from _alternatives(schema[key], value, path, root)
    for part in schema.get("allOf", ()):
        yield from _problems(part, value, path, root)
    if "type" in schema:
        names = [schema["type"]] if isinstance(schema["type"], str) else list(schema["type"])
        if not any(_is(value, name) for name in names):
            yield path, f"expected {' or '.join(names)}, got {_type_name(value)}"
            return
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if allowed is not None and not any(_same(value, option) for option in allowed):
        yield path, f"expected {_listed(allowed)}, got {_short(value)}"
    if isinstance(value, Mapping):
        yield from _object_problems(schema, value, path, root)
    elif isinstance(value, list):
        yield from _array_problems(schema, value, path, root)
    elif isinstance(value, str):
        yield from _string_problems(schema, value, path)
    elif _is(value, "number"):
        yield from _number_problems(schema, value, path)


def _alternatives(
    options: list[Any], value: Any, path: str, root: JsonSchema
) -> Iterator[tuple[str, str]]:
    problems = [next(_problems(option, value, path, root), None) for option in options]
    found = [problem for problem in problems if problem is not None]
    if len(found) < len(options):
        return
    # The alternative that got deepest into the value is the one that was meant.
    deepest = max(found, key=lambda problem: len(problem[0]))
    if deepest[0] != path:
        yield deepest
        return
    wanted = [problem.removeprefix("expected ").rpartition(", got ")[0] for _, problem in found]
    yield path, f"expected {' or '.join(dict.fromkeys(wanted))}, got {_type_name(value)}"


def _object_problems(
    schema: JsonSchema, value: Mapping[str, Any], path: str, root: JsonSchema
) -> Iterator[tuple[str, str]]:
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield path, f"missing field {name!r}"
    rest = schema.get("additionalProperties", True)
    for name, item in value.items():
        if name not in properties and rest is False:
            yield path, f"unknown field {name!r}; expected: {', '.join(properties)}"
            return
        yield from _problems(properties.get(name, rest), item, f"{path}.{name}", root)


def _array_problems(
    schema: JsonSchema, value: list[Any], path: str, root: JsonSchema
) -> Iterator[tuple[str, str]]:
    low, high = schema.get("minItems", 0), schema.get("maxItems", math.inf)
    if not low <= len(value) <= high:
        yield path, f"expected {_between(low, high)} items, got {len(value)}"
    fixed = schema.get("prefixItems", [])
    for index, item in enumerate(value):
        sub = fixed[index] if index < len(fixed) else schema.get("items", True)
        yield from _problems(sub, item, f"{path}[{index}]", root)
    if schema.get("uniqueItems") and any(item in value[:i] for i, item in enumerate(value)):
        yield path, "expected distinct items"


def _string_problems(schema: JsonSchema, value: str, path: str) -> Iterator[tuple[str, str]]:
    low, high = schema.get("minLength", 0), schema.get("maxLength", math.inf)
    if not low <= len(value) <= high:
        yield path, f"expected {_between(low, high)} characters, got {len(value)}"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield path, f"expected text matching {schema['pattern']!r}, got {_short(value)}"


def _number_problems(schema: JsonSchema, value: Any, path: str) -> Iterator[tuple[str, str]]:
    rules: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
        ("minimum", "at least", lambda bound: value >= bound),
        ("maximum", "at most", lambda bound: value <= bound),
        ("exclusiveMinimum", "more than", lambda bound: value > bound),
        ("exclusiveMaximum", "less than", lambda bound: value < bound),
        ("multipleOf", "a multiple of", lambda bound: value % bound == 0),
    )
    for key, words, holds in rules:
        if key in schema and not holds(schema[key]):
            yield path, f"expected {words} {schema[key]}, got {_short(value)}"


def _resolve(reference: str, root: JsonSchema) -> Any:
    node: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        if part:
            try:
                node = node[part.replace("~1", "/").replace("~0", "~")]
            except (KeyError, TypeError) as error:
                raise ConfigError(f"the tool's schema has no {reference!r}") from error
    return node


def _is(value: Any, name: str) -> bool:
    match name:
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            return _is(value, "number") and (isinstance(value, int) or value.is_integer())
        case "number":
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        case "array":
            return isinstance(value, list)
        case _:
            return isinstance(value, Mapping)


def _type_name(value: Any) -> str:
    for name in ("string", "boolean", "null", "number", "array", "object"):
        if _is(value, name):
            return name
    return type(value).__name__


def _same(left: Any, right: Any) -> bool:
    """Equality of JSON values: unlike in Python, true is not 1."""
    return _type_name(left) == _type_name(right) and bool(left == right)


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=repr)
    return text if len(text) <= 40 else text[:37] + "..."


def _listed(options: list[Any]) -> str:
    words = [_short(option) for option in options]
    return words[0] if len(words) == 1 else f"one of {', '.join(words)}"


def _between(low: float, high: float) -> str:
    if low == high:
        return f"{low}"
    if high == math.inf:
        return f"at least {low}"
    return f"at most {high}" if low == 0 else f"{low} to {high}"
