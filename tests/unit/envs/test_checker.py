import random
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import gymnasium
import pytest

from turngym.envs.calls import make_call
from turngym.envs.checker import check_env
from turngym.envs.core import TurnEnv
from turngym.envs.tasks import TaskSet
from turngym.envs.tools import tool
from turngym.errors import ConfigError, EnvError
from turngym.rewards.base import EpisodeView, TurnView, reward
from turngym.types import Action, Task


class Good(TurnEnv):
    """Ask for a word, then say it."""

    def tasks(self, split: str) -> TaskSet:
        return TaskSet(
            [Task(id=f"t{n}", prompt=f"What is word {n}?", answer=f"word{n}") for n in range(9)]
        )

    def start(self, task: Task) -> None:
        self.state = {"asked": 0}

    @tool
    def ask(self) -> str:
        """Tell the word."""
        self.state["asked"] += 1
        return str(self.task.answer)

    @reward(low=0, high=1)
    def correct(self, episode: EpisodeView) -> float:
        return float(episode.final_answer == episode.task.answer)

    def expert(self, rng: random.Random, habits: Mapping[str, float]) -> Action:
        if self.state["asked"]:
            return Action(role="assistant", content=str(self.task.answer))
        call = make_call("ask", {}, turn=0)
        return Action(role="assistant", content="", tool_calls=[call])


def test_an_honest_environment_passes() -> None:
    check_env(Good)


def test_an_environment_without_an_expert_passes() -> None:
    class Bare(TurnEnv):
        def tasks(self, split: str) -> TaskSet:
            return TaskSet([Task(id="a", prompt="?"), Task(id="b", prompt="!")])

        @reward
        def brief(self, episode: EpisodeView) -> float:
            return float(len(episode.final_answer or "") < 5)

    check_env(Bare)


class Unrewarded(Good):
    """Overrides its only reward without marking it."""

    def correct(self, episode: EpisodeView) -> float:
        return 1.0


class Abstaining(Good):
    """Forgets to return."""

    @reward(low=0, high=1)
    def correct(self, episode: EpisodeView) -> None:  # type: ignore[override]
        """Say nothing of any episode."""


class Farmed(Good):
    """Pays every valid call."""

    @reward(on="turn")
    def valid(self, turn: TurnView) -> float:
        return float(all(result.ok for result in turn.results))


class Echoed(Good):
    """Believes the prompt."""

    @reward(weight=1.0)
    def correct(self, episode: EpisodeView) -> float:
        return float("word" in (episode.final_answer or ""))


class Shared(Good):
    """Keeps its state on the class."""

    asked: ClassVar[list[int]] = []

    def start(self, task: Task) -> None:
        self.state = {"asked": 0}
        self.asked.clear()

    @tool
    def ask(self) -> str:
        """Tell the word."""
        self.state["asked"] += 1
        self.asked.append(1)
        return f"{self.task.answer} ({len(self.asked)})"


class Random(Good):
    """Draws from the global source."""

    def prompt(self, task: Task) -> str:
        return f"{task.prompt} {random.random()}"


class Forgetful(Good):
    """Keeps state where snapshots do not look."""

    def start(self, task: Task) -> None:
        self.state = {"asked": 0}
        self.count = 0

    @tool
    def ask(self) -> str:
        """Tell the word."""
        self.state["asked"] += 1
        self.count += 1
        return f"{self.task.answer} {self.count}"

    @reward
    def calls(self, episode: EpisodeView) -> float:
        return float(self.count)


class Endless(Good):
    """Never ends."""

    def _limit(self, episode: Any) -> None:
        return None


class Undescribed(Good):
    """Has a tool without a word of explanation."""

    @tool
    def mystery(self) -> str:
        return ""


class Swallows(Good):
    """Takes any argument."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (Farmed, "pay honesty: spamming"),
        (Echoed, "pay honesty: echoing"),
        (Unrewarded, "the environment has no rewards: mark a method with @turngym.reward"),
        (Abstaining, "no component was ever scored"),
        (Shared, "keep episodes apart"),
        (Random, "repeat with the same seed"),
        (Forgetful, "continue from a snapshot"),
        (Endless, "end by itself"),
        (Undescribed, "describe tools: tool 'mystery'"),
        (Swallows, "refuse unknown arguments"),
    ],
)
def test_each_rule_finds_what_breaks_it(broken: type[TurnEnv], rule: str) -> None:
    with pytest.raises(EnvError) as caught:
        check_env(broken)
    assert rule in str(caught.value)


def test_an_instance_without_a_spec_cannot_be_checked() -> None:
    with pytest.raises(ConfigError, match="pass the id or the class"):
        check_env(Good())


@pytest.fixture
def calculator() -> Iterator[gymnasium.Env[Any, Any]]:
    env = gymnasium.make("turngym/Calculator-v0", level=1)
    yield env
    env.close()


def test_an_instance_made_by_id_can(calculator: gymnasium.Env[Any, Any]) -> None:
    check_env(calculator)
