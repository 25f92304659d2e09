import random
from collections.abc import Callable
from typing import Any

import pytest

from turngym.envs.calculator import Calculator, calc
from turngym.envs.calls import make_call
from turngym.errors import ConfigError
from turngym.types import Action, Task

TASK = Task(
    id="t",
    prompt="What is 47 times 86, then minus 12?",
    answer=4030,
    metadata={"numbers": [47, 86, 12], "operators": ["*", "-"], "in_words": True},
)


def start(**kwargs: Any) -> Calculator:
    env = Calculator(**kwargs)
    env.reset(seed=0, options={"task": TASK})
    return env


def act(text: str = "", *exprs: str, think: str = "hm") -> Action:
    action = Action(role="assistant", content=text, reasoning_content=think)
    if exprs:
        action["tool_calls"] = [make_call("calc", {"expr": expr}, turn=0) for expr in exprs]
    return action


def play(*actions: Action, **kwargs: Any) -> dict[str, float | None]:
    env = start(**kwargs)
    info: dict[str, Any] = {}
    for action in actions:
        *_, info = env.step(action)
    rewards: dict[str, float | None] = info["rewards"]
    return rewards


@pytest.mark.parametrize(
    ("expr", "text"),
    [("47*86", "4042"), (" 4042 - 12 ", "4030"), ("-3+-4", "-7"), ("2*-3", "-6"), ("5--5", "10")],
)
def test_the_calculator_does_one_operation(expr: str, text: str) -> None:
    assert calc.call({"expr": expr}).text == text


@pytest.mark.parametrize(
    "expr",
    ["1+2+3", "2**9", "(1+2)", "1/2", "4.5+1", "", "1" * 31 + "+1", "__import__('os')", "\u0663+1"],
)
def test_everything_else_is_an_error_that_says_what_is_wanted(expr: str) -> None:
    result = calc.call({"expr": expr})
    assert (result.error, "such as 47*86" in result.text) == ("tool_error", True)


def test_the_good_path_scores_everything() -> None:
    scores = play(act("", "47*86"), act("", "4042-12"), act("<answer>4030</answer>"))
    assert scores == {"correct": 1.0, "tool": 1.0, "format": 1.0, "success": 1.0}


def scores(correct: float, tool: float, form: float) -> dict[str, float]:
    return {"correct": correct, "tool": tool, "format": form, "success": correct * tool * form}


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        ([act("<answer>4030</answer>")], scores(1, 0, 1)),
        ([act("", "47*86"), act("4030")], scores(0, 1, 0)),
        ([act("", "47*86"), act("It is <answer>4030</answer>")], scores(1, 1, 0)),
        ([act("", "47*86"), act("<answer>4030</answer>", think="")], scores(1, 1, 0)),
        ([act("", "47*86"), act("<answer>1</answer><answer>4030</answer>")], scores(0, 1, 0)),
        ([act("", "47*x"), act("", "47*86"), act("<answer>4030</answer>")], scores(1, 0, 1)),
        ([act("", "1+1", "1+1", "1+1"), act("<answer>4030</answer>")], scores(1, 0, 1)),
        ([act("", "47*86"), act("<answer> 04030 </answer>")], scores(1, 1, 1)),
        ([act("", "47*86"), act(f"<answer>{'9' * 5000}</answer>")], scores(0, 1, 1)),
        ([act("", "47*86"), act("What is 47 times 86, then minus 12?")], scores(0, 1, 0)),
    ],
)
def test_each_component_asks_for_one_thing(
    actions: list[Action], expected: dict[str, float]
) -> None:
    assert play(*actions) == expected


def test_calls_alone_earn_nothing() -> None:
    env = start()
    total = 0.0
    for _ in range(6):
        _, gained, _, truncated, _ = env.step(act("", "47*86"))
        total += gained
    assert truncated
    assert total == 0.0


def test_thinking_is_not_asked_for_when_switched_off() -> None:
    silent = [act("", "47*86", think=""), act("<answer>4030</answer>", think="")]
    assert play(*silent, think=False)["format"] == 1.0
    assert play(*silent)["format"] == 0.0


