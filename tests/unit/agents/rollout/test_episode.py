import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngym.agents.base import Completion, Sampling
from turngym.agents.config import RolloutConfig
from turngym.agents.plain import PlainRenderer
from turngym.agents.rollout import DemoAgent, EnvSource, RolloutEngine, TokenAgent
from turngym.agents.scripted import ScriptedPolicy
from turngym.errors import ConfigError, TemplateError, WeightSyncError
from turngym.types import Action, Message, TokenRole, Trajectory

Relay = Callable[..., EnvSource]

CALL = 'hm<tool_call>{"name": "count", "arguments": {}}</tool_call>'
PLAIN = PlainRenderer()
SAMPLED = (TokenRole.REASONING, TokenRole.ACTION)


def play(
    source: EnvSource,
    script: Any,
    *,
    renderer: Any = PLAIN,
    policy: Any = None,
    sampling: Sampling | None = None,
    **config: Any,
) -> Trajectory:
    policy = policy or ScriptedPolicy(script, encode=PLAIN.encode)
    agent = TokenAgent.factory(policy, renderer, sampling)
    settings = RolloutConfig(**({"group_size": 1, "retries": 0, "failure_rate": 1.0} | config))
    found: list[Trajectory] = []
    with RolloutEngine(source, agent, settings, seed=7) as engine:
        play = engine.play([engine.seat(3, 0)], lambda _, done: found.append(done), total=1)
        engine.wait(play)
    return found[0]


class TinyRenderer(PlainRenderer):
    """Vocabulary of the retokenisation case: 1 `he`, 2 `llo`, 3 `hello`, 4 `<end>`, 5 newline."""

    END = 4

    def start(self, messages: Sequence[Message], tools: Any) -> Any:
        return np.array([3], np.int32), np.array([TokenRole.PROMPT], np.int8)

    def extend(
        self, history: Sequence[Message], new: Sequence[Message], tools: Any, *, last_id: int
    ) -> Any:
        ids = ([] if last_id == 4 else [4]) + [5, 3]
        roles = [TokenRole.GLUE] * (len(ids) - 1) + [TokenRole.OBSERVATION]
        return np.array(ids, np.int32), np.array(roles, np.int8)

    def parse(self, ids: Any, tools: Any = None, *, finish_reason: Any = None) -> Action:
        call: Any = {"id": "a", "type": "function", "function": {"name": "count", "arguments": {}}}
        return Message(role="assistant", content="", tool_calls=[call])

    def roles(self, ids: Any) -> Any:
        return np.full(len(ids), TokenRole.REASONING, np.int8)


def test_sampled_ids_are_recorded_as_sampled_and_never_merged(relay: Relay) -> None:
    record = play(relay(max_turns=2), [[1, 2, 4]], renderer=TinyRenderer())
    assert record.ids.tolist() == [3, 1, 2, 4, 5, 3, 1, 2, 4]
    assert record.sampled.tolist() == [0, 1, 1, 1, 0, 0, 1, 1, 1]


def test_a_turn_without_an_end_token_gets_one_that_is_not_sampled(relay: Relay) -> None:
    record = play(relay(max_turns=2), [[1, 2], [1, 2, 4]], renderer=TinyRenderer())
    assert record.ids.tolist() == [3, 1, 2, 4, 5, 3, 1, 2, 4]
    assert record.sampled.tolist() == [0, 1, 1, 0, 0, 0, 1, 1, 1]
    assert record.role.tolist()[3] == TokenRole.GLUE


def test_rewards_are_split_by_level_and_the_last_answer_is_not_rendered(relay: Relay) -> None:
    record = play(relay(), [CALL, "yes"])
    assert record.status == "completed"
    assert [turn.rewards for turn in record.turns] == [{"valid": 1.0}, {"valid": 0.0}]
    assert record.rewards == {"correct": 1.0}
    assert record.turns[0].observation[0]["content"] == "ok 1"
    assert record.turns[-1].stop == len(record.ids)
    assert record.metadata == {"ordinal": 3}


def test_a_call_cut_off_by_the_token_limit_is_not_executed(relay: Relay) -> None:
    log: list[Any] = []
    steps: list[str] = []
    source = relay(log=log, hook=lambda env, content: steps.append(content))
    record = play(source, [CALL + CALL], max_tokens=len(CALL) + 4)
    assert (record.status, record.truncated, steps) == ("max_tokens", True, [])
    assert record.turns[0].finish_reason == "length"
    assert record.turns[0].rewards == {}
    assert record.rewards == {"correct": 0.0}
    assert log[-1] == ("finish", "task-3", "max_tokens")
    assert record.num_sampled == len(CALL) + 4


