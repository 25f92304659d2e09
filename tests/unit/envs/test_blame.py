import json
from collections.abc import Callable

import pytest

from turngym.agents.stats import CircuitBreaker
from turngym.envs.blame import describe
from turngym.envs.checker import check_env
from turngym.envs.core import TurnEnv
from turngym.envs.tasks import TaskSet
from turngym.errors import CircuitBreakerError, EnvError, RewardError
from turngym.rewards.base import EpisodeView, reward
from turngym.types import Action, Task, Trajectory


def share(total: int) -> float:
    return 1 / total


class Careless(TurnEnv):
    """Its reward divides by zero, and its start reads what is no JSON."""

    def tasks(self, split: str) -> TaskSet:
        return TaskSet([Task(id="fine", prompt="?"), Task(id="torn", prompt="!")])

    def start(self, task: Task) -> None:
        self.state = json.loads("{" if task.id == "torn" else "{}")

    @reward
    def correct(self, episode: EpisodeView) -> float:
        return share(len(self.state))


def score() -> None:
    env = Careless()
    env.reset(options={"task": "fine"})
    env.step(Action(role="assistant", content="yes"))


@pytest.mark.parametrize(
    ("fail", "line", "words"),
    [
        (score, "return 1 / total", "raised ZeroDivisionError"),
        (
            lambda: Careless().reset(options={"task": "torn"}),
            "self.state = json.loads(",
            "Careless.reset raised JSONDecodeError",
        ),
    ],
)
def test_the_line_of_the_authors_code_that_failed_is_named(
    fail: Callable[[], None], line: str, words: str
) -> None:
    with pytest.raises((RewardError, EnvError)) as caught:
        fail()
    with open(__file__, encoding="utf-8") as file:
        number = next(at for at, text in enumerate(file, start=1) if text.strip().startswith(line))
    text = describe(caught.value)
    assert words in text
    assert f"({__file__}:{number} in " in text


def test_an_error_that_was_never_raised_has_no_place() -> None:
    assert describe(ValueError("no")) == "ValueError: no"


def test_check_env_names_the_line() -> None:
    with pytest.raises(EnvError, match=r"test_blame\.py:\d+ in start"):
        check_env(Careless)


def test_the_breaker_blames_the_reward_that_raises() -> None:
    failed = Trajectory(
        env_id="e", task_id="t", group_id="g", seed=0, status="reward_error", error="no"
    )
    breaker = CircuitBreaker(0.5, patience=1)
    with pytest.raises(
        CircuitBreakerError, match=r"reward_error: no; it is the environment's own code"
    ):
        breaker.note(failed)
