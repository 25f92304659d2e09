from dataclasses import replace
from typing import Any

import pytest

from turngym.agents.config import RolloutConfig
from turngym.errors import ConfigError
from turngym.rl.config import Stages, TrainConfig
from turngym.rl.engines import Engines
from turngym.rl.presets import preset

STAGED = TrainConfig(
    rollout=RolloutConfig(max_tokens=100, group_size=2),
    stages=Stages(
        temperature=((2, 0.8), (5, 0.6)), max_tokens=((0, 40), (3, 200)), max_context=((4, 512),)
    ),
)


def test_each_stage_holds_from_its_batch_on() -> None:
    found = [STAGED.at(batch) for batch in range(6)]
    assert [one.temperature for one in found] == [1.0, 1.0, 0.8, 0.8, 0.8, 0.6]
    assert [one.rollout.max_tokens for one in found] == [40, 40, 40, 200, 200, 200]
    assert [one.rollout.max_context for one in found] == [None, None, None, None, 512, 512]
    assert (STAGED.most_tokens, STAGED.most_context) == (200, None)
    narrow = replace(STAGED, rollout=RolloutConfig(max_context=64))
    assert narrow.most_context == 512


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": ((3, 0.5), (3, 0.4))}, "later and later"),
        ({"max_tokens": ((-1, 5),)}, "later and later"),
        ({"temperature": ((0, 0.0),)}, "positive"),
    ],
)
def test_stages_that_make_no_sense_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Stages(**wrong)


def test_a_stage_that_contradicts_other_settings_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="think_tokens"):
        TrainConfig(
            rollout=RolloutConfig(max_tokens=64, think_tokens=32),
            stages=Stages(max_tokens=((9, 32),)),
        )


def test_engines_sample_with_the_settings_in_force(world: Any) -> None:
    asked: list[tuple[float, int]] = []

    class Watched(type(world.policy)):  # type: ignore[misc]
        async def generate(self, prompt_ids: Any, sampling: Any, **rest: Any) -> Any:
            asked.append((sampling.temperature, sampling.max_tokens))
            return await super().generate(prompt_ids, sampling, **rest)

    policy = Watched(world.speak, encode=lambda text: world.renderer.codec.encode(text).ids)
    engines = Engines(
        STAGED,
        bound=world.bind(preset("remax")),
        source=world.source,
        renderer=world.renderer,
        policy=policy,
    )
    assert engines.greedy is not None
    assert engines.demos is None
    for batch, expected in ((0, (1.0, 40)), (5, (0.6, 200))):
        engines.use(STAGED.at(batch))
        asked.clear()
        engines.train.run([batch])
        assert set(asked) == {expected}
        asked.clear()
        engines.greedy.run([batch])
        assert set(asked) == {(0.0, expected[1])}
    engines.close()


def test_demonstrations_need_an_expert(world: Any) -> None:
    world.source.has_expert = False
    with pytest.raises(ConfigError, match="has no expert; set algorithm"):
        Engines(
            STAGED,
            bound=world.bind(preset("luffy")),
            source=world.source,
            renderer=world.renderer,
            policy=world.policy,
        )
