"""The engine with real environments, the real renderer and the in-process sampler."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turngym.agents.base import ActContext, Sampling
from turngym.agents.config import RolloutConfig
from turngym.agents.evaluation import evaluate
from turngym.agents.hf_policy import HFPolicy
from turngym.agents.model import load_model
from turngym.agents.renderer import Renderer
from turngym.agents.rollout import DemoAgent, EnvSource, MessageAgent, RolloutEngine, TokenAgent
from turngym.agents.scripted import OraclePolicy, RandomPolicy, ScriptedMessagePolicy
from turngym.agents.tiny import build_tiny_agent, tiny_tokenizer
from turngym.types import Group, Message, TokenRole

SMALL = RolloutConfig(group_size=2)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(tiny_tokenizer())


@pytest.mark.parametrize("env_id", ["turngym/Calculator-v0", "turngym/Lookup-v0"])
def test_the_oracle_scores_one_and_chance_scores_nothing(env_id: str) -> None:
    source = EnvSource(env_id, split="eval")
    with RolloutEngine(source, MessageAgent.factory(OraclePolicy()), SMALL, seed=1) as engine:
        oracle = evaluate(engine, num_tasks=20)
    with RolloutEngine(source, MessageAgent.factory(RandomPolicy()), SMALL, seed=1) as engine:
        chance = evaluate(engine, num_tasks=20)
    assert oracle.pass_at[1].value == 1.0
    assert chance.pass_at[1].value == 0.0
    assert oracle.errors == chance.errors == 0


def test_demonstrations_with_bad_habits_are_scored_as_the_model_would_be(
    renderer: Renderer,
) -> None:
    agent = DemoAgent.factory(renderer, {"broken_json": 1.0})
    source = EnvSource("turngym/Calculator-v0", {"level": 1})
    with RolloutEngine(source, agent, SMALL, seed=1) as engine:
        (group,) = engine.run([0])
    record = group.trajectories[0]
    assert record.status == "parse_limit"
    assert record.rewards["success"] == 0.0
    assert all(turn.message["invalid_tool_calls"] for turn in record.turns)
    assert all(turn.tool_errors == 1 for turn in record.turns)


def test_roles_of_a_demonstration_split_reasoning_from_the_call(renderer: Renderer) -> None:
    source = EnvSource("turngym/Calculator-v0", {"level": 1})
    with RolloutEngine(source, DemoAgent.factory(renderer), SMALL, seed=1) as engine:
        record = engine.run([0])[0].trajectories[0]
    first = record.turns[0]
    rows = slice(first.start, first.stop)
    acting = record.ids[rows][record.role[rows] == TokenRole.ACTION].tolist()
    text = renderer.codec.decode(acting)
    assert text.startswith('{"name": "calc"')
    assert text.endswith("</tool_call>")


def test_gymnasiums_time_limit_ends_and_scores_an_episode() -> None:
    source = EnvSource("turngym/Calculator-v0", {"level": 2, "max_episode_steps": 1})

    def wander(messages: Any, context: ActContext) -> Message:
        call: Any = {
            "id": "c",
            "type": "function",
            "function": {"name": "calc", "arguments": {"expr": "1+1"}},
        }
        return Message(role="assistant", content="", tool_calls=[call])

    agent = MessageAgent.factory(ScriptedMessagePolicy(wander))
    with RolloutEngine(source, agent, SMALL, seed=1) as engine:
        record = engine.run([0])[0].trajectories[0]
    assert record.status == "max_turns"
    assert len(record.turns) == 1
    assert record.rewards["correct"] == 0.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("tiny") / "model"
    build_tiny_agent(folder, seed=3)
    return load_model(folder)[0]


def test_sampled_trajectories_are_bit_equal_for_concurrency_1_and_64(
    model: Any, renderer: Renderer
) -> None:
    def play(concurrency: int) -> list[Group]:
        config = RolloutConfig(
            group_size=4, concurrency=concurrency, max_tokens=24, deterministic=True
        )
        source = EnvSource("turngym/Calculator-v0")
        with HFPolicy(model, deterministic=True) as policy:
            agent = TokenAgent.factory(policy, renderer, Sampling(temperature=1.0))
            with RolloutEngine(source, agent, config, seed=11) as engine:
                return engine.run(random.Random(concurrency).sample(range(6), 6))

    alone = {group.ordinal: group for group in play(1)}
    crowd = {group.ordinal: group for group in play(64)}
    assert alone.keys() == crowd.keys()
    for ordinal, group in alone.items():
        for one, other in zip(group.trajectories, crowd[ordinal].trajectories, strict=True):
            assert one.ids.tobytes() == other.ids.tobytes()
            assert one.logp.tobytes() == other.logp.tobytes()
            assert (one.status, one.rewards) == (other.status, other.rewards)
    sampled = sum(one.num_sampled for group in alone.values() for one in group.trajectories)
    assert sampled > 100
    assert all(
        np.isfinite(one.logp[one.sampled]).all()
        for group in alone.values()
        for one in group.trajectories
    )
