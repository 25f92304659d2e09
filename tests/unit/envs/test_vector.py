from collections.abc import Iterator, Mapping
from typing import Any, Literal

import gymnasium
import numpy as np
import pytest

import turngym
from turngym.envs import registry
from turngym.envs.core import TurnEnv
from turngym.envs.tasks import TaskSet
from turngym.errors import ConfigError
from turngym.rewards.base import EpisodeView, TurnView, reward
from turngym.types import Action, Task


class Two(TurnEnv):
    """Two turns; the turn reward abstains in the first."""

    def tasks(self, split: str) -> TaskSet:
        return TaskSet([Task(id=f"t{n}", prompt=f"Say {n}.", answer=str(n)) for n in range(50)])

    def respond(self, turn: TurnView) -> str | None:
        return None if turn.index else "again"

    @reward(on="turn")
    def late(self, turn: TurnView) -> float | None:
        return 1.0 if turn.index else None

    @reward
    def correct(self, episode: EpisodeView) -> float:
        return float(episode.final_answer == episode.task.answer)

    def facts(self) -> Mapping[str, Any]:
        return {}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    turngym.register("test/Two-v0", Two)
    yield
    del gymnasium.registry["test/Two-v0"]
    del registry._registered["test/Two-v0"]


def say(*words: str) -> tuple[Action, ...]:
    return tuple(Action(role="assistant", content=word) for word in words)


MODES: list[Any] = ["sync", pytest.param("async", marks=pytest.mark.slow)]


@pytest.mark.parametrize("mode", MODES)
def test_rewards_stay_objects_and_the_last_observation_is_kept(
    mode: Literal["sync", "async"],
) -> None:
    envs = turngym.make_vec("test/Two-v0", 2, vectorization_mode=mode, autoreset_mode="SameStep")
    observations, infos = envs.reset(seed=3)
    first = [dialogue[0]["content"] for dialogue in observations]
    answers = [text.removeprefix("Say ").removesuffix(".") for text in first]
    observations, rewards, *_, infos = envs.step(say("a", "b"))
    assert [dialogue[0]["content"] for dialogue in observations] == ["again", "again"]
    assert list(infos["rewards"]) == [{"late": None}, {"late": None}]
    _, rewards, terminated, truncated, infos = envs.step(say(answers[0], "wrong"))
    assert rewards.tolist() == [2.0, 1.0]
    assert terminated.all()
    assert not truncated.any()
    assert [info["rewards"]["correct"] for info in infos["final_info"]] == [1.0, 0.0]
    assert list(infos["final_obs"]) == [(), ()]
    assert [len(dialogue) for dialogue in _] == [1, 1]
    envs.close()


def test_the_default_resets_with_the_next_step() -> None:
    envs = turngym.make_vec("test/Two-v0", 2)
    envs.reset(seed=0)
    envs.step(say("a", "b"))
    _, _, terminated, _, infos = envs.step(say("a", "b"))
    assert terminated.all()
    assert list(infos["stop_reason"]) == ["completed", "completed"]
    observations, rewards, terminated, _, infos = envs.step(say("x", "y"))
    assert rewards.tolist() == [0.0, 0.0]
    assert not np.any(terminated)
    assert all(dialogue[0]["content"].startswith("Say") for dialogue in observations)
    assert all(task_id.startswith("t") for task_id in infos["task_id"])
    envs.close()


def test_wrappers_are_applied_to_each_copy() -> None:
    envs = turngym.make_vec(
        "test/Two-v0", 2, wrappers=[lambda env: turngym.TurnLimit(env, 1)], max_turns=5
    )
    envs.reset(seed=0)
    *_, truncated, infos = envs.step(say("a", "b"))
    assert truncated.all()
    assert list(infos["stop_reason"]) == ["max_turns", "max_turns"]
    assert envs.spec is not None
    assert envs.spec.kwargs == {"max_turns": 5, "num_envs": 2}
    envs.close()


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_envs": 0},
        {"vectorization_mode": "threads"},
        {"autoreset_mode": "Never"},
        {"max_turn": 3},
    ],
)
def test_wrong_settings_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        turngym.make_vec("test/Two-v0", **({"num_envs": 1} | kwargs))
