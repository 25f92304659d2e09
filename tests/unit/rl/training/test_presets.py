"""Every preset takes real updates of a real model, from rollouts of a real environment."""

import math
from typing import Any

import pytest
import torch

from turngym.rl.presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains(name: str, world: Any, model: Any, kit: Any) -> None:
    bound = world.bind(kit.fit_for_test(name))
    collector = world.collector(bound)
    learner = kit.make_learner(model, bound)
    before = kit.weights(model)
    while learner.pretraining_left:
        found = learner.pretrain_critic(collector.collect().groups)
        assert math.isfinite(found["loss/value"])
    assert torch.equal(kit.weights(model), before)
    for _ in range(2):
        collected = collector.collect()
        metrics = learner.update(collected.groups, greedy=collected.greedy)
        losses = {key: value for key, value in metrics.items() if key.startswith("loss/")}
        assert all(map(math.isfinite, losses.values())), losses
        assert [key for key in metrics if not kit.is_documented(key)] == []
    after = kit.weights(model)
    assert torch.isfinite(after).all()
    assert not torch.equal(after, before)
    assert learner.version == 4
