import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from turngym.agents.base import Sampling
from turngym.agents.hf_policy import HFPolicy
from turngym.agents.model import attach_lora, policy_logprobs
from turngym.errors import ConfigError
from turngym.rl.presets import preset
from turngym.rl.reference import AdaptersOff, FrozenCopy, Reference
from turngym.rl.terms import KL

ROW = np.array([4, 8, 15, 16, 23, 42], np.int32)


@torch.no_grad()
def score(model: Any) -> list[float]:
    found: list[float] = policy_logprobs(model, [ROW], [np.arange(1, len(ROW))]).logp.tolist()
    return found


def move(model: Any) -> None:
    """Change every trainable weight; adapters begin with a zero matrix."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05)


def check_resets(reference: Reference, model: Any) -> None:
    start = score(model)
    move(model)
    moved = score(model)
    assert moved != start
    with reference.active() as frozen:
        assert score(frozen) == start
    assert reference.state_dict() == {}
    reference.reset()
    move(model)
    last = score(model)
    with reference.active() as frozen:
        assert score(frozen) == moved
    assert score(model) == last


def test_a_frozen_copy_is_the_policy_at_the_last_reset(model: Any) -> None:
    check_resets(FrozenCopy(model), model)


def test_adapters_off_is_the_policy_at_the_last_reset(model: Any) -> None:
    adapted = attach_lora(model, 2)
    check_resets(AdaptersOff(adapted), adapted)


def test_a_reset_may_mix_the_policy_in(model: Any, kit: Any) -> None:
    reference = FrozenCopy(model, mix=0.6)
    start = kit.weights(model)
    move(model)
    reference.reset()
    assert torch.allclose(found_weights(reference), start + 0.6 * 0.05, atol=1e-6)
    move(model)
    reference.reset()
    # 0.4 of the old reference and 0.6 of the policy, which has moved twice.
    assert torch.allclose(found_weights(reference), start + 0.4 * 0.03 + 0.6 * 0.1, atol=1e-6)


def found_weights(reference: Reference) -> torch.Tensor:
    with reference.active() as frozen:
        return torch.cat([p.detach().flatten() for p in frozen.parameters()])


def test_adapters_are_not_mixed(model: Any) -> None:
    with pytest.raises(ConfigError, match="lora_rank=0"):
        AdaptersOff(attach_lora(model, 2), mix=0.6)


def test_a_resume_brings_back_the_reference(model: Any) -> None:
    adapted = attach_lora(model, 2)
    first = AdaptersOff(adapted)
    move(adapted)
    at_reset = score(adapted)
    first.reset()
    second = AdaptersOff(adapted)
    second.load_state_dict(first.state_dict())
    move(adapted)
    with second.active() as frozen:
        assert score(frozen) == at_reset


def test_lending_adapters_to_the_reference_does_not_disturb_the_sampler(model: Any) -> None:
    adapted = attach_lora(model, 2)
    reference = AdaptersOff(adapted)
    reference.reset()
    with HFPolicy(adapted, threads=1) as policy:

        def sample() -> list[int]:
            call = policy.generate(ROW.tolist(), Sampling(max_tokens=4), seed=1)
            ids: list[int] = asyncio.run(call).ids.tolist()
            return ids

        before = sample()
        with reference.active() as frozen:
            score(frozen)
        assert sample() == before


def test_reference_and_momenta_are_reset_every_so_many_steps(
    world: Any, model: Any, kit: Any
) -> None:
    grpo = replace(preset("grpo"), regularize=(KL(coef=0.04, reset_steps=4),))
    bound = world.bind(grpo)
    collector = world.collector(bound)
    learner = kit.make_learner(model, bound)
    found = [learner.update(collector.collect().groups) for _ in range(3)]
    assert [one["train/reference_reset"] for one in found] == [0.0, 1.0, 0.0]
    assert found[0]["train/kl"] < found[1]["train/kl"]
    assert found[2]["train/kl"] < found[1]["train/kl"]
    state = learner.optimizers.state_dict()["parts"][0]["state"]
    assert {int(entry["step"]) for entry in state.values()} == {2}


def test_the_adaptive_coefficient_follows_the_measured_kl(world: Any, model: Any, kit: Any) -> None:
    in_loss = KL(coef=0.1, target=1e-9, horizon=100)
    in_reward = KL(coef=0.1, estimator="k1", where="reward", target=1e-9, horizon=100)
    for term in (in_loss, in_reward):
        bound = world.bind(replace(preset("reinforce_pp"), regularize=(term,)))
        collector = world.collector(bound)
        learner = kit.make_learner(model, bound)
        for _ in range(3):
            metrics = learner.update(collector.collect().groups)
        assert metrics["train/kl"] > 1e-9
        assert learner.state.kl_coef is not None
        assert learner.state.kl_coef > 0.1
