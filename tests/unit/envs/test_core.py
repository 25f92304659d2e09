import random
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import pytest

import turngym
from turngym.envs.calls import make_call
from turngym.envs.core import TurnEnv
from turngym.envs.tasks import TaskSet
from turngym.envs.tools import tool
from turngym.errors import ConfigError, DataError, EnvError, ResetNeededError, RewardError
from turngym.rewards.base import EpisodeView, TurnView, reward
from turngym.types import Action, InvalidToolCall, Message, RewardSpec, Task

TASKS = [Task(id=f"t{n}", prompt=f"Find {n}.", answer=n) for n in range(5)]


def say(text: Any) -> Action:
    return Action(role="assistant", content=text)


def call(name: str, **arguments: Any) -> Action:
    return Action(role="assistant", content="", tool_calls=[make_call(name, arguments, turn=0)])


def unreadable() -> Action:
    broken: InvalidToolCall = {"text": "{", "error": "malformed_json", "span": (0, 1)}
    return Action(role="assistant", content="", invalid_tool_calls=[broken])


class Counter(TurnEnv):
    """Count up to the task's number, then say it."""

    habits = ("lie",)

    def tasks(self, split: str) -> TaskSet:
        return TaskSet(TASKS)

    def start(self, task: Task) -> None:
        self.state = {"count": 0, "dice": int(self.np_random.integers(1000))}

    @tool
    def count(self, by: int = 1) -> int:
        """Count up."""
        self.state["count"] += by
        return int(self.state["count"])

    @reward(weight=0.5, on="turn", low=0, high=1)
    def moved(self, turn: TurnView) -> float | None:
        return float(turn.results[0].ok) if turn.results else None

    @reward(weight=2.0)
    def correct(self, episode: EpisodeView) -> float:
        return float(episode.final_answer == str(episode.task.answer))

    @reward(weight=0)
    def counted(self, episode: EpisodeView) -> float:
        return float(episode.state["count"])

    def expert(self, rng: random.Random, habits: Mapping[str, float]) -> Action:
        if self.state["count"] < self.task.answer:
            return call("count")
        return say("0" if rng.random() < habits.get("lie", 0) else str(self.task.answer))


def start(task: str = "t2", **kwargs: Any) -> Counter:
    env = Counter(**kwargs)
    env.reset(seed=0, options={"task": task})
    return env


def test_reset_gives_prompt_task_and_tools() -> None:
    observation, info = Counter().reset(seed=0, options={"task": "t2"})
    assert observation == ({"role": "user", "content": "Find 2."},)
    assert info["task_id"] == "t2"
    assert [schema["function"]["name"] for schema in info["tools"]] == ["count"]


def test_a_task_can_be_given_whole() -> None:
    _, info = Counter().reset(options={"task": Task(id="own", prompt="?", answer=1)})
    assert info["task_id"] == "own"


def test_without_a_task_the_seed_chooses_one() -> None:
    drawn = {Counter().reset(seed=seed)[1]["task_id"] for seed in range(40)}
    assert drawn == {"t0", "t1", "t2", "t3", "t4"}  # fails by chance with 5 * 0.8**40 < 0.001


@pytest.mark.parametrize(
    ("options", "error"),
    [({"tsk": "t1"}, ConfigError), ({"task": 3}, ConfigError), ({"task": "t9"}, DataError)],
)
def test_bad_options_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Counter().reset(options=options)


def test_an_episode_pays_turn_rewards_at_once_and_outcome_rewards_at_the_end() -> None:
    env = start()
    observation, gained, terminated, truncated, info = env.step(call("count", by=2))
    assert observation == (
        {"role": "tool", "content": "2", "tool_call_id": "call_0", "name": "count"},
    )
    assert (gained, terminated, truncated) == (0.5, False, False)
    assert info["rewards"] == {"moved": 1.0}
    assert info["results"][0].value == 2
    assert "tools" not in info
    observation, gained, terminated, truncated, info = env.step(say("2"))
    assert (observation, gained, terminated, truncated) == ((), 2.0, True, False)
    assert info["rewards"] == {"moved": None, "correct": 1.0, "counted": 2.0}
    assert info["stop_reason"] == "completed"


def test_reward_specs_are_collected_from_the_class() -> None:
    assert Counter().reward_specs == {
        "moved": RewardSpec(name="moved", weight=0.5, level="turn", low=0, high=1),
        "correct": RewardSpec(name="correct", weight=2.0),
        "counted": RewardSpec(name="counted", weight=0),
    }


def test_rewards_are_inherited_overridden_and_added() -> None:
    @reward
    def brief(episode: EpisodeView) -> float:
        return float(len(episode.turns) < 3)

    class More(Counter):
        rewards = (brief,)

        @reward(weight=9.0)
        def correct(self, episode: EpisodeView) -> float:
            return 0.0

        def counted(self, episode: EpisodeView) -> float:
            return -1.0

    assert {name: spec.weight for name, spec in More().reward_specs.items()} == {
        "brief": 1.0,
        "moved": 0.5,
        "correct": 9.0,
    }


