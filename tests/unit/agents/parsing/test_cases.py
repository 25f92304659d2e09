import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from turngym.agents.parsing import ParsedCall, ParseError, parse

TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


@pytest.fixture(scope="module")
def tools(shared: Path) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads(
        (shared / "cases/tool_calls/tools.json").read_text(encoding="utf-8")
    )
    return loaded


@pytest.fixture(scope="module")
def cases(shared: Path) -> list[dict[str, Any]]:
    lines = (shared / "cases/tool_calls/shared.jsonl").read_text(encoding="utf-8").splitlines()
    loaded = [json.loads(line) for line in lines]
    for case in loaded:
        if recipe := case.get("text_gen"):
            repeated = recipe["unit"] * recipe["times"]
            case["text"] = recipe["prefix"] + repeated + recipe["suffix"]
    return loaded


def violation(call: ParsedCall, tools: list[dict[str, Any]]) -> str | None:
    schemas = {tool["name"]: tool["parameters"] for tool in tools}
    if call.name not in schemas:
        return "unknown_tool"
    schema = schemas[call.name]
    if not set(schema.get("required", [])) <= set(call.arguments) <= set(schema["properties"]):
        return "schema_mismatch"
    for name, value in call.arguments.items():
        declared = schema["properties"][name]
        kinds = declared["type"] if isinstance(declared["type"], list) else [declared["type"]]
        is_of = any(
            isinstance(value, TYPES[kind]) and isinstance(value, bool) <= (kind == "boolean")
            for kind in kinds
        )
        if not is_of or value not in declared.get("enum", [value]):
            return "schema_mismatch"
    return None


def outcome(
    case: dict[str, Any], tools: list[dict[str, Any]], *, lenient: bool = False
) -> tuple[list[dict[str, Any]], list[str]]:
    parsed = parse(
        case["text"],
        case["format"],
        finish_reason=case["finish_reason"],
        tools=tools,
        role=case["role"],
        lenient=lenient,
    )
    calls, errors = [], []
    for attempt in parsed.attempts:
        kind = attempt.kind if isinstance(attempt, ParseError) else violation(attempt, tools)
        if kind is not None:
            errors.append(kind)
        elif isinstance(attempt, ParsedCall):
            calls.append({"name": attempt.name, "arguments": attempt.arguments})
    return calls, errors


def test_every_shared_case_has_its_calls_and_errors_in_time(
    cases: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    wrong = []
    for case in cases:
        started = time.perf_counter()
        calls, errors = outcome(case, tools)
        took = time.perf_counter() - started
        expected = case["expected"]
        counted = [len(calls) == expected["n_calls"]] if "n_calls" in expected else []
        listed = [calls == expected["calls"]] if "calls" in expected else []
        if not all([*counted, *listed]) or errors != expected["errors"]:
            wrong.append((case["id"], calls, errors))
        if took > case.get("max_seconds", 1):
            wrong.append((case["id"], calls, [f"took {took} s"]))
    assert len(cases) > 100
    assert wrong == []


def test_the_repairing_mode_recovers_what_the_cases_say(
    cases: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    repairable = [case for case in cases if "lenient" in case]
    assert len(repairable) >= 20
    wrong = [
        case["id"]
        for case in repairable
        if outcome(case, tools, lenient=True)[0] != case["lenient"]["calls"]
    ]
    assert wrong == []


def test_the_repairing_mode_changes_nothing_that_was_right(
    cases: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    for case in cases:
        calls, errors = outcome(case, tools)
        if calls and not errors:
            assert outcome(case, tools, lenient=True) == (calls, [])
