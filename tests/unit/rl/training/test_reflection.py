"""Reflect, retry, reward (arXiv:2505.24726): only the reflection between two attempts trains."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import turngym
from turngym.agents.config import RolloutConfig
from turngym.agents.rollout import EnvSource, RolloutEngine, TokenAgent
from turngym.agents.scripted import ScriptedPolicy
from turngym.envs import Draft, TaskSet
from turngym.rl.algorithm import RunFacts
from turngym.rl.batch import Batch
from turngym.rl.plan import plan
from turngym.rl.presets import preset
from turngym.rl.terms import OnlySpan

ID = "test/Reflect-v0"


class Reflect(turngym.TurnEnv):
    """Say the number; who fails writes a reflection and has another try."""

    def tasks(self, split: str) -> TaskSet:
        def draw(rng: random.Random) -> Draft:
            number = rng.randint(0, 10**6)
            return Draft(prompt=f"Say {number}.", answer=str(number))

        return TaskSet.generate(draw, split=split, size=100)

    def respond(self, turn: turngym.TurnView) -> str | None:
        if turn.content == self.task.answer or turn.index == 2:
            return None
        return "Try again." if turn.index else "Wrong. What went wrong?"

    def step(self, action: turngym.Action) -> Any:
        marks = len(self.turns) == 1
        observation, reward, terminated, truncated, info = super().step(action)
        return (
            observation,
            reward,
            terminated,
            truncated,
            info | {"span": "reflection" if marks else None},
        )

    @turngym.reward(low=0, high=1)
    def correct(self, episode: turngym.EpisodeView) -> float:
        return float(episode.final_answer == episode.task.answer)


turngym.register(ID, Reflect)


@pytest.fixture
def groups(renderer: Any) -> Any:
    def script(context: Sequence[int], turn: int, rng: random.Random) -> str:
        said = renderer.codec.decode(list(context))
        if turn == 1:
            return "I was careless.<|im_end|>"
        number = said.split("Say ")[1].split(".")[0]
        return (number if rng.random() < (0.5 if turn else 0.25) else "no") + "<|im_end|>"

    policy = ScriptedPolicy(script, encode=lambda text: renderer.codec.encode(text).ids)
    factory = TokenAgent.factory(policy, renderer)
    config = RolloutConfig(group_size=6, max_tokens=64)
    with RolloutEngine(EnvSource(ID), factory, config, seed=3) as engine:
        return engine.run(range(4))


def test_only_the_reflection_trains(groups: Any, model: Any, kit: Any) -> None:
    algorithm = replace(preset("grpo"), tokens=(OnlySpan(span="reflection"),), regularize=())
    facts = RunFacts(rubric=groups[0].rubric, group_size=6, max_tokens=200)
    bound = algorithm.bind(facts)
    batch = Batch.from_groups(groups)
    attempts = [len(one.turns) for group in groups for one in group.trajectories]
    assert set(attempts) == {1, 3}
    planned = plan(bound, batch)
    assert torch.equal(planned.weight > 0, batch.turn == 1)
    first_try = torch.tensor(attempts) == 1
    assert not bool(planned.moving_rows(batch)[first_try].any())
    rewarded = planned.advantage[batch.turn == 1]
    assert bool((rewarded > 0).any())
    assert bool((rewarded < 0).any())
    learner = kit.make_learner(model, bound, replace(kit.optim, minibatches=1))
    before = kit.weights(model)
    learner.update(groups)
    assert not torch.equal(kit.weights(model), before)
