import datetime
import enum
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, TypeAdapter

from turngym.envs.schema import read_signature, violation
from turngym.envs.tools import Tool, tool
from turngym.errors import ConfigError


def describe(city: str, unit: Literal["celsius", "fahrenheit"] = "celsius", days: int = 1) -> str:
    """Tell the weather of a city.

    It may be wrong.

    Args:
        city: name of the city,
            in English.
        unit (str): of the temperature.

    Returns:
        A sentence.
    """
    return f"{city} {unit} {days}"


def test_the_schema_comes_from_hints_defaults_and_docstring() -> None:
    signature = read_signature(describe)
    assert signature.description == "Tell the weather of a city. It may be wrong."
    assert signature.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "name of the city, in English."},
            "unit": {
                "type": "string",
                "enum": ["celsius", "fahrenheit"],
                "description": "of the temperature.",
                "default": "celsius",
            },
            "days": {"type": "integer", "default": 1},
        },
        "required": ["city"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"city": 7}, "argument 'city': expected string, got number"),
        ({}, "missing argument 'city'; expected: city, unit, days"),
        ({"city": "Rome", "town": 1}, "unknown argument 'town'; expected: city, unit, days"),
        ({"city": "Rome", "days": "3"}, "argument 'days': expected integer, got string"),
        ({"city": "Rome", "days": 2.5}, "argument 'days': expected integer, got number"),
        ({"city": "Rome", "days": True}, "argument 'days': expected integer, got boolean"),
        ({"city": "Rome", "days": None}, "argument 'days': expected integer, got null"),
        (
            {"city": "Rome", "unit": "kelvin"},
            "argument 'unit': expected one of 'celsius', 'fahrenheit', got 'kelvin'",
        ),
    ],
)
def test_a_violation_names_the_argument_and_both_types(
    arguments: dict[str, Any], message: str
) -> None:
    assert violation(read_signature(describe).parameters, arguments) == message


def test_a_whole_float_is_an_integer_as_in_json_schema() -> None:
    assert violation(read_signature(describe).parameters, {"city": "Rome", "days": 3.0}) is None


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Point:
    x: int
    y: int


@tool
def paint(
    points: list[Point],
    colour: Colour,
    width: Annotated[float, Field(gt=0)] = 1.0,
    label: str | None = None,
) -> str:
    """Paint."""
    return f"{points} {colour.name} {width} {label}"


def test_values_are_turned_into_what_the_function_expects() -> None:
    result = paint.call({"points": [{"x": 1, "y": 2}], "colour": "red", "width": 2})
    assert result.text == "[Point(x=1, y=2)] RED 2.0 None"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"points": [{"x": 1}]}, "argument 'points[0]': missing field 'y'"),
        ({"points": [{"x": "1", "y": 2}]}, "argument 'points[0].x': expected integer, got string"),
        ({"colour": "blue"}, "argument 'colour': expected 'red', got 'blue'"),
        ({"width": 0}, "argument 'width': expected more than 0, got 0"),
        ({"label": 3}, "argument 'label': expected string or null, got number"),
    ],
)
def test_nested_values_are_checked_too(changed: dict[str, Any], message: str) -> None:
    arguments = {"points": [], "colour": "red"} | changed
    result = paint.call(arguments)
    assert (result.error, result.text) == ("schema_mismatch", message)


def no_hint(x) -> None: ...  # type: ignore[no-untyped-def]


def variadic(*words: str) -> None: ...


def strange(x: Callable[[], int]) -> None: ...


def drifted(x: int) -> None:
    """Do.

    Args:
        y: is not there.
    """


def unresolved(x: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821


def odd_default(x: Any = object()) -> None: ...  # noqa: B008


@pytest.mark.parametrize("function", [no_hint, variadic, strange, drifted, unresolved, odd_default])
def test_a_function_that_cannot_be_described_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=function.__name__):
        tool(function)


