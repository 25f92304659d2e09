import json
import time
from pathlib import Path
from typing import Any

import pytest

from turngym.agents.parsing import parse, to_message
from turngym.envs.calls import answer_calls
from turngym.envs.tools import Tool


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


def outcome(
    case: dict[str, Any], schemas: list[dict[str, Any]], *, lenient: bool = False
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the calls that an environment would run, and the kinds of the others, in order."""
    parsed = parse(
        case["text"],
        case["format"],
        finish_reason=case["finish_reason"],
        tools=schemas,
        role=case["role"],
        lenient=lenient,
    )
    tools = {schema["name"]: Tool.from_schema(schema, lambda **_: "ok") for schema in schemas}
    results, _ = answer_calls(to_message(parsed), tools, turn=0)
    calls = [{"name": r.name, "arguments": r.arguments} for r in results if r.error is None]
    return calls, [r.error for r in results if r.error is not None]


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
