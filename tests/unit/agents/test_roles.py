import json
from pathlib import Path

import pytest

from turngym.agents.parsing import get_dialect
from turngym.agents.parsing.common import RoleTable
from turngym.agents.roles import RoleMachine
from turngym.types import TokenRole

R, A = int(TokenRole.REASONING), int(TokenRole.ACTION)


def roles(pieces: list[str], dialect: str = "hermes", *, in_reasoning: bool = False) -> list[int]:
    machine = RoleMachine(get_dialect(dialect).roles, in_reasoning=in_reasoning)
    return [int(role) for role in machine.roles(pieces)]


def test_the_state_after_each_token_is_the_reference_adapter(shared: Path) -> None:
    golden = json.loads((shared / "goldens/goldens.json").read_text(encoding="utf-8"))
    golden = golden["dart"]["router_state_machine"]
    tags = RoleTable(markers={"text": {"<tool>": "action"}, "action": {"</tool>": "text"}})
    machine = RoleMachine(tags)
    tracker = machine.start()
    adapters = []
    for token in golden["tokens"]:
        # Observations are not sampled: each turn has a tracker of its own.
        tracker = machine.start() if token in ("q", "obs") else tracker
        adapters.append(int(tracker.push("" if token in ("q", "obs") else token)) - R)
    assert adapters == golden["adapter"]


def test_the_opening_tag_reasons_and_the_closing_tag_acts() -> None:
    assert roles(["hm", "<tool_call>", "{", "}", "</tool_call>", "ok"]) == [R, R, A, A, A, R]


def test_a_tag_of_many_tokens_is_consumed_with_its_last_one() -> None:
    assert roles(["<tool", "_call", ">", "{", "</", "tool_call", ">", "x"]) == [
        *(R, R, R, A, A, A, A, R)
    ]


def test_a_token_may_hold_a_tag_and_what_surrounds_it() -> None:
    assert roles(["a<tool_call>{", "}</tool_call> <tool_call>", "x"]) == [R, A, A]


def test_tags_inside_reasoning_do_not_act() -> None:
    assert roles(["<think>", "<tool_call>", "x", "</think>", "<tool_call>", "y"]) == [
        *(R, R, R, R, R, A)
    ]
    assert roles(["<tool_call>", "x", "</think>", "<tool_call>", "y"], in_reasoning=True) == [
        *(R, R, R, R, A)
    ]


def test_an_unclosed_tag_does_not_leak_into_the_next_turn() -> None:
    assert roles(["<tool_call>", "x"]) == [R, A]
    assert roles(["x", "y"]) == [R, R]


@pytest.mark.parametrize(
    ("dialect", "pieces", "expected"),
    [
        ("llama3_json", ["\n", "{", '"name"', "}"], [R, R, A, A]),
        ("llama3_json", ["a", "{", "b"], [R, R, R]),
        ("pythonic", ["[", "f", "("], [R, A, A]),
        ("mistral", ["[TOOL", "_CALLS]", "f", "{}"], [R, R, A, A]),
        (
            "python_code_block",
            ["```", "python", "\n", "x", "\n", "```", "y"],
            [R, R, A, A, A, A, R],
        ),
        (
            "harmony",
            ["<|channel|>", "commentary to=", "functions.f", "<|message|>", "{}", "<|call|>", "x"],
            [R, R, A, A, A, A, R],
        ),
        ("harmony", ["<|channel|>", "final", "<|message|>", "to=f"], [R, R, R, R]),
    ],
)
def test_every_dialect_says_where_it_acts(
    dialect: str, pieces: list[str], expected: list[int]
) -> None:
    assert roles(pieces, dialect) == expected