def run(habits: dict[str, float], seed: int = 0) -> tuple[list[Action], dict[str, float | None]]:
    env, rng, actions = start(), random.Random(seed), []
    while True:
        actions.append(env.demonstrate(rng, habits))
        *_, terminated, truncated, info = env.step(actions[-1])
        if terminated or truncated:
            return actions, info["rewards"]


def _no_call(actions: list[Action]) -> bool:
    return "tool_calls" not in actions[0] and len(actions) == 1


@pytest.mark.parametrize(
    ("habit", "shows"),
    [
        ("guess", _no_call),
        ("broken_json", lambda actions: "invalid_tool_calls" in actions[0]),
        (
            "wrong_operator",
            lambda actions: (
                actions[0]["tool_calls"][0]["function"]["arguments"]["expr"] in ("47+86", "47-86")
            ),
        ),
        ("no_think", lambda actions: not any("reasoning_content" in a for a in actions)),
        ("ignore_result", lambda actions: "<answer>4030</answer>" not in actions[-1]["content"]),
        (
            "stop_early",
            lambda actions: len(actions) == 2 and actions[1]["content"] == "<answer>4042</answer>",
        ),
    ],
)
def test_each_habit_shows_and_costs(habit: str, shows: Callable[[list[Action]], bool]) -> None:
    actions, rewards = run({habit: 1.0})
    assert shows(actions)
    assert rewards["success"] == 0.0


def test_a_habit_shows_as_often_as_asked() -> None:
    # Binomial(400, 0.3): the bounds are five standard deviations away.
    guessed = sum(_no_call(run({"guess": 0.3}, seed)[0]) for seed in range(400))
    assert 74 < guessed < 166


def test_the_expert_says_what_it_does() -> None:
    actions, _ = run({})
    assert [action.get("reasoning_content") for action in actions] == [
        "47 times 86",
        "4042 minus 12",
        "so the answer is",
    ]


@pytest.mark.parametrize("level", [1, 2, 3, 4])
@pytest.mark.parametrize("notation", ["words", "symbols", "mixed"])
def test_every_generated_question_is_solved_by_the_expert(level: int, notation: Any) -> None:
    env = Calculator(level=level, notation=notation, split="test", size=30)
    for task in env.task_set:
        env.reset(options={"task": task})
        ended = False
        while not ended:
            *_, ended, _, info = env.step(env.demonstrate(random.Random(0), {}))
        assert info["rewards"]["success"] == 1.0, task


def test_questions_read_as_they_are_meant() -> None:
    prompts = {
        notation: [task.prompt for task in Calculator(notation=notation, size=40).task_set]
        for notation in ("words", "symbols", "mixed")
    }
    assert any(", then " in prompt for prompt in prompts["words"])
    assert not any("*" in prompt for prompt in prompts["words"])
    assert any("(" in prompt for prompt in prompts["symbols"])
    assert {"(" in prompt for prompt in prompts["mixed"]} == {True, False}


def test_a_question_in_words_is_held_back_with_the_one_in_symbols() -> None:
    words = Calculator(notation="words", split="train", size=2000, level=1)
    symbols = Calculator(notation="symbols", split="test", size=2000, level=1)
    sums = [
        {(*task.metadata["numbers"], *task.metadata["operators"]) for task in env.task_set}
        for env in (words, symbols)
    ]
    assert not sums[0] & sums[1]


@pytest.mark.parametrize("kwargs", [{"level": 5}, {"notation": "roman"}, {"split": "dev"}])
def test_unknown_choices_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Calculator(**kwargs).reset()


def test_instructions_come_on_request() -> None:
    assert [m["role"] for m in Calculator().reset(options={"task": TASK})[0]] == ["user"]
    told, _ = Calculator(instructions=True).reset(options={"task": TASK})
    assert [message["role"] for message in told] == ["system", "user"]
    assert "<answer>" in told[0]["content"]
    assert told[1]["content"] == TASK.prompt
