import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest

from turngym.agents.base import Completion
from turngym.agents.config import RolloutConfig
from turngym.agents.plain import PlainRenderer
from turngym.agents.rollout import EnvSource, MessageAgent, RolloutEngine, TokenAgent
from turngym.agents.scripted import OraclePolicy, RandomPolicy, ScriptedPolicy
from turngym.errors import CircuitBreakerError, ConfigError, EngineError
from turngym.types import Group, Trajectory

Relay = Callable[..., EnvSource]

CALL = 'hm<tool_call>{"name": "count", "arguments": {}}</tool_call>'
PLAIN = PlainRenderer()


def engine(
    source: EnvSource,
    policy: Any = None,
    *,
    refill: Callable[[int], int] | None = None,
    **config: Any,
) -> RolloutEngine:
    policy = policy or ScriptedPolicy([CALL, "yes"], encode=PLAIN.encode)
    settings = RolloutConfig(**({"group_size": 2} | config))
    return RolloutEngine(source, TokenAgent.factory(policy, PLAIN), settings, seed=7, refill=refill)


def random_policy(latency: float = 0.0) -> ScriptedPolicy:
    def say(ids: Any, turn: int, rng: random.Random) -> str:
        return rng.choice([CALL, CALL, "yes", "no"]) + "!" * rng.randint(0, 3)

    return ScriptedPolicy(
        say, encode=PLAIN.encode, latency=lambda turn, rng: latency * rng.random()
    )


