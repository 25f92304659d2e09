import dataclasses
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from turngym.envs import math_qa, resources
from turngym.envs.calls import make_call
from turngym.envs.math_qa import MathQA
from turngym.errors import ConfigError, DataError, RewardError
from turngym.rewards import equivalence
from turngym.rewards.equivalence import Verdict
from turngym.sandboxes.echo import EchoSandbox
from turngym.sandboxes.sync import SyncSandbox
from turngym.types import Action, Task


@pytest.fixture(scope="module", autouse=True)
def _workers() -> Iterator[None]:
    yield
    equivalence.close()


def score(task: Task, text: str, **kwargs: Any) -> float | None:
    env = MathQA(**kwargs)
    env.reset(options={"task": task})
    *_, info = env.step(Action(role="assistant", content=text))
    value: float | None = info["rewards"]["correct"]
    return value


HALF = Task(id="t", prompt=r"What is 1/2? Not \boxed{0.5}!", answer="0.5")


def test_answers_are_compared_as_numbers() -> None:
    assert score(HALF, r"It is \boxed{\frac{1}{2}}.") == 1.0
    assert score(HALF, r"It is \boxed{2}.") == 0.0
    assert score(HALF, "It is 0.5.") == 0.0


def test_an_answer_in_the_prompt_or_the_reasoning_does_not_count() -> None:
    env = MathQA()
    env.reset(options={"task": HALF})
    thought = Action(role="assistant", content="", reasoning_content=r"\boxed{0.5}")
    assert env.step(thought)[4]["rewards"]["correct"] == 0.0


@pytest.mark.parametrize(
    ("verdict", "expected"), [("right", 1.0), ("wrong", 0.0), ("no_answer", 0.0), ("timeout", None)]
)
def test_a_verdict_that_took_too_long_abstains(
    monkeypatch: pytest.MonkeyPatch, verdict: Any, expected: float | None
) -> None:
    monkeypatch.setattr(math_qa, "verify", lambda *_, **__: Verdict(verdict=verdict))
    assert score(HALF, "x") == expected


def test_a_comparison_that_breaks_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_qa, "verify", lambda *_, **__: Verdict(verdict="error"))
    with pytest.raises(RewardError, match="correct"):
        score(HALF, "x")


def test_the_expert_solves_generated_problems() -> None:
    env = MathQA(split="test", size=40)
    for task in env.task_set:
        env.reset(options={"task": task})
        action = env.demonstrate(random.Random(0), {})
        assert action["reasoning_content"]
        assert env.step(action)[4]["rewards"]["correct"] == 1.0


def test_the_expert_trusts_the_worked_solution_more_than_the_gold_answer() -> None:
    env = MathQA()
    task = Task(id="t", prompt="?", answer="71", metadata={"solution": "so\n#### 70"})
    env.reset(options={"task": task})
    action = env.demonstrate(random.Random(0), {})
    assert (action["content"], action["reasoning_content"]) == (r"\boxed{70}", "so")
    bare = Task(id="t", prompt="?", answer=71)
    env.reset(options={"task": bare})
    assert env.demonstrate(random.Random(0), {})["content"] == r"\boxed{71}"


def play_all(env: MathQA, tasks: list[Task]) -> Counter[float | None]:
    scores: Counter[float | None] = Counter()
    for task in tasks:
        env.reset(options={"task": task})
        *_, info = env.step(env.demonstrate(random.Random(0), {}))
        scores[info["rewards"]["correct"]] += 1
    return scores


def test_every_gsm8k_row_is_solved_and_none_when_its_answer_is_changed(shared: Path) -> None:
    env = MathQA(tasks=str(shared / "data" / "gsm8k" / "shared.jsonl"))
    tasks = list(env.task_set)
    assert play_all(env, tasks) == {1.0: 908}
    changed = [
        dataclasses.replace(task, answer=task.answer[:-1] + str((int(task.answer[-1]) + 1) % 10))
        for task in tasks
    ]
    assert play_all(env, changed) == {0.0: 908}


def test_a_task_file_with_a_broken_line_is_named_by_line(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    row = json.dumps({"question": "1+1?", "answer": "2"})
    file.write_text(f"{row}\n" * 6 + "{broken\n")
    with pytest.raises(DataError, match=r"tasks\.jsonl:7: not JSON"):
        MathQA(tasks=str(file)).reset()


def test_the_python_tool_is_offered_on_request() -> None:
    resources.provide("sandbox", "echo", lambda: SyncSandbox(EchoSandbox()))
    assert MathQA().reset(options={"task": HALF})[1]["tools"] == []
    env = MathQA(python=True, sandbox="echo")
    _, info = env.reset(options={"task": HALF})
    assert [schema["function"]["name"] for schema in info["tools"]] == ["python"]
    call = make_call("python", {"code": "print(1/2)"}, turn=0)
    observation, *_ = env.step(Action(role="assistant", content="", tool_calls=[call]))
    assert observation[0]["content"] == "print(1/2)"
    env.close()
    resources.close()


def test_impossible_deadlines_are_refused() -> None:
    with pytest.raises(ConfigError, match="deadline_s"):
        MathQA(deadline_s=0)