def test_the_room_left_in_the_context_caps_the_completion(relay: Relay) -> None:
    whole = play(relay(), [CALL, "yes"])
    start = whole.turns[1].start
    record = play(relay(), [CALL, "yes"], max_context=start + 2)
    assert record.status == "context_full"
    assert record.turns[1].finish_reason == "length"
    assert len(record.ids) == start + 2
    assert record.rewards == {"correct": 0.0}


def test_an_observation_that_leaves_no_room_ends_the_episode_unrecorded(relay: Relay) -> None:
    whole = play(relay(), [CALL, "yes"])
    first, second = whole.turns
    record = play(relay(), [CALL, "yes"], max_context=second.start)
    assert record.status == "context_full"
    assert len(record.ids) == first.stop
    assert len(record.turns) == 1
    assert record.turns[0].observation


def test_a_prompt_that_fills_the_context_is_a_truncated_episode_without_turns(
    relay: Relay,
) -> None:
    record = play(relay(), ["yes"], max_context=5)
    assert (record.status, record.turns, record.num_sampled) == ("context_full", (), 0)
    assert record.has_tokens
    assert record.rewards == {"correct": 0.0}


def test_a_wrapper_that_ends_the_episode_does_not_leave_it_unscored(relay: Relay) -> None:
    log: list[Any] = []
    record = play(relay(max_turns=2, self_ending=False, log=log), [CALL])
    assert (record.status, record.rewards) == ("max_turns", {"correct": 0.0})
    assert log[-1] == ("finish", "task-3", "max_turns")


def test_a_deadline_while_sampling_keeps_the_turns_played_and_scores_them(relay: Relay) -> None:
    policy = ScriptedPolicy(
        [CALL, "yes"], encode=PLAIN.encode, latency=lambda turn, rng: 30.0 * turn
    )
    record = play(relay(), None, policy=policy, deadline_s=0.3)
    assert (record.status, record.rewards) == ("deadline", {"correct": 0.0})
    assert len(record.turns) == 1
    assert not record.sampled[record.turns[0].stop :].any()


def test_a_deadline_during_a_tool_lets_it_finish_and_plays_no_further_turn(relay: Relay) -> None:
    record = play(relay(delay_s=0.3), [CALL], deadline_s=0.2)
    assert (record.status, len(record.turns)) == ("deadline", 1)
    assert record.turns[0].rewards == {"valid": 1.0}
    assert record.rewards == {"correct": 0.0}


def test_deterministic_runs_have_no_deadline() -> None:
    config = RolloutConfig(deterministic=True, deadline_s=1.0)
    assert config.episode_deadline_s is None


def test_a_template_that_rewrites_history_gives_one_segment_a_turn(relay: Relay) -> None:
    renderer = PlainRenderer(append_only=False)
    record = play(relay(), [CALL, "yes"], renderer=renderer)
    assert sorted(set(record.segment.tolist())) == [0, 1]
    second = record.segment == 1
    start = record.turns[1].start
    assert record.role[second][: start - int(np.argmax(second))].tolist() == [0] * (
        start - int(np.argmax(second))
    )
    assert renderer.decode(record.ids[second]).endswith("ok 1yes")


def altered(source: EnvSource, name: str, change: Callable[[Any], Any]) -> EnvSource:
    """Change what a method of the source's environments returns."""
    make = source.make

    def made() -> Any:
        env = make()
        method = getattr(env.unwrapped, name)
        setattr(env.unwrapped, name, lambda *args: change(method(*args)))
        return env

    source.make = made  # type: ignore[method-assign]
    return source


def with_info(**entries: Any) -> Callable[[Any], Any]:
    return lambda result: (*result[:4], result[4] | entries)


def test_new_tools_start_a_fresh_context_that_shows_them(relay: Relay) -> None:
    source = altered(relay(), "step", with_info(tools=[{"function": {"name": "new"}}]))
    record = play(source, [CALL, "yes"])
    second = PLAIN.decode(record.ids[record.segment == 1])
    assert second.startswith('[{"function": {"name": "new"}}]')
    assert second.endswith("yes")


class WatchingPolicy(ScriptedPolicy):
    """Keeps what it was shown and what it said."""

    def __init__(self, script: Any) -> None:
        super().__init__(script)
        self.seen: list[tuple[list[int], Completion]] = []

    async def generate(self, prompt_ids: Any, sampling: Any, **kwargs: Any) -> Completion:
        shown = list(prompt_ids)
        completion = await super().generate(prompt_ids, sampling, **kwargs)
        self.seen.append((shown, completion))
        return completion