def same(one: Trajectory, other: Trajectory) -> None:
    for name in ("ids", "role", "turn", "version", "segment"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert np.array_equal(one.logp, other.logp, equal_nan=True)
    for name in ("task_id", "group_id", "seed", "sample", "status", "rewards", "prompt"):
        assert getattr(one, name) == getattr(other, name), name
    assert [turn.message for turn in one.turns] == [turn.message for turn in other.turns]
    assert [turn.rewards for turn in one.turns] == [turn.rewards for turn in other.turns]


def trajectories(groups: list[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def test_groups_are_complete_and_come_in_the_order_asked(relay: Relay) -> None:
    with engine(relay(), random_policy(latency=0.01), group_size=3) as rollouts:
        groups = rollouts.run([5, 2, 9])
    assert [group.ordinal for group in groups] == [5, 2, 9]
    assert [group.task_id for group in groups] == ["task-5", "task-2", "task-9"]
    assert [[one.sample for one in group.trajectories] for group in groups] == [[0, 1, 2]] * 3


def test_members_of_a_group_start_from_one_state_and_draw_differently(relay: Relay) -> None:
    with engine(relay(), random_policy(), group_size=8) as rollouts:
        (group,) = rollouts.run([5])
    assert len({one.prompt[0]["content"] for one in group.trajectories}) == 1
    assert len({one.ids.tobytes() for one in group.trajectories}) > 1


class CountingRenderer(PlainRenderer):
    starts = 0

    def start(self, messages: Any, tools: Any) -> Any:
        self.starts += 1
        return super().start(messages, tools)


def test_the_prompt_of_a_group_is_rendered_once(relay: Relay) -> None:
    renderer = CountingRenderer()
    agent = TokenAgent.factory(random_policy(), renderer)
    with RolloutEngine(relay(), agent, RolloutConfig(group_size=6), seed=7) as rollouts:
        rollouts.run([0, 1])
    assert renderer.starts == 2


def test_trajectories_do_not_depend_on_concurrency_or_order(relay: Relay) -> None:
    with engine(relay(), random_policy(latency=0.002), concurrency=1) as rollouts:
        alone = rollouts.run(range(12))
    with engine(relay(), random_policy(latency=0.002), concurrency=64, threads=3) as rollouts:
        reverse = rollouts.run(range(11, -1, -1))
    for one, other in zip(alone, reversed(reverse), strict=True):
        for a, b in zip(one.trajectories, other.trajectories, strict=True):
            same(a, b)


def test_the_async_door_gives_what_the_sync_one_does(relay: Relay) -> None:
    with engine(relay(), random_policy()) as rollouts:
        sync = rollouts.run([0, 1])

    async def main() -> list[Group]:
        with engine(relay(), random_policy()) as rollouts:
            return await rollouts.collect([0, 1])

    for one, other in zip(trajectories(sync), trajectories(asyncio.run(main())), strict=True):
        same(one, other)


def test_tasks_come_round_again_after_the_last(relay: Relay) -> None:
    with engine(relay(num_tasks=3)) as rollouts:
        groups = rollouts.run([2, 3, 7])
    assert [group.task_id for group in groups] == ["task-2", "task-0", "task-1"]


def test_nothing_asked_is_nothing_done_and_twice_asked_is_refused(relay: Relay) -> None:
    with engine(relay()) as rollouts:
        assert rollouts.run([]) == []
        with pytest.raises(ConfigError, match="asked once"):
            rollouts.run([1, 1])


def test_a_source_without_tasks_is_refused(relay: Relay) -> None:
    with pytest.raises(ConfigError, match="no tasks"):
        relay(num_tasks=0)


def test_environments_are_reused_by_later_episodes(relay: Relay) -> None:
    source = relay()
    made: list[Any] = []
    make = source.make

    def counted() -> Any:
        made.append(make())
        return made[-1]

    source.make = counted  # type: ignore[method-assign]
    with engine(source, concurrency=3) as rollouts:
        rollouts.run(range(10))
        rollouts.run(range(10, 20))
    assert len(made) == 3


def test_a_world_fault_is_retried_in_a_fresh_environment_with_the_same_seed(relay: Relay) -> None:
    resets: list[Any] = []
    failing = iter([True])

    def hook(env: Any, content: str) -> None:
        if next(failing, False):
            raise OSError("connection reset")

    source = relay(log=resets, hook=hook)
    with engine(source, group_size=1) as rollouts:
        (group,) = rollouts.run([4])
    assert group.trajectories[0].status == "completed"
    assert [entry for entry in resets if entry[0] == "reset"] == [resets[0], resets[0]]
    assert rollouts.stats.retries == 1
    assert rollouts.stats.dropped_groups == 0


def test_a_group_that_keeps_failing_is_dropped_whole_and_another_task_takes_its_place(
    relay: Relay,
) -> None:
    source = relay(faults={0: "reward"}, fault_tasks=("task-1",))
    with engine(source, group_size=2, failure_rate=1.0) as rollouts:
        groups = rollouts.run([0, 1, 2])
    assert [group.ordinal for group in groups] == [0, 3, 2]
    assert {one.status for one in trajectories(groups)} == {"completed"}
    assert rollouts.stats.dropped_groups == 1
    assert rollouts.stats.statuses["reward_error"] >= 1
    assert rollouts.stats.failures == rollouts.stats.statuses["reward_error"]


def test_the_callers_stream_fills_dropped_groups(relay: Relay) -> None:
    stream = iter([40, 41])
    source = relay(faults={0: "env"}, fault_tasks=("task-1", "task-40"))
    with engine(source, refill=lambda _: next(stream), failure_rate=1.0) as rollouts:
        groups = rollouts.run([0, 1])
    assert [group.ordinal for group in groups] == [0, 41]


def test_a_stream_that_repeats_itself_is_refused(relay: Relay) -> None:
    source = relay(faults={0: "env"}, fault_tasks=("task-1",))
    with (
        engine(source, refill=lambda _: 0, failure_rate=1.0) as rollouts,
        pytest.raises(ConfigError, match="refill gave ordinal 0"),
    ):
        rollouts.run([0, 1])


def test_a_broken_world_opens_the_breaker_which_names_the_cause(relay: Relay) -> None:
    with (
        engine(relay(faults={0: "env"})) as rollouts,
        pytest.raises(CircuitBreakerError, match=r"8 of the last 8.*env_error.*the disk is gone"),
    ):
        rollouts.run(range(50))


class DeadServer(ScriptedPolicy):
    async def generate(self, prompt_ids: Any, sampling: Any, **kwargs: Any) -> Completion:
        raise EngineError("connection refused")


def test_a_dead_sampler_stops_the_run_instead_of_scoring_zeros(relay: Relay) -> None:
    with (
        engine(relay(), DeadServer(["x"], encode=PLAIN.encode)) as rollouts,
        pytest.raises(CircuitBreakerError, match=r"engine_error.*connection refused"),
    ):
        rollouts.run(range(50))


def test_a_wrong_setting_stops_the_run_at_once(relay: Relay) -> None:
    with (
        engine(relay(), ScriptedPolicy(["text without encode"])) as rollouts,
        pytest.raises(ConfigError, match="encode"),
    ):
        rollouts.run(range(50))


def test_a_hanging_environment_holds_up_nobody_else(relay: Relay) -> None:
    source = relay(faults={0: "hang"}, fault_tasks=("task-1",))
    started = time.monotonic()
    with engine(source, env_timeout_s=0.2, retries=0, threads=2, failure_rate=1.0) as rollouts:
        groups = rollouts.run(range(6))
        assert time.monotonic() - started < 1.2
    assert len(groups) == 6
    assert rollouts.stats.statuses["env_error"] >= 1


def test_cancel_ends_a_run_from_another_thread_and_the_engine_goes_on(relay: Relay) -> None:
    policy = ScriptedPolicy([CALL, "yes"], encode=PLAIN.encode, latency=lambda turn, rng: 30 * turn)
    with engine(relay(), policy) as rollouts:
        timer = threading.Timer(0.2, rollouts.cancel)
        timer.start()
        started = time.monotonic()
        with pytest.raises(CancelledError):
            rollouts.run([0])
        assert time.monotonic() - started < 5
        timer.join()
        policy._latency = 0.0
        assert rollouts.run([1])[0].trajectories[0].status == "completed"


def test_a_closed_engine_says_so(relay: Relay) -> None:
    rollouts = engine(relay())
    rollouts.run([0])
    rollouts.close()
    rollouts.close()
    with pytest.raises(EngineError, match="closed"):
        rollouts.run([1])


class BlockingPolicy(ScriptedPolicy):
    async def generate(self, prompt_ids: Any, sampling: Any, **kwargs: Any) -> Completion:
        time.sleep(0.5)
        return await super().generate(prompt_ids, sampling, **kwargs)


def test_what_blocks_the_loop_is_named(relay: Relay, caplog: pytest.LogCaptureFixture) -> None:
    with engine(
        relay(), BlockingPolicy(["yes"], encode=PLAIN.encode), group_size=1, lag_s=0.1
    ) as e:
        e.run([0])
    assert "blocked for" in caplog.text
    assert "test_engine.py" in caplog.text
    assert "in generate" in caplog.text


def test_slow_tools_run_side_by_side_and_do_not_block_the_loop(
    relay: Relay, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(relay(delay_s=0.25), group_size=8, lag_s=0.1) as rollouts:
        started = time.monotonic()
        rollouts.run(range(2))
        assert time.monotonic() - started < 2.0
    assert "blocked" not in caplog.text


def test_many_truncated_episodes_are_warned_about(
    relay: Relay, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(relay(max_turns=2), ScriptedPolicy([CALL], encode=PLAIN.encode)) as rollouts:
        rollouts.run([0])
        rollouts.run([1])
    assert caplog.text.count("2 of 2 episodes were truncated (max_turns 2)") == 1
    assert caplog.text.count("were truncated") == 1
    assert rollouts.stats.truncated_frac == 1.0


def test_the_warning_of_truncated_episodes_counts_those_of_its_batch(
    relay: Relay, caplog: pytest.LogCaptureFixture
) -> None:
    def say(ids: Any, turn: int, rng: random.Random) -> str:
        return CALL if is_stuck else "yes"

    with engine(relay(max_turns=2), ScriptedPolicy(say, encode=PLAIN.encode)) as rollouts:
        is_stuck = False
        rollouts.run([0])
        assert "truncated" not in caplog.text
        is_stuck = True
        rollouts.run([1])
    assert "2 of 2 episodes were truncated (max_turns 2):" in caplog.text


def test_progress_counts_up_to_the_total(relay: Relay) -> None:
    seen: list[tuple[int, int]] = []
    with engine(relay(), group_size=2) as rollouts:
        rollouts.progress = lambda done, total: seen.append((done, total))
        rollouts.run([0, 1])
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_stats_count_tokens_turns_and_tool_errors(relay: Relay) -> None:
    with engine(relay(), ScriptedPolicy([CALL, "yes"], encode=PLAIN.encode)) as rollouts:
        groups = rollouts.run([0])
    metrics = rollouts.stats.metrics()
    assert metrics["rollout/turns"] == 2
    assert metrics["rollout/sampled_tokens"] == len(CALL) + 1 + 4
    assert rollouts.stats.context_tokens == sum(
        int((~one.sampled).sum()) for one in trajectories(groups)
    )
    assert metrics["rollout/env_max_s"] >= metrics["rollout/env_s"] > 0


def test_the_oracle_solves_and_chance_plays_by_the_schemas(relay: Relay) -> None:
    config = RolloutConfig(group_size=2)
    source = relay()
    with RolloutEngine(source, MessageAgent.factory(OraclePolicy()), config, seed=0) as rollouts:
        assert {one.rewards["correct"] for one in trajectories(rollouts.run([0]))} == {1.0}
    with RolloutEngine(source, MessageAgent.factory(RandomPolicy()), config, seed=0) as rollouts:
        found = trajectories(rollouts.run([0, 1, 2]))
    assert {one.rewards["correct"] for one in found} == {0.0}
    assert not any(one.has_tokens for one in found)
    assert any(turn.message.get("tool_calls") for one in found for turn in one.turns)


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        left = [
            t for t in threading.enumerate() if t not in before and t.name.startswith("turngym")
        ]
        if not left:
            return
        time.sleep(0.01)
    raise AssertionError(f"threads left: {left}")
