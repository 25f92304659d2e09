import random
from typing import Any

import pytest

from turngym.envs.calls import make_call
from turngym.envs.lookup import Lookup
from turngym.errors import ConfigError
from turngym.types import Action, Task

TASK = Task(
    id="t",
    prompt="Start at the key bab. ...",
    answer="dad",
    metadata={
        "chain": ["bab", "cac", "dad"],
        "store": {"bab": "cac", "cac": "dad", "fof": "gag"},
    },
)


def look(*keys: str) -> Action:
    calls = [make_call("get", {"key": key}, turn=0) for key in keys]
    return Action(role="assistant", content="", tool_calls=calls)


def say(text: str) -> Action:
    return Action(role="assistant", content=text)


def play(*actions: Action) -> list[tuple[float, dict[str, float]]]:
    env = Lookup()
    env.reset(options={"task": TASK})
    steps = [env.step(action) for action in actions]
    return [(step[1], step[4]["rewards"]) for step in steps]


def test_each_link_pays_and_the_answer_pays_most() -> None:
    steps = play(look("bab"), look("cac"), say("<answer>dad</answer>"))
    assert [gained for gained, _ in steps] == [0.5, 0.5, 1.0]
    assert steps[-1][1] == {"progress": 0.0, "correct": 1.0}


@pytest.mark.parametrize(
    "actions",
    [
        [look("fof")],
        [look("nope")],
        [look("cac")],
        [look("bab"), look("bab")],
        [look("bab", "bab")],
        [look("bab", "nope")],
        [look("bab"), look("cac"), look("dad")],
        [Action(role="assistant", content="", tool_calls=[make_call("put", {}, turn=0)])],
    ],
)
def test_a_call_that_leads_nowhere_costs(actions: list[Action]) -> None:
    assert play(*actions)[-1][0] == -0.25


def test_two_links_in_one_turn_are_one_step_forward() -> None:
    assert play(look("bab", "cac"))[0][0] == 0.5


@pytest.mark.parametrize(
    "text", ["dad", "<answer>cac</answer>", "<answer>cac</answer><answer>dad</answer>"]
)
def test_only_the_end_of_the_chain_in_its_tags_is_right(text: str) -> None:
    assert play(look("bab"), look("cac"), say(text))[-1][1]["correct"] == 0.0


def run(habits: dict[str, float], **kwargs: Any) -> tuple[int, float]:
    env = Lookup(split="test", **kwargs)
    env.reset(seed=1)
    rng, total, turns = random.Random(0), 0.0, 0
    while True:
        _, gained, terminated, truncated, info = env.step(env.demonstrate(rng, habits))
        turns += 1
        total += gained
        if terminated or truncated:
            return turns, info["rewards"]["correct"]


@pytest.mark.parametrize("hops", [1, 2, 3, 4])
def test_the_expert_takes_a_turn_a_hop_and_one_to_answer(hops: int) -> None:
    assert run({}, min_hops=hops, max_hops=hops) == (hops + 1, 1.0)


@pytest.mark.parametrize("habit", ["stop_early", "wrong_key"])
def test_habits_miss_the_answer(habit: str) -> None:
    assert run({habit: 1.0}, min_hops=3)[1] == 0.0


def test_impossible_hops_are_refused() -> None:
    with pytest.raises(ConfigError, match="min_hops <= max_hops"):
        Lookup(min_hops=5, max_hops=4)