lines = st.lists(
    st.one_of(
        st.just([*CALL.encode(), 256]),
        st.just(list(CALL.encode())),
        st.lists(st.integers(0, 255), min_size=1, max_size=30),
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=40)
@given(script=lines, append_only=st.booleans(), max_context=st.integers(60, 400))
def test_the_record_is_what_the_sampler_saw_and_said(
    script: list[list[int]], append_only: bool, max_context: int
) -> None:
    policy = WatchingPolicy(script)
    record = play(
        EnvSource("test/Relay-v0"),
        None,
        policy=policy,
        renderer=PlainRenderer(append_only=append_only),
        max_context=max_context,
        max_tokens=80,
    )
    assert len(policy.seen) == len(record.turns)
    for turn, (shown, completion) in zip(record.turns, policy.seen, strict=True):
        rows = slice(turn.start, turn.stop)
        assert record.ids[rows].tolist() == completion.ids.tolist()
        assert record.logp[rows].tolist() == completion.logp.tolist()
        context = record.ids[: turn.start][
            record.segment[: turn.start] == record.segment[turn.start]
        ]
        assert context.tolist() == shown
        assert len(shown) + len(completion.ids) <= max_context
    assert record.num_sampled == sum(len(said.ids) for _, said in policy.seen)
    assert set(record.role[record.sampled].tolist()) <= set(SAMPLED)


def test_demonstrations_are_trainable_without_log_probabilities(relay: Relay) -> None:
    agent = DemoAgent.factory(PLAIN, {"guess": 0.0})
    with RolloutEngine(relay(), agent, RolloutConfig(group_size=2), seed=1) as engine:
        (group,) = engine.run([0])
    record = group.trajectories[0]
    assert record.source == "demo"
    assert np.isnan(record.logp).all()
    assert record.rewards == {"correct": 1.0}
    said = PLAIN.decode(record.ids[record.turns[0].start : record.turns[0].stop])
    assert said == 'hm<tool_call>{"name": "count", "arguments": {"n": 0}}</tool_call>'
    assert record.turns[0].message["tool_calls"][0]["function"]["arguments"] == {"n": 0}


def test_a_demonstration_that_does_not_fit_is_not_recorded(relay: Relay) -> None:
    agent = DemoAgent.factory(PLAIN)
    config = RolloutConfig(group_size=1, max_context=120)
    with RolloutEngine(relay(), agent, config, seed=1) as engine:
        record = engine.run([0])[0].trajectories[0]
    assert record.status == "context_full"
    assert record.num_sampled == 0


class BrokenPolicy(ScriptedPolicy):
    """Returns completions that break a rule."""

    def __init__(self, **change: Any) -> None:
        super().__init__([[65, 256]])
        self._change = change

    async def generate(self, prompt_ids: Any, sampling: Any, **kwargs: Any) -> Completion:
        return replace(await super().generate(prompt_ids, sampling, **kwargs), **self._change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"finish_reason": "abort"}, "aborted"),
        ({"ids": np.empty(0, np.int32)}, "1 to 512 tokens"),
        ({"logp": np.zeros(1, np.float32)}, "2 tokens with 1 log-probabilities"),
        ({"version_spans": ((0, 1),)}, "versions for 1"),
        ({"logp": np.ones(2, np.float32)}, "must not be positive"),
        ({"logp": np.full(2, np.nan, np.float32)}, "logp is finite"),
    ],
)
def test_an_impossible_completion_is_the_engines_fault(
    relay: Relay, change: dict[str, Any], words: str
) -> None:
    record = play(relay(), None, policy=BrokenPolicy(**change))
    assert record.status == "engine_error"
    assert words in str(record.error)
    assert not record.has_tokens
    assert record.rewards == {}


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("env", "env_error", "EnvError: the disk is gone"),
        ("reward", "reward_error", "ZeroDivisionError"),
        ("lost key", "env_error", "KeyError: 'lost key'"),
        ("stop", "env_error", "StopIteration"),
        ("exit", "env_error", "SystemExit: 3"),
    ],
)
@pytest.mark.parametrize("turn", [-1, 1])
def test_a_fault_of_the_world_is_a_status_with_its_cause(
    relay: Relay, fault: str, status: str, words: str, turn: int
) -> None:
    record = play(relay(faults={turn: fault}), [CALL, "yes"])
    assert record.status == status
    assert words in str(record.error)
    assert (record.rewards, record.has_tokens) == ({}, False)
    assert len(record.turns) == max(turn, 0)


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        (with_info(rewards={"speed": 1.0}), "env_error", "'speed' is not in the environment's"),
        (with_info(rewards={"valid": float("nan")}), "reward_error", "must be finite, got nan"),
        (with_info(rewards={"valid": float("inf")}), "reward_error", "must be finite, got inf"),
        (with_info(stop_reason="env_error"), "env_error", "must be a trajectory status"),
        (with_info(stop_reason="tired"), "env_error", "got 'tired'"),
        (lambda result: (*result[:4], {}), "env_error", "info['rewards']"),
        (lambda result: result[:4], "env_error", "step must return"),
    ],
)
def test_a_step_that_breaks_the_contract_is_the_worlds_fault(
    relay: Relay, change: Any, status: str, words: str
) -> None:
    record = play(altered(relay(), "step", change), ["yes"])
    assert record.status == status
    assert words in str(record.error)


