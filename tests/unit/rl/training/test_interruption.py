"""A turn that only thinks is brought to an answer by text that never trains."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from turngym.agents.config import RolloutConfig
from turngym.agents.renderer import Renderer
from turngym.agents.rollout import RolloutEngine, TokenAgent
from turngym.agents.scripted import ScriptedPolicy
from turngym.errors import ConfigError
from turngym.rl.batch import Batch
from turngym.types import Group, TokenRole, Trajectory

CONFIG = RolloutConfig(
    group_size=1, max_tokens=60, think_tokens=8, answer_tokens=40, interrupt_text=" enough</think>"
)
CALL = '<tool_call>{"name": "calc", "arguments": {"expr": "1+1"}}</tool_call><|im_end|>'


class Watched(ScriptedPolicy):
    """Remembers the contexts, seeds and limits it was asked with."""

    def __init__(self, script: Any, renderer: Renderer) -> None:
        super().__init__(script, encode=lambda text: renderer.codec.encode(text).ids)
        self.asked: list[tuple[list[int], int, int]] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Any, **rest: Any) -> Any:
        self.asked.append((list(prompt_ids), rest["seed"], sampling.max_tokens))
        return await super().generate(prompt_ids, sampling, **rest)


def play(
    world: Any, script: Any, config: RolloutConfig = CONFIG
) -> tuple[Group, Trajectory, Watched]:
    policy = Watched(script, world.renderer)
    factory = TokenAgent.factory(policy, world.renderer)
    with RolloutEngine(world.source, factory, config, seed=0) as engine:
        (group,) = engine.run([0])
    return group, group.trajectories[0], policy


def ponders(renderer: Renderer) -> Any:
    def script(context: Sequence[int], turn: int, rng: random.Random) -> str:
        said = renderer.codec.decode(list(context))
        return "<answer>5</answer><|im_end|>" if said.endswith("enough</think>") else "<think>" * 90

    return script


def test_a_turn_that_only_thinks_is_closed_and_answers(world: Any) -> None:
    group, episode, _ = play(world, ponders(world.renderer))
    (turn,) = episode.turns
    text = world.renderer.codec.encode(" enough</think>").ids
    glue = slice(turn.start + 8, turn.start + 8 + len(text))
    assert episode.ids[glue].tolist() == text
    assert set(episode.role[glue].tolist()) == {TokenRole.GLUE}
    assert np.isnan(episode.logp[glue]).all()
    assert (episode.version[glue] == -1).all()
    sampled = np.r_[turn.start : glue.start, glue.stop : turn.stop]
    assert episode.sampled.nonzero()[0].tolist() == sampled.tolist()
    assert np.isfinite(episode.logp[sampled]).all()
    assert turn.stop == len(episode.ids)
    assert turn.message["content"] == "<answer>5</answer>"
    assert turn.message["reasoning_content"].endswith(" enough")
    assert (episode.status, turn.finish_reason) == ("completed", "stop")
    (context,) = Batch.from_groups([group]).contexts
    assert context.positions.tolist() == sampled.tolist()


def test_the_answer_is_drawn_from_what_is_recorded_with_another_seed(world: Any) -> None:
    _, episode, policy = play(world, ponders(world.renderer))
    (first, seed, budget), (second, other, rest) = policy.asked
    assert (budget, rest) == (8, 40)
    assert seed != other
    assert second == episode.ids[: len(second)].tolist()
    assert second[: len(first)] == first


@pytest.mark.parametrize("said", [CALL, "<think>12</think>" + CALL])
def test_a_turn_that_acts_when_the_budget_ends_goes_on_untouched(world: Any, said: str) -> None:
    ids: list[int] = world.renderer.codec.encode(said).ids
    assert len(ids) > 8

    def script(context: Sequence[int], turn: int, rng: random.Random) -> Sequence[int] | str:
        spoken = world.renderer.codec.decode(list(context))
        if "<tool_response>" in spoken:
            return "<answer>2</answer><|im_end|>"
        return ids[8:] if turn == 1 else ids

    _, episode, policy = play(world, script)
    assert [limit for _, _, limit in policy.asked[:2]] == [8, 52]
    first = episode.turns[0]
    assert episode.ids[first.start : first.stop].tolist() == ids
    assert (episode.role[first.start : first.stop] >= TokenRole.REASONING).all()
    assert first.message["tool_calls"][0]["function"]["arguments"] == {"expr": "1+1"}


def test_without_room_for_an_answer_the_episode_is_truncated(world: Any) -> None:
    _, whole, _ = play(world, ponders(world.renderer))
    room = whole.turns[0].start + 8 + 3
    narrow = RolloutConfig(
        group_size=1, max_tokens=60, think_tokens=8, max_context=room, interrupt_text="x" * 9
    )
    _, episode, _ = play(world, ponders(world.renderer), narrow)
    assert episode.status == "context_full"
    assert len(episode.ids) == room


def test_a_thinking_budget_must_leave_room_for_an_answer() -> None:
    with pytest.raises(ConfigError, match="less than max_tokens=60"):
        RolloutConfig(max_tokens=60, think_tokens=60)
    assert CONFIG.most_tokens == 60
    assert RolloutConfig(max_tokens=60, think_tokens=50, answer_tokens=40).most_tokens == 90
