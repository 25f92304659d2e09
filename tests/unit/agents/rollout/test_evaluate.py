import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from turngym.agents.config import RolloutConfig
from turngym.agents.evaluation import evaluate
from turngym.agents.rollout import EnvSource, MessageAgent, RolloutEngine
from turngym.agents.scripted import OraclePolicy
from turngym.agents.store import TrajectoryStore
from turngym.errors import CircuitBreakerError, ConfigError
from turngym.types import Task

Relay = Callable[..., EnvSource]

GUESSING = {"guess": 0.5}


def engine(source: EnvSource, *, seed: int = 5, **config: Any) -> RolloutEngine:
    agent = MessageAgent.factory(OraclePolicy(GUESSING))
    return RolloutEngine(source, agent, RolloutConfig(**config), seed=seed)


def test_the_first_tasks_are_played_and_the_numbers_are_kept(relay: Relay, tmp_path: Path) -> None:
    with engine(relay(num_tasks=10)) as rollouts:
        report = evaluate(rollouts, num_tasks=6, samples_per_task=4, out=tmp_path)
    assert (report.tasks, report.episodes, report.errors) == (6, 24, 0)
    assert 0 < report.pass_at[1].value < 1
    assert report.pass_at[4].value >= report.pass_at[1].value >= report.pass_hat[4].value
    kept = json.loads((tmp_path / "report.json").read_text())
    assert kept["pass_at"]["1"]["value"] == report.pass_at[1].value
    assert len(list(TrajectoryStore(tmp_path / "trajectories"))) == 24


def test_an_evaluation_resumed_in_parts_gives_the_numbers_of_one_run(
    relay: Relay, tmp_path: Path
) -> None:
    with engine(relay()) as rollouts:
        one_run = evaluate(rollouts, num_tasks=8, samples_per_task=3, out=tmp_path / "one")
    played: list[int] = []
    for num_tasks, samples in ((3, 2), (8, 1), (8, 3)):
        with engine(relay(), concurrency=2) as rollouts:
            rollouts.progress = lambda done, total: played.append(total)
            report = evaluate(
                rollouts,
                num_tasks=num_tasks,
                samples_per_task=samples,
                out=tmp_path / "parts",
                resume=True,
            )
    assert report == one_run
    assert len(played) == 24


def test_errors_are_apart_and_played_again_on_resume(relay: Relay, tmp_path: Path) -> None:
    is_broken = True

    def hook(env: Any, content: str) -> None:
        if is_broken and env.task.id == "task-1":
            raise OSError("the disk is gone")

    with engine(relay(hook=hook), retries=0) as rollouts:
        first = evaluate(rollouts, num_tasks=3, samples_per_task=3, out=tmp_path)
    assert (first.errors, first.episodes, first.tasks) == (3, 9, 2)
    is_broken = False
    with engine(relay(hook=hook)) as rollouts:
        second = evaluate(rollouts, num_tasks=3, samples_per_task=3, out=tmp_path, resume=True)
    assert (second.errors, second.episodes, second.tasks) == (0, 9, 3)
    with engine(relay()) as rollouts:
        assert evaluate(rollouts, num_tasks=3, samples_per_task=3).pass_at == second.pass_at


def test_a_run_that_the_breaker_stopped_keeps_its_episodes(relay: Relay, tmp_path: Path) -> None:
    bad = tuple(f"task-{number}" for number in range(4, 100))
    source = relay(faults={0: "env"}, fault_tasks=bad)
    with engine(source, concurrency=1) as rollouts, pytest.raises(CircuitBreakerError):
        evaluate(rollouts, num_tasks=50, out=tmp_path)
    done = [row["status"] for row in TrajectoryStore(tmp_path / "trajectories").rows()]
    assert done.count("completed") == 4


def test_a_folder_is_not_mixed_up_with_another_evaluation(relay: Relay, tmp_path: Path) -> None:
    with engine(relay()) as rollouts:
        evaluate(rollouts, num_tasks=1, out=tmp_path)
        with pytest.raises(ConfigError, match="already holds"):
            evaluate(rollouts, num_tasks=1, out=tmp_path)
    with engine(relay(), seed=6) as rollouts, pytest.raises(ConfigError, match="its seed is 5"):
        evaluate(rollouts, num_tasks=1, out=tmp_path, resume=True)


def test_impossible_numbers_are_refused(relay: Relay) -> None:
    with engine(relay(num_tasks=3)) as rollouts:
        with pytest.raises(ConfigError, match=r"1\.\.3"):
            evaluate(rollouts, num_tasks=4)
        with pytest.raises(ConfigError, match=r"1\.\.3"):
            evaluate(rollouts, num_tasks=0)
        with pytest.raises(ConfigError, match="samples_per_task"):
            evaluate(rollouts, samples_per_task=0)
        with pytest.raises(ConfigError, match="success='solved'"):
            evaluate(rollouts, success="solved")


def test_an_evaluation_of_one_policy_is_not_resumed_with_another(
    relay: Relay, tmp_path: Path
) -> None:
    policy = {"name": "tiny", "sampling": {"temperature": 1.0, "top_p": 1.0}}
    colder = {"name": "tiny", "sampling": {"temperature": 0.5, "top_p": 1.0}}
    with engine(relay()) as rollouts:
        evaluate(rollouts, num_tasks=2, out=tmp_path, policy=policy)
        with pytest.raises(ConfigError, match=r"its policy\.sampling\.temperature is 1\.0, not 0"):
            evaluate(rollouts, num_tasks=2, out=tmp_path, policy=colder, resume=True)
        with pytest.raises(ConfigError, match="its policy is"):
            evaluate(rollouts, num_tasks=2, out=tmp_path, resume=True)
        report = evaluate(rollouts, num_tasks=3, out=tmp_path, policy=policy, resume=True)
    assert report.episodes == 3


class Rewritten(Sequence[Task]):
    """The tasks of another set, one of them replaced."""

    def __init__(self, tasks: Any, position: int, task: Task) -> None:
        self.tasks, self.position, self.task = tasks, position, task

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: Any) -> Any:
        return self.task if index == self.position else self.tasks[index]


@pytest.mark.parametrize(
    "change", [{"id": "another"}, {"prompt": "?"}, {"answer": 7}, {"metadata": {"hint": 1}}]
)
def test_tasks_that_changed_are_not_mixed_with_those_played(
    relay: Relay, tmp_path: Path, change: dict[str, Any]
) -> None:
    with engine(relay()) as rollouts:
        evaluate(rollouts, num_tasks=3, out=tmp_path)
        source = rollouts.source
        assert isinstance(source, EnvSource)
        tasks = source.task_set
        for position in (2, 3):
            changed = dataclasses.replace(tasks[position], **change)
            source.task_set = Rewritten(tasks, position, changed)
            if position == 3:
                assert evaluate(rollouts, num_tasks=4, out=tmp_path, resume=True).tasks == 4
                continue
            for count in (1, 5):
                with pytest.raises(ConfigError, match=r"task 'task-2' has changed.*1 of 3"):
                    evaluate(rollouts, num_tasks=count, out=tmp_path, resume=True)