def test_finish_scores_outcomes_only(relay: Relay) -> None:
    source = altered(relay(), "finish", lambda _: {"valid": 1.0})
    record = play(source, [CALL], max_tokens=3)
    assert record.status == "env_error"
    assert "outcome rewards only" in str(record.error)


def test_scalars_of_the_info_are_kept_and_the_rest_is_not(relay: Relay) -> None:
    source = altered(relay(), "step", with_info(score=0.5, note="x", state=object()))
    record = play(source, [CALL, "yes"])
    assert record.turns[0].info == {
        "score": 0.5,
        "note": "x",
        "results": [{"name": "count", "error": None}],
    }


def test_tool_errors_are_counted_with_and_without_results(relay: Relay) -> None:
    broken = '<tool_call>{"name": </tool_call>'
    record = play(relay(), [broken, "yes"])
    assert record.turns[0].tool_errors == 0  # its results are empty: nothing was called
    bare = altered(relay(), "step", lambda r: (*r[:4], {"rewards": r[4]["rewards"]}))
    assert play(bare, [broken]).turns[0].tool_errors == 1


class StalePolicy(ScriptedPolicy):
    async def generate(self, prompt_ids: Any, sampling: Any, **kwargs: Any) -> Completion:
        raise WeightSyncError("weights of version 3, expected 4")


def test_stale_weights_stop_the_run(relay: Relay) -> None:
    with pytest.raises(WeightSyncError, match="expected 4"):
        play(relay(), None, policy=StalePolicy([[1]]), retries=5)


def test_a_setting_that_is_wrong_for_one_action_does_not_stop_the_run(relay: Relay) -> None:
    def hook(env: Any, content: str) -> None:
        raise ConfigError("precision must be positive, got -1")

    record = play(relay(hook=hook), [CALL])
    assert record.status == "env_error"
    assert "precision must be positive" in str(record.error)


def test_a_template_that_refuses_a_dialogue_is_the_engines_fault(relay: Relay) -> None:
    class Refusing(PlainRenderer):
        def extend(self, *args: Any, **kwargs: Any) -> Any:
            raise TemplateError("roles must alternate")

    record = play(relay(), [CALL], renderer=Refusing())
    assert record.status == "engine_error"
    assert "roles must alternate" in str(record.error)


def test_demonstrations_need_an_expert(relay: Relay) -> None:
    source = relay()
    source.has_expert = False
    with (
        RolloutEngine(source, DemoAgent.factory(PLAIN), seed=1) as engine,
        pytest.raises(ConfigError, match="no expert"),
    ):
        engine.run([0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"group_size": 0},
        {"concurrency": 0},
        {"max_tokens": 0},
        {"max_context": 0},
        {"threads": 0},
        {"deadline_s": 0.0},
        {"env_timeout_s": float("inf")},
        {"lag_s": -1.0},
        {"retries": -1},
        {"failure_rate": 1.5},
    ],
)
def test_impossible_settings_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RolloutConfig(**wrong)


def test_a_source_needs_a_turn_env() -> None:
    with pytest.raises(ConfigError, match="CartPole-v1 has no `task_set`"):
        EnvSource("CartPole-v1")


def test_an_outcome_that_cannot_be_scored_is_a_reward_error(relay: Relay) -> None:
    record = play(relay(faults={99: "x"}), ["yes"])
    assert record.status == "reward_error"
    assert "no verdict" in str(record.error)


def test_an_environment_that_hangs_is_abandoned_and_its_thread_replaced(relay: Relay) -> None:
    record = play(relay(faults={0: "hang"}), [CALL, "yes"], env_timeout_s=0.2, threads=1)
    assert record.status == "env_error"
    assert "still running after 0.2 s" in str(record.error)


def test_cancellation_is_not_swallowed(relay: Relay) -> None:
    policy = ScriptedPolicy(["yes"], encode=PLAIN.encode, latency=30.0)

    async def main() -> None:
        with RolloutEngine(relay(), TokenAgent.factory(policy, PLAIN), seed=1) as engine:
            task = asyncio.create_task(engine.collect([0]))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
