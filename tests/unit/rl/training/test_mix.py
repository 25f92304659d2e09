"""Several environments in one run, each with its share."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngym.agents.config import RolloutConfig
from turngym.agents.mixed_source import MixedSource, read_env
from turngym.agents.rollout import EnvSource
from turngym.agents.store import TrajectoryStore
from turngym.errors import ConfigError
from turngym.rl.config import EvalSchedule, ModelConfig, OptimConfig, TrainConfig
from turngym.rl.presets import preset
from turngym.rl.session import train
from turngym.rl.stream import MixedStream, TaskStream
from turngym.rl.worlds import Worlds

CALCULATOR, LOOKUP = "turngym/Calculator-v0", "turngym/Lookup-v0"


def test_shares_are_dealt_in_turn_and_each_set_in_its_own_order() -> None:
    stream = MixedStream([5, 3], [2.0, 1.0], seed=4)
    drawn = stream.take(12)
    assert [ordinal % 2 for ordinal in drawn] == [0, 1, 0] * 4
    own = [[ordinal // 2 for ordinal in drawn if ordinal % 2 == kind] for kind in (0, 1)]
    assert own[0] == TaskStream(5, seed=4).take(8)
    assert own[1] == TaskStream(3, seed=4).take(4)


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    count=st.integers(1, 60),
    cut=st.integers(0, 60),
)
def test_every_stretch_keeps_the_shares_and_a_resume_goes_on(
    weights: list[int], count: int, cut: int
) -> None:
    sizes = [7 + kind for kind in range(len(weights))]
    drawn = MixedStream(sizes, weights, seed=1).take(count)
    assert len(set(drawn)) == count
    for kind, weight in enumerate(weights):
        expected = count * weight / sum(weights)
        found = sum(ordinal % len(weights) == kind for ordinal in drawn)
        assert abs(found - expected) < len(weights)
    cut = min(cut, count)
    first, second = (MixedStream(sizes, weights, seed=1) for _ in range(2))
    assert first.take(cut) == drawn[:cut]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.take(count - cut) == drawn[cut:]


def test_another_mix_is_refused_on_resume() -> None:
    saved = MixedStream([5, 3], [2.0, 1.0], seed=4).state_dict()
    with pytest.raises(ConfigError, match=r"the mix .*\[0, 1, 0\].* this run .*\[0, 1\]"):
        MixedStream([5, 3], [1.0, 1.0], seed=4).load_state_dict(saved)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a/B-v0", ("a/B-v0", {})),
        ("a/B-v0?n=3&ok=true&word=hi", ("a/B-v0", {"n": 3, "ok": True, "word": "hi"})),
        ("a/B-v0?x=%22a+b%22&xs=[1,2]", ("a/B-v0", {"x": "a b", "xs": [1, 2]})),
    ],
)
def test_arguments_follow_the_id(text: str, expected: Any) -> None:
    assert read_env(text) == expected


def test_an_argument_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"arguments of 'a/B-v0\?n'"):
        read_env("a/B-v0?n")


def test_tasks_of_two_environments_have_two_names() -> None:
    sources = [EnvSource(CALCULATOR, {}, "train"), EnvSource(LOOKUP, {}, "train")]
    mixed = MixedSource(sources)
    try:
        assert mixed.at(7) is sources[1]
        assert mixed.task(7).id == f"{LOOKUP}:{sources[1].task(3).id}"
        assert mixed.task(7).metadata == sources[1].task(3).metadata
        assert mixed.task(6).id.startswith(f"{CALCULATOR}:")
        assert len(mixed.task_set) == 2 * min(len(source.task_set) for source in sources)
        assert mixed.task_set[7] == mixed.task(7)
    finally:
        mixed.close()


def test_one_reward_name_with_two_meanings_is_refused() -> None:
    sources = [EnvSource(CALCULATOR, {}, "train"), EnvSource(LOOKUP, {}, "train")]
    specs = dict(sources[0].reward_specs)
    name = next(iter(specs))
    sources[1].reward_specs = {name: replace(specs[name], weight=9.0)}
    with pytest.raises(ConfigError, match=f"reward '{name}' of {LOOKUP}"):
        MixedSource(sources)
    for source in sources:
        source.close()


def test_a_share_must_be_positive() -> None:
    with pytest.raises(ConfigError, match=r"share of turngym/Lookup-v0 must be positive, got 0"):
        TrainConfig(mix={LOOKUP: 0})


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_mixed_run_trains_every_environment_by_its_share(
    staleness: int, tiny: Path, tmp_path: Path, kit: Any
) -> None:
    run = tmp_path / "run"
    config = TrainConfig(
        run=run,
        steps=3,
        prompts=4,
        threads=1,
        staleness=staleness,
        mix={f"{LOOKUP}?max_hops=2": 0.5},
        model=ModelConfig(path=str(tiny), device="cpu"),
        algorithm=preset("grpo"),
        rollout=RolloutConfig(group_size=2, max_tokens=12, concurrency=8),
        optim=OptimConfig(lr=1e-3),
        eval=EvalSchedule(tasks=2, before=False),
    )
    train(config, {"level": 1})
    episodes = list(TrajectoryStore(run / "trajectories"))
    assert Counter(one.env_id for one in episodes) == {CALCULATOR: 16, LOOKUP: 8}
    assert all(one.task_id.startswith(f"{one.env_id}:") for one in episodes)
    evaluations = {path.name for path in (run / "evaluations").iterdir()}
    assert evaluations == {"after-calculator-v0.json", "after-lookup-v0.json"}
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all("env/Calculator-v0/reward" in line for line in metrics)
    assert {key for line in metrics for key in line if not kit.is_documented(key)} <= {"step"}


def test_the_reward_that_tells_right_from_wrong_must_be_everyones() -> None:
    config = TrainConfig(mix={"turngym/PythonTool-v0": 1.0}, algorithm=preset("dapo"))
    worlds = Worlds(config, {})
    sources = [EnvSource(CALCULATOR, {}, "train"), EnvSource(LOOKUP, {}, "train")]
    sources[1].reward_specs = {
        name: spec for name, spec in sources[1].reward_specs.items() if name != "correct"
    }
    mixed = MixedSource(sources)
    try:
        with pytest.raises(ConfigError, match=r"metric='correct' .* but turngym/Lookup-v0 has"):
            worlds.bind(mixed)
    finally:
        mixed.close()