def test_step_needs_a_running_episode() -> None:
    env = Counter()
    with pytest.raises(ResetNeededError, match="reset"):
        env.step(say("2"))
    env.reset(options={"task": "t2"})
    env.step(say("2"))
    with pytest.raises(ResetNeededError, match="completed"):
        env.step(say("2"))
    env.reset()
    env.step(say("2"))


def test_the_last_turn_allowed_is_truncated_unless_it_completes() -> None:
    env = start(max_turns=2)
    env.step(call("count"))
    _, _, terminated, truncated, info = env.step(call("count"))
    assert (terminated, truncated, info["stop_reason"]) == (False, True, "max_turns")
    assert info["rewards"] == {"moved": 1.0, "correct": 0.0, "counted": 2.0}
    env = start(max_turns=1)
    _, _, terminated, truncated, info = env.step(say("2"))
    assert (terminated, truncated, info["stop_reason"]) == (True, False, "completed")


def test_unreadable_calls_in_a_row_end_the_episode() -> None:
    env = start(parse_limit=2)
    assert env.step(unreadable())[3] is False
    env.step(call("count"))
    assert env.step(unreadable())[3] is False
    _, _, terminated, truncated, info = env.step(unreadable())
    assert (terminated, truncated, info["stop_reason"]) == (False, True, "parse_limit")


def test_parse_limit_none_is_no_limit() -> None:
    env = start(parse_limit=None, max_turns=50)
    assert not any(env.step(unreadable())[3] for _ in range(40))


@pytest.mark.parametrize("kwargs", [{"max_turns": 0}, {"parse_limit": 0}])
def test_limits_are_positive(kwargs: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Counter(**kwargs)  # type: ignore[arg-type]


def test_an_unknown_argument_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="'max_turn'; did you mean 'max_turns'"):
        Counter(max_turn=3)  # type: ignore[call-arg]


def test_finish_scores_the_outcome_once() -> None:
    env = start()
    env.step(call("count"))
    assert env.finish("deadline") == {"correct": 0.0, "counted": 1.0}
    assert env.finish("max_tokens") == {"correct": 0.0, "counted": 1.0}
    with pytest.raises(ResetNeededError, match="deadline"):
        env.step(say("2"))


@pytest.mark.parametrize("reason", ["env_error", "cancelled", "bored"])
def test_finish_refuses_world_faults_and_unknown_reasons(reason: Any) -> None:
    with pytest.raises(ConfigError, match=reason):
        start().finish(reason)


def test_finish_needs_an_episode() -> None:
    with pytest.raises(ResetNeededError):
        Counter().finish("deadline")


def test_gymnasiums_time_limit_leaves_the_scoring_to_finish() -> None:
    turngym.register("test/Counter-v0", Counter)
    env = gymnasium.make("test/Counter-v0", max_episode_steps=1)
    env.reset(options={"task": "t1"})
    _, _, _, truncated, info = env.step(call("count"))
    assert truncated
    assert "stop_reason" not in info
    assert env.get_wrapper_attr("finish")("max_turns") == {"correct": 0.0, "counted": 1.0}


@pytest.mark.parametrize(
    ("value", "message"),
    [(float("nan"), "finite"), (float("inf"), "finite"), ("1", "number"), (KeyError("k"), "'k'")],
)
def test_a_reward_that_is_nonsense_raises_and_ends_the_episode(value: Any, message: str) -> None:
    class Odd(Counter):
        @reward
        def odd(self, episode: EpisodeView) -> Any:
            if isinstance(value, Exception):
                raise value
            return value

    env = Odd()
    env.reset(options={"task": "t2"})
    with pytest.raises(RewardError, match=message):
        env.step(say("2"))
    with pytest.raises(ResetNeededError):
        env.step(say("2"))


@pytest.mark.parametrize(
    "action",
    [
        "text",
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": "", "tool_calls": None},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "count"}}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "count", "arguments": "{}"}}],
        },
    ],
)
def test_what_is_no_action_is_the_callers_mistake(action: Any) -> None:
    env = start()
    with pytest.raises(DataError, match="assistant message"):
        env.step(action)
    env.step(say("2"))


def test_what_an_author_gets_wrong_is_an_env_error() -> None:
    class Broken(Counter):
        def prompt(self, task: Task) -> str:
            raise KeyError("missing")

    with pytest.raises(EnvError, match=r"Broken\.reset raised KeyError"):
        Broken().reset()


def test_the_final_answer_is_what_the_policy_said_last() -> None:
    seen: list[str | None] = []

    class Watch(Counter):
        @reward
        def watch(self, episode: EpisodeView) -> None:
            seen.append(episode.final_answer)

    def ends(*actions: Action) -> None:
        env = Watch(max_turns=len(actions))
        env.reset(options={"task": "t2"})
        for action in actions:
            env.step(action)

    ends(say("2"))
    ends(say([{"type": "text", "text": "2"}, {"type": "image"}, {"type": "text", "text": "!"}]))
    ends(say("  "))
    ends(call("count", by=2))
    ends(unreadable())
    assert seen == ["2", "2\n!", None, None, None]


