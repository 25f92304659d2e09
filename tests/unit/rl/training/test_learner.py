"""Updates do not depend on how forward passes are cut, and say how stale their data were."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import turngym.rl.scorer
from turngym.agents.model import attach_lora, load_model, policy_logprobs
from turngym.rl.algorithm import Algorithm
from turngym.rl.axes import MajorityVote, NegativeEntropy, Reward, SelfCertainty
from turngym.rl.batch import Batch
from turngym.rl.config import OptimConfig
from turngym.rl.mismatch import mismatch, staleness
from turngym.rl.presets import preset
from turngym.rl.terms import OnlySpan

SPLIT = ("grpo", "gspo", "gmpo", "dpo", "kl_cov", "vapo", "luffy", "gfpo", "grpo_high_entropy")


def trained(
    kit: Any, tiny: Path, bound: Any, collected: Any, *, micro_tokens: int, lora: int
) -> torch.Tensor:
    """Weights after two plain gradient steps, so that small differences stay small."""
    torch.manual_seed(0)
    model: Any = load_model(tiny, device="cpu")[0]
    if lora:
        model = attach_lora(model, lora)
    optim = OptimConfig(lr=0.05, minibatches=2, micro_tokens=micro_tokens)
    learner = kit.make_learner(model, bound, optim)
    parameters = learner.optimizers.parameters
    learner.optimizers._parts = [(torch.optim.SGD(parameters, lr=0.05), 0.05)]
    learner.update(collected.groups, greedy=collected.greedy)
    found: torch.Tensor = kit.weights(model)
    return found


@pytest.mark.parametrize("lora", [0, 2], ids=["full", "lora"])
@pytest.mark.parametrize("name", SPLIT)
def test_how_a_batch_is_cut_into_passes_changes_nothing(
    name: str, lora: int, world: Any, tiny: Path, kit: Any
) -> None:
    bound = world.bind(kit.fit_for_test(name))
    collected = world.collector(bound).collect()
    whole, cut = (
        trained(kit, tiny, bound, collected, micro_tokens=size, lora=lora) for size in (10**6, 60)
    )
    fresh: Any = load_model(tiny, device="cpu")[0]
    assert torch.allclose(whole, cut, atol=1e-6)
    if not lora:
        assert not torch.allclose(whole, kit.weights(fresh), atol=1e-6)


def test_a_batch_with_nothing_to_teach_leaves_the_weights(
    make_world: Any, model: Any, kit: Any
) -> None:
    world = make_world(skill=0.0)
    outcome_only = replace(
        preset("dr_grpo"), reward=Reward(weights={"correct": 1.0, "tool": 0.0, "format": 0.0})
    )
    bound = world.bind(outcome_only)
    learner = kit.make_learner(model, bound)
    before = kit.weights(model)
    metrics = learner.update(world.collector(bound).collect().groups)
    assert metrics["train/moving_rows"] == 0
    assert metrics["train/grad_norm"] == 0
    assert torch.equal(kit.weights(model), before)


def test_fewer_groups_than_optimizer_steps(world: Any, model: Any, kit: Any) -> None:
    bound = world.bind(preset("grpo"), updates=5)
    collected = world.collector(bound, prompts=2).collect()
    learner = kit.make_learner(model, bound, replace(kit.optim, minibatches=5))
    learner.update(collected.groups)
    assert learner.version == 5
    pairs = world.bind(preset("dpo"), updates=5)
    learner = kit.make_learner(model, pairs, replace(kit.optim, minibatches=5))
    learner.update(collected.groups)
    assert learner.version == 2


def test_the_old_policy_is_scored_only_where_a_second_step_needs_it(
    world: Any, model: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []

    def counting(*args: Any, **options: Any) -> Any:
        calls.append(torch.is_grad_enabled())
        return policy_logprobs(*args, **options)

    monkeypatch.setattr(turngym.rl.scorer, "policy_logprobs", counting)
    cases = (("gspo", 1, 0), ("gspo", 2, 1), ("dppo", 2, 0), ("scalerl", 2, 0), ("grpo", 1, 1))
    # The pre-pass is one of each optimizer step: its weights are new, its rows are not all.
    pre_pass = (("clip_cov", 1, 1), ("kl_cov", 1, 1), ("grpo_high_entropy", 1, 1), ("kl_cov", 2, 3))
    for name, updates, passes in (*cases, *pre_pass):
        bound = world.bind(preset(name), updates=updates)
        collected = world.collector(bound).collect()
        calls.clear()
        optim = replace(kit.optim, minibatches=updates, micro_tokens=10**6)
        kit.make_learner(model, bound, optim).update(collected.groups)
        assert calls.count(False) == passes, name
        assert calls.count(True) == updates, name


@pytest.mark.parametrize("name", ["grpo", "kl_cov", "grpo_high_entropy", "gfpo", "dppo"])
def test_every_pass_divides_the_logits_by_the_temperature(
    name: str, world: Any, model: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def noting(*args: Any, temperature: float, **options: Any) -> Any:
        seen.append(temperature)
        return policy_logprobs(*args, temperature=temperature, **options)

    monkeypatch.setattr(turngym.rl.scorer, "policy_logprobs", noting)
    bound = world.bind(kit.fit_for_test(name))
    learner = kit.make_learner(model, bound)
    learner.temperature = 0.7
    learner.update(world.collector(bound).collect().groups)
    assert set(seen) == {0.7}


def test_mismatch_is_measured_before_the_first_update(world: Any, model: Any, kit: Any) -> None:
    bound = world.bind(preset("dr_grpo"), updates=1)
    collected = world.collector(bound).collect()
    batch = Batch.from_groups(collected.groups)
    once = replace(kit.optim, minibatches=1)
    untouched = kit.make_learner(model, bound, once)
    scores = untouched._scorer.columns(model, batch, range(len(batch.contexts)), "logp")["logp"]
    expected = mismatch(batch, torch.arange(batch.num_tokens), scores)
    found = untouched.update(collected.groups)
    if found["train/moving_rows"] == batch.num_rows:
        assert found["train/mismatch_kl"] == pytest.approx(expected["train/mismatch_kl"], rel=1e-4)
    assert found["train/mismatch_ratio_p01"] < found["train/mismatch_ratio_p99"]
    assert (found["train/staleness_mean"], found["train/staleness_max"]) == (0.0, 0.0)
    later = untouched.update(collected.groups)
    assert later["train/staleness_max"] == 1.0


def test_mismatch_by_hand(world: Any) -> None:
    bound = world.bind(preset("luffy"))
    batch = Batch.from_groups(world.collector(bound, prompts=1).collect().groups)
    sampled = (~batch.demo[batch.row]).nonzero().squeeze(-1)
    logp = batch.logp_rollout.clone()
    logp[sampled[:2]] += torch.tensor([math.log(2.0), -math.log(4.0)])
    logp[batch.demo[batch.row]] = -50.0
    found = mismatch(batch, torch.arange(batch.num_tokens), logp)
    by_hand = (2 - 1 - math.log(2.0) + 0.25 - 1 + math.log(4.0)) / len(sampled)
    assert found["train/mismatch_kl"] == pytest.approx(by_hand, abs=1e-6)
    assert found["train/mismatch_ratio_max"] == pytest.approx(4.0, abs=1e-4)
    assert mismatch(batch, torch.empty(0, dtype=torch.int64), torch.empty(0)) == {}
    assert staleness(batch, 3) == {"train/staleness_mean": 3.0, "train/staleness_max": 3.0}


def reward_only(shaping: Any) -> Algorithm:
    return replace(preset("dr_grpo"), reward=Reward(shaping=(shaping,)))


@pytest.mark.parametrize(
    "shaping", [MajorityVote(), SelfCertainty(), NegativeEntropy()], ids=lambda s: type(s).__name__
)
def test_rewards_without_labels_train(shaping: Any, world: Any, model: Any, kit: Any) -> None:
    bound = world.bind(reward_only(shaping))
    learner = kit.make_learner(model, bound)
    before = kit.weights(model)
    learner.update(world.collector(bound).collect().groups)
    assert not torch.equal(kit.weights(model), before)


def test_the_vote_is_on_final_answers(world: Any) -> None:
    bound = world.bind(preset("grpo"))
    batch = Batch.from_groups(world.collector(bound, prompts=1).collect().groups)
    assert all(answer.startswith("<answer>") for answer in batch.answers if answer is not None)
    assert len(batch.answers) == 4


def test_a_run_without_marked_turns_trains_no_span(world: Any, model: Any, kit: Any) -> None:
    bound = world.bind(replace(preset("dr_grpo"), tokens=(OnlySpan(span="reflection"),)))
    learner = kit.make_learner(model, bound)
    before = kit.weights(model)
    learner.update(world.collector(bound).collect().groups)
    assert torch.equal(kit.weights(model), before)


def test_a_gradient_that_is_not_finite_is_not_hidden(world: Any, model: Any, kit: Any) -> None:
    bound = world.bind(preset("dr_grpo"))
    learner = kit.make_learner(model, bound)
    steps = iter([math.nan, 1.0])
    learner.optimizers.step = lambda: next(steps)
    metrics = learner.update(world.collector(bound).collect().groups)
    assert math.isnan(metrics["train/grad_norm"])