@tool
def remind(day: datetime.date) -> str:
    """Set a reminder."""
    return day.strftime("%A")


def test_what_only_the_type_can_tell_is_a_mismatch_too() -> None:
    assert remind.call({"day": "2024-02-29"}).text == "Thursday"
    result = remind.call({"day": "2023-02-29"})
    assert result.error == "schema_mismatch"
    assert result.text.startswith("argument 'day': ")


def test_a_validation_error_inside_a_tool_is_the_tools() -> None:
    @tool
    def strict() -> int:
        """Validate something else."""
        return TypeAdapter(int).validate_python("x")

    assert strict.call({}).error == "tool_error"


@pytest.mark.parametrize(
    ("schema", "value", "problem"),
    [
        ({"type": ["array", "null"]}, {}, "expected array or null, got object"),
        ({"const": 1}, True, "expected 1, got true"),
        ({"type": "array", "items": {"type": "string"}}, ["a", 2], "expected string, got number"),
        ({"type": "array", "minItems": 1, "maxItems": 2}, [], "expected 1 to 2 items, got 0"),
        ({"type": "string", "maxLength": 2}, "abc", "expected at most 2 characters, got 3"),
        ({"type": "string", "pattern": "^a"}, "b", "expected text matching '^a', got 'b'"),
        ({"type": "number", "multipleOf": 5}, 7, "expected a multiple of 5, got 7"),
        ({"oneOf": [{"type": "string"}, {"type": "array"}]}, 1, "expected string or array"),
        ({"$ref": "#/$defs/word"}, 1, "expected string, got number"),
        ({"allOf": [{"minimum": 3}]}, 2, "expected at least 3, got 2"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"a": "b"}, "integer"),
        (False, 1, "is not allowed"),
    ],
)
def test_json_schema_keywords_are_enforced(schema: Any, value: Any, problem: str) -> None:
    root = {"properties": {"x": schema}, "$defs": {"word": {"type": "string"}}}
    found = violation(root, {"x": value})
    assert found is not None
    assert problem in found


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "dict"}, "'dict' is no JSON type"),
        ({"type": ["string", "float"]}, "'float' is no JSON type"),
        ({"pattern": "("}, "no regex"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"items": 3}, "object or a boolean"),
        ({"anyOf": [{"properties": {"a": {"type": "int"}}}]}, "'int'"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(schema: Any, message: str) -> None:
    parameters = {"type": "object", "properties": {"x": schema}}
    with pytest.raises(ConfigError, match=message.replace("$", ".")):
        Tool.from_schema({"name": "t", "parameters": parameters}, print)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["points", "colour", "width", "label", "x"]), JSON))
@settings(deadline=None, max_examples=200)
def test_no_arguments_whatever_get_an_exception_out_of_a_tool(arguments: dict[str, Any]) -> None:
    result = paint.call(arguments)
    assert result.error in (None, "schema_mismatch")
    assert result.text


def test_every_schema_row_of_the_shared_cases_is_decided_as_they_say(shared: Path) -> None:
    folder = shared / "cases" / "tool_calls"
    schemas = json.loads((folder / "tools.json").read_text())
    tools = {
        schema["name"]: Tool.from_schema(schema, lambda **arguments: "ok") for schema in schemas
    }
    lines = (folder / "shared.jsonl").read_text(encoding="utf-8").split("\n")
    rows = [json.loads(line) for line in lines if line]
    checked = 0
    for row in rows:
        for call in row["expected"].get("calls", ()):
            result = tools[call["name"]].call(call["arguments"])
            assert result.ok, (row["id"], result.text)
            checked += 1
        if row["format"] == "hermes" and row["expected"]["errors"] == ["schema_mismatch"]:
            body = json.loads(row["text"].split("<tool_call>")[1].split("</tool_call>")[0])
            assert tools[body["name"]].call(body["arguments"]).error == "schema_mismatch"
            checked += 1
    assert checked > 50