class Dialogue(Counter):
    """The user asks again until the answer is `bye`; the tool `count` goes away once used."""

    def respond(self, turn: TurnView) -> Sequence[Message] | str | None:
        return None if turn.content == "bye" else "And?"

    def offered(self) -> list[str]:
        return [] if self.state["count"] else ["count"]

    def is_over(self, turn: TurnView) -> bool:
        return bool(self.state["count"] > 1)


def test_the_user_can_reply_and_tools_can_change() -> None:
    env = Dialogue()
    env.reset(options={"task": "t2"})
    observation, _, terminated, _, info = env.step(say("hello"))
    assert observation == ({"role": "user", "content": "And?"},)
    assert not terminated
    assert "tools" not in info
    *_, info = env.step(call("count"))
    assert info["tools"] == []
    *_, info = env.step(call("count"))
    assert info["results"][0].error == "unknown_tool"
    assert info["results"][0].text == "unknown tool 'count'; available: none"
    assert env.step(say("bye"))[2]


def test_offering_a_tool_that_is_not_there_is_the_authors_mistake() -> None:
    class Promise(Counter):
        def offered(self) -> list[str]:
            return ["count"] if self.state["count"] == 0 else ["cuont"]

    env = Promise()
    env.reset(options={"task": "t2"})
    with pytest.raises(EnvError, match="'cuont'"):
        env.step(call("count"))


def test_a_reply_without_messages_is_the_authors_mistake() -> None:
    class Mute(Counter):
        def respond(self, turn: TurnView) -> list[Message]:
            return []

    env = Mute()
    env.reset(options={"task": "t2"})
    with pytest.raises(EnvError, match="return None to end"):
        env.step(say("hello"))


def test_an_environment_without_tasks_says_so() -> None:
    with pytest.raises(EnvError, match=r"TurnEnv must define tasks\(split\)"):
        TurnEnv().reset()


def test_a_tool_call_can_end_the_task() -> None:
    env = Dialogue()
    env.reset(options={"task": "t2"})
    observation, _, terminated, _, info = env.step(call("count", by=2))
    assert len(observation) == 1
    assert terminated
    assert info["stop_reason"] == "completed"


def test_the_expert_is_asked_for_the_current_state() -> None:
    env = start("t1")
    rng = random.Random(0)
    assert env.demonstrate(rng, {})["tool_calls"][0]["function"]["name"] == "count"
    env.step(call("count"))
    assert env.demonstrate(rng, {}) == say("1")
    assert env.demonstrate(rng, {"lie": 1.0}) == say("0")


@pytest.mark.parametrize("habits", [{"lies": 0.1}, {"lie": 1.5}])
def test_unknown_habits_and_odd_probabilities_are_refused(habits: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        start().demonstrate(random.Random(0), habits)


def test_an_environment_without_an_expert_says_so() -> None:
    class Bare(TurnEnv):
        def tasks(self, split: str) -> TaskSet:
            return TaskSet(TASKS)

    env = Bare()
    env.reset()
    assert not env.has_expert
    assert Counter().has_expert
    with pytest.raises(EnvError, match="Bare has no expert"):
        env.demonstrate(random.Random(0), {})


def test_a_snapshot_is_exact_and_can_be_used_again_and_elsewhere() -> None:
    env, sister = start(), start("t4")
    env.step(call("count"))
    snapshot = env.snapshot()
    env.step(call("count", by=7))
    env.np_random.integers(10)
    env.step(say("2"))
    draws = []
    for place in (env, sister, env):
        place.restore(snapshot)
        assert place.state["count"] == 1
        assert len(place.turns) == 1
        assert place.task.id == "t2"
        place.step(call("count", by=4))
        draws.append(int(place.np_random.integers(10**9)))
        assert place.step(say("2"))[4]["rewards"]["counted"] == 5.0
    assert len(set(draws)) == 1


def test_a_snapshot_belongs_to_one_kind_of_environment() -> None:
    with pytest.raises(ConfigError, match="Counter cannot be restored in Dialogue"):
        Dialogue().restore(start().snapshot())


def test_two_tools_need_two_names() -> None:
    @tool(name="count")
    def other() -> int:
        """Count differently."""
        return 0

    class Twice(Counter):
        tools = (other,)

    with pytest.raises(ConfigError, match="two tools are called 'count'"):
        Twice()


def test_what_is_returned_can_be_changed_without_harm() -> None:
    env = start()
    _, info = env.reset(options={"task": "t2"})
    info["tools"].clear()
    observation, *_, info = env.step(call("count"))
    observation[0]["content"] = "forged"
    info["rewards"]["moved"] = 99.0
    assert env.turns[0].results[0].text == "1"
    assert "tools" not in env.step(call("count"))[4]
