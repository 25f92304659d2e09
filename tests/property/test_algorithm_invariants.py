"""What must hold for every algorithm, whatever the batch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turngym.rl.algorithm import Algorithm
from turngym.rl.axes import Ratio, Reward, Selection, TopK
from turngym.rl.estimators import GAE, GroupAdvantage, Pairs
from turngym.rl.gae import gae
from turngym.rl.plan import plan
from turngym.rl.presets import PRESETS
from turngym.rl.terms import ClipCov, DropTruncated, HighEntropy
from turngym.rl.trust_region import Clip, GeometricClip

NAN = float("nan")
FEW = settings(max_examples=5, deadline=None, derandomize=True)
seeds = st.integers(0, 10_000)


def small(algorithm: Algorithm) -> Algorithm:
    """The algorithm, keeping some of four members and dropping every candidate token.

    A draw of single tokens depends on their order, which no invariant is about.
    """
    if algorithm.name.startswith("gfpo"):
        # Lengths tie, and ties are broken by the order of rows.
        keep = TopK(k=3, metric="token_efficiency")
        algorithm = replace(algorithm, selection=Selection(keep_in_group=keep))
    if algorithm.name == "clip_cov":
        algorithm = replace(algorithm, tokens=(ClipCov(low=0.1, high=2.0, frac=None),))
    if algorithm.name in ("passk_grpo", "pkpo"):
        # k of a group of four leaves out the members without a reward.
        changes: dict[str, Any] = {"k": 2}
        algorithm = replace(algorithm, advantage=replace(algorithm.advantage, **changes))
    if algorithm.name == "passk_grpo":
        algorithm = replace(algorithm, reward=Reward(weights={"style": 0.0}))
    return algorithm


EVERY = [pytest.param(small(algorithm), id=name) for name, algorithm in PRESETS.items()]
NEEDS_BINARY = {"passk_grpo"}


def turn_modes(algorithm: Algorithm) -> tuple[bool, ...]:
    return (False,) if algorithm.name in NEEDS_BINARY else (False, True)


def rows_for(draw: Callable[..., Any], algorithm: Algorithm, seed: int, **options: Any) -> Any:
    return draw(seed, with_demo=algorithm.selection.demonstrations > 0, **options)


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("algorithm", EVERY)
@given(seed=seeds)
@FEW
def test_the_order_of_rows_does_not_matter(
    algorithm: Algorithm, seed: int, build: Any, draw: Any
) -> None:
    for by_turn in turn_modes(algorithm):
        rows = rows_for(draw, algorithm, seed)
        order = np.random.default_rng(seed).permutation(len(rows))
        loss, gradient = build(algorithm, rows, by_turn=by_turn).run()
        moved = build(algorithm, [rows[i] for i in order], by_turn=by_turn)
        moved_loss, moved_gradient = moved.run()
        same(moved_loss, loss)
        by_row = build(algorithm, rows, by_turn=by_turn).per_row(gradient)
        wanted = [value for i in order for value in by_row[i]]
        same(moved_gradient, torch.tensor(wanted, dtype=torch.float64))


@pytest.mark.parametrize("algorithm", EVERY)
@given(seed=seeds)
@FEW
def test_padding_and_observations_do_not_matter(
    algorithm: Algorithm, seed: int, build: Any, draw: Any
) -> None:
    for by_turn in turn_modes(algorithm):
        rows = rows_for(draw, algorithm, seed)
        loss, gradient = build(algorithm, rows, by_turn=by_turn).run()
        for row in rows:
            row.gaps = {n for n in range(len(row.turns)) if (n + seed) % 2}
        wide = build(algorithm, rows, by_turn=by_turn, extra_padding=3)
        assert wide.mask.shape[1] > max(len(row.turns) for row in rows)
        wide_loss, wide_gradient = wide.run()
        same(wide_loss, loss)
        same(wide_gradient, gradient)


@pytest.mark.parametrize("algorithm", EVERY)
@given(seed=seeds)
@FEW
def test_parts_add_up_to_the_whole(algorithm: Algorithm, seed: int, build: Any, draw: Any) -> None:
    for by_turn in turn_modes(algorithm):
        case = build(algorithm, rows_for(draw, algorithm, seed), by_turn=by_turn)
        loss, gradient = case.run()
        batch, rng = case.batch, np.random.default_rng(seed)
        unit = {
            "token": torch.arange(batch.num_tokens),
            "row": batch.row,
            "group": batch.group[batch.row],
        }[case.bound.unit]
        home = torch.from_numpy(rng.integers(0, 3, int(unit.max()) + 1))
        parts = [(home[unit] == part).nonzero().squeeze(-1) for part in range(3)]
        results = [case.run(index) for index in parts]
        same(torch.stack([part for part, _ in results]).sum(), loss)
        same(torch.stack([part for _, part in results]).sum(0), gradient)


@pytest.mark.parametrize("algorithm", EVERY)
@given(seed=seeds)
@FEW
def test_every_gate_is_one_on_the_anchor(
    algorithm: Algorithm, seed: int, build: Any, draw: Any
) -> None:
    if isinstance(algorithm.advantage, Pairs):
        return
    in_reward = tuple(t for t in algorithm.regularize if getattr(t, "where", "") == "reward")
    bare = replace(algorithm, regularize=in_reward, tokens=())
    case = build(bare, draw(seed))
    anchor = {
        "old": case.batch.logp_old,
        "rollout": case.batch.logp_rollout,
        "none": case.logp_new,
    }[algorithm.ratio.anchor]
    _, gradient = case.run(logp=anchor)
    same(gradient, -case.plan.weight * case.plan.advantage)


@pytest.mark.parametrize("algorithm", EVERY)
@given(seed=seeds)
@FEW
def test_tokens_outside_the_mask_have_no_gradient(
    algorithm: Algorithm, seed: int, build: Any, draw: Any
) -> None:
    case = build(algorithm, rows_for(draw, algorithm, seed))
    mask = torch.from_numpy(np.random.default_rng(seed).random(case.batch.num_tokens) < 0.6)
    batch = replace(case.batch, mask=mask)
    case = replace(case, batch=batch, plan=plan(case.bound, batch))
    broken = torch.where(mask, case.logp_new, NAN)
    loss, gradient = case.run(logp=broken)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()
    assert (gradient[~mask] == 0).all()
    same(loss, case.run()[0])


@pytest.mark.parametrize("algorithm", EVERY)
@given(seed=seeds)
@FEW
def test_an_all_masked_batch_is_a_differentiable_zero(
    algorithm: Algorithm, seed: int, build: Any, draw: Any
) -> None:
    case = build(algorithm, rows_for(draw, algorithm, seed))
    batch = replace(case.batch, mask=torch.zeros(case.batch.num_tokens, dtype=torch.bool))
    case = replace(case, batch=batch, plan=plan(case.bound, batch))
    loss, gradient = case.run()
    assert torch.isfinite(loss)
    assert (gradient == 0).all()
    if not isinstance(algorithm.advantage, Pairs):
        assert loss == 0


@pytest.mark.parametrize("algorithm", EVERY)
@given(seed=seeds)
@FEW
def test_far_policies_stay_finite(algorithm: Algorithm, seed: int, build: Any, draw: Any) -> None:
    case = build(algorithm, rows_for(draw, algorithm, seed))
    jump = torch.from_numpy(np.random.default_rng(seed).choice([-500.0, 0.0], len(case.logp_new)))
    loss, gradient = case.run(logp=case.logp_new + jump)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()


COMPARES = [
    pytest.param(small(algorithm), id=name)
    for name, algorithm in PRESETS.items()
    if getattr(algorithm.advantage, "needs_groups", False)
    and getattr(algorithm.advantage, "compares_members", True)
    and not isinstance(algorithm.advantage, Pairs)
]


def without_kl(algorithm: Algorithm) -> Algorithm:
    return replace(algorithm, regularize=())


@pytest.mark.parametrize("algorithm", COMPARES)
@given(seed=seeds)
@FEW
def test_no_spread_gives_exactly_zero(
    algorithm: Algorithm, seed: int, build: Any, draw: Any
) -> None:
    if getattr(algorithm.advantage, "virtual_rewards", 0):
        return
    rows = rows_for(draw, algorithm, seed, max_turns=1)
    for row in rows:
        row.rewards = {"correct": float(row.group % 2), "style": 0.1 * row.group}
        row.columns["logp_new"] = [-1.0] * len(row.turns)
        row.truncated = False
        row.turns = row.turns[:1]
        row.columns = {name: values[:1] for name, values in row.columns.items()}
        row.roles, row.topk_old, row.topk_new = row.roles[:1], row.topk_old[:1], row.topk_new[:1]
    case = build(without_kl(algorithm), rows)
    assert (case.plan.advantage == 0).all()


@pytest.mark.parametrize("algorithm", COMPARES)
@given(seed=seeds)
@FEW
def test_a_group_of_one_gives_exactly_zero(
    algorithm: Algorithm, seed: int, build: Any, draw: Any
) -> None:
    for by_turn in turn_modes(algorithm):
        rows = rows_for(draw, algorithm, seed)
        lonely = [row for row in rows if row.group < 2] + [r for r in rows if r.group == 2][:1]
        case = build(without_kl(algorithm), lonely, by_turn=by_turn)
        assert (case.plan.advantage[case.batch.group[case.batch.row] == 2] == 0).all()


@pytest.mark.parametrize("algorithm", EVERY)
@given(seed=seeds)
@FEW
def test_a_row_without_rewards_is_as_if_it_were_not_there(
    algorithm: Algorithm, seed: int, build: Any, draw: Any
) -> None:
    for by_turn in turn_modes(algorithm):
        rows = rows_for(draw, algorithm, seed)
        gone = seed % len(rows)
        others = rows[:gone] + rows[gone + 1 :]
        wanted = build(algorithm, others, by_turn=by_turn)
        rows[gone].rewards = dict.fromkeys(rows[gone].rewards, NAN)
        rows[gone].turn_rewards = [NAN] * len(rows[gone].turn_rewards)
        case = build(algorithm, rows, by_turn=by_turn)
        here = case.batch.row == gone
        assert (case.plan.advantage[here] == 0).all()
        same(case.plan.advantage[~here], wanted.plan.advantage)


@pytest.mark.parametrize("algorithm", EVERY)
@given(seed=seeds)
@FEW
def test_components_that_abstain_here_and_there_stay_out_of_the_numbers(
    algorithm: Algorithm, seed: int, build: Any, draw: Any
) -> None:
    rng = np.random.default_rng(seed)
    for by_turn in turn_modes(algorithm):
        rows = rows_for(draw, algorithm, seed)
        for row in rows:
            row.rewards = {n: v if rng.random() < 0.7 else NAN for n, v in row.rewards.items()}
            row.turn_rewards = [v if rng.random() < 0.7 else NAN for v in row.turn_rewards]
        case = build(algorithm, rows, by_turn=by_turn)
        loss, gradient = case.run()
        assert torch.isfinite(case.plan.advantage).all()
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all()
        order = rng.permutation(len(rows))
        moved = build(algorithm, [rows[i] for i in order], by_turn=by_turn)
        by_row = case.per_row(case.plan.advantage)
        wanted = [value for i in order for value in by_row[i]]
        same(moved.plan.advantage.double(), torch.tensor(wanted, dtype=torch.float64))


@pytest.mark.parametrize("algorithm", COMPARES)
@given(seed=seeds)
@FEW
def test_a_group_with_one_valid_reward_gives_exactly_zero(
    algorithm: Algorithm, seed: int, build: Any, draw: Any
) -> None:
    rows = rows_for(draw, algorithm, seed)
    for row in [row for row in rows if row.group == 0][1:]:
        row.rewards = dict.fromkeys(row.rewards, NAN)
    case = build(without_kl(algorithm), rows)
    assert (case.plan.advantage[case.batch.group[case.batch.row] == 0] == 0).all()


def test_a_group_of_one_is_warned_of(
    build: Any, draw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = draw(0)
    lonely = [row for row in rows if row.group < 2] + [r for r in rows if r.group == 2][:1]
    for name in ("grpo", "gigpo", "dpo"):
        caplog.clear()
        build(without_kl(PRESETS[name]), rows)
        assert not caplog.messages
        build(without_kl(PRESETS[name]), lonely)
        assert "1 of 3 groups have only one rewarded trajectory" in caplog.text
    caplog.clear()
    build(PRESETS["reinforce"], lonely)
    assert not caplog.messages


MEAN_BASELINE = [
    pytest.param(small(PRESETS[name]), id=name)
    for name, algorithm in PRESETS.items()
    if isinstance(algorithm.advantage, GroupAdvantage)
    and algorithm.advantage.baseline in ("group_mean", "leave_one_out", "batch_mean")
    and algorithm.advantage.scale != "group_mean"
    and algorithm.advantage.virtual_rewards == 0
    and not algorithm.reward.shaping
    and algorithm.selection.keep_in_group is None
]


@pytest.mark.parametrize("algorithm", MEAN_BASELINE)
@given(seed=seeds, shift=st.floats(-3, 3))
@FEW
def test_a_constant_added_to_all_rewards_changes_nothing(
    algorithm: Algorithm, seed: int, shift: float, build: Any, draw: Any
) -> None:
    rows = rows_for(draw, algorithm, seed)
    wanted = build(algorithm, rows).plan.advantage
    for row in rows:
        row.rewards = {name: value + shift for name, value in row.rewards.items()}
    torch.testing.assert_close(build(algorithm, rows).plan.advantage, wanted, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("algorithm", MEAN_BASELINE)
@given(seed=seeds, factor=st.floats(0.1, 10))
@FEW
def test_scaling_the_rewards_scales_out_or_through(
    algorithm: Algorithm, seed: int, factor: float, build: Any, draw: Any
) -> None:
    advantage = algorithm.advantage
    assert isinstance(advantage, GroupAdvantage)
    divides = advantage.scale != "none" or advantage.whiten == "token"
    algorithm = without_kl(replace(algorithm, advantage=replace(advantage, eps=0.0)))
    rows = rows_for(draw, algorithm, seed)
    wanted = build(algorithm, rows).plan.advantage
    for row in rows:
        row.rewards = {name: value * factor for name, value in row.rewards.items()}
    found = build(algorithm, rows).plan.advantage
    wanted = wanted if divides else wanted * factor
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-8)


@given(seed=seeds, by_turn=st.booleans())
@FEW
def test_rloo_is_dr_grpo_times_g_over_g_minus_one(
    seed: int, by_turn: bool, build: Any, draw: Any
) -> None:
    rows = draw(seed, size=4)
    rloo = build(without_kl(PRESETS["rloo"]), rows, by_turn=by_turn).plan.advantage
    dr_grpo = build(PRESETS["dr_grpo"], rows, by_turn=by_turn).plan.advantage
    same(rloo, dr_grpo * 4 / 3)


@given(seed=seeds)
@FEW
def test_gae_with_both_ones_is_reward_to_go_minus_value(seed: int, build: Any, draw: Any) -> None:
    case = build(replace(PRESETS["ppo"], advantage=GAE(lam=1.0, whiten="none")), draw(seed))
    batch = case.batch
    rewards = torch.from_numpy(np.random.default_rng(seed).normal(size=batch.num_tokens))
    found = gae(rewards, batch.values, batch.rows, gamma=1.0, lam=1.0)
    position = 0
    for length in batch.rows.lengths.tolist():
        span = slice(position, position + length)
        to_go = rewards[span].flip(0).cumsum(0).flip(0)
        same(found[span], to_go - batch.values[span])
        position += length


@given(seed=seeds, gamma=st.floats(0, 1), lam=st.floats(0, 1))
@FEW
def test_gae_agrees_with_its_recursion(
    seed: int, gamma: float, lam: float, build: Any, draw: Any
) -> None:
    batch = build(PRESETS["ppo"], draw(seed)).batch
    rewards = torch.from_numpy(np.random.default_rng(seed).normal(size=batch.num_tokens))
    found = gae(rewards, batch.values, batch.rows, gamma=gamma, lam=lam)
    carry, following, row = 0.0, 0.0, -1
    for t in reversed(range(batch.num_tokens)):
        if int(batch.row[t]) != row:
            carry, following, row = 0.0, 0.0, int(batch.row[t])
        delta = float(rewards[t]) + gamma * following - float(batch.values[t])
        carry = delta + gamma * lam * carry
        following = float(batch.values[t])
        assert float(found[t]) == pytest.approx(carry, abs=1e-9)


@given(seed=seeds)
@FEW
def test_the_token_form_of_gspo_is_gspo(seed: int, build: Any, draw: Any) -> None:
    case = build(replace(PRESETS["gspo_token"], trust_region=Clip(low=0.1, high=0.1)), draw(seed))
    _, gradient = case.run()
    leaf = case.logp_new.clone().requires_grad_()
    batch, loss = case.batch, torch.zeros(())
    for row in range(batch.num_rows):
        here = batch.row == row
        ratio = (leaf - batch.logp_old)[here].mean().exp()
        advantage = case.plan.advantage[here][0]
        loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage)
    (loss / batch.num_rows).backward()
    assert leaf.grad is not None
    same(gradient, leaf.grad)


@given(seed=seeds)
@FEW
def test_gmpo_is_the_geometric_mean(seed: int, build: Any, draw: Any) -> None:
    region = GeometricClip(low=0.15, high=0.15)
    case = build(replace(PRESETS["gmpo"], trust_region=region), draw(seed))
    found, gradient = case.run()
    leaf = case.logp_new.clone().requires_grad_()
    batch, loss = case.batch, torch.zeros(())
    for row in range(batch.num_rows):
        here = batch.row == row
        d = (leaf - batch.logp_old)[here]
        advantage = case.plan.advantage[here][0]
        clipped = d.clamp(max=0.15) if advantage > 0 else d.clamp(min=-0.15)
        loss = loss - advantage * clipped.mean().exp()
    (loss / batch.num_rows).backward()
    assert leaf.grad is not None
    same(found, (loss / batch.num_rows).detach())
    same(gradient, leaf.grad)


@pytest.mark.parametrize("algorithm", EVERY)
@given(seed=seeds)
@FEW
def test_credit_does_not_depend_on_the_optimizer_steps(
    algorithm: Algorithm, seed: int, build: Any, draw: Any
) -> None:
    case = build(algorithm, rows_for(draw, algorithm, seed))
    step = case.batch.group % 2
    split = plan(case.bound, case.batch, step=step)
    same(split.advantage, case.plan.advantage)
    for number in (0, 1):
        rows = step == number
        alone = plan(case.bound, case.batch, step=torch.where(rows, 0, -1))
        inside = rows[case.batch.row]
        same(split.policy_weight[inside], alone.policy_weight[inside])
        assert (alone.weight[~inside] == 0).all()


@pytest.mark.parametrize("algorithm", EVERY)
@given(seed=seeds)
@FEW
def test_rules_of_rows_change_the_denominator_and_rules_of_tokens_do_not(
    algorithm: Algorithm, seed: int, build: Any, draw: Any
) -> None:
    if isinstance(algorithm.advantage, Pairs):
        return
    rows = rows_for(draw, algorithm, seed)
    rows[seed % len(rows)].truncated = True
    bare = build(replace(algorithm, tokens=()), rows).plan
    by_token = build(replace(algorithm, tokens=(HighEntropy(frac=0.3),)), rows).plan
    same(by_token.weight, bare.weight)
    assert (by_token.policy_weight == 0).sum() > (bare.policy_weight == 0).sum()
    case = build(replace(algorithm, tokens=(DropTruncated(),)), rows)
    gone = case.batch.truncated[case.batch.row]
    left = [row for row in rows if not row.truncated]
    others = build(replace(algorithm, tokens=()), left).plan
    assert (case.plan.weight[gone] == 0).all()
    same(case.plan.weight[~gone], others.weight)
    # Cut rows leave the loss and stay in the statistics.
    same(case.plan.advantage[~gone], bare.advantage[~gone])


@pytest.mark.parametrize("algorithm", EVERY)
@given(seed=seeds)
@FEW
def test_rows_that_may_be_skipped_have_no_gradient(
    algorithm: Algorithm, seed: int, build: Any, draw: Any
) -> None:
    case = build(algorithm, rows_for(draw, algorithm, seed))
    _, gradient = case.run()
    still = ~case.plan.moving_rows(case.batch)
    assert (gradient[still[case.batch.row]] == 0).all()


def test_spread_of_two_depends_on_the_degrees_of_freedom(build: Any, draw: Any) -> None:
    rows = draw(0, groups=1, size=2, max_turns=1)
    for row, reward in zip(rows, (0.0, 1.0), strict=True):
        row.rewards = {"correct": reward}
    for ddof, size in ((1, 0.5**0.5), (0, 1.0)):
        advantage = GroupAdvantage(scale="group_std", ddof=ddof, eps=0.0)
        case = build(replace(without_kl(PRESETS["grpo"]), advantage=advantage), rows)
        signs = case.batch.rewards["correct"][case.batch.row] * 2 - 1
        same(case.plan.advantage, signs * size)


def test_shaping_demonstrations_leaves_sampled_rows_alone(build: Any, draw: Any) -> None:
    rows = draw(3, with_demo=True)
    shaped = build(PRESETS["luffy"], rows)
    plain = build(replace(PRESETS["luffy"], ratio=Ratio()), rows)
    sampled = ~shaped.batch.demo[shaped.batch.row]
    same(shaped.run()[1][sampled], plain.run()[1][sampled])
    assert not torch.equal(shaped.run()[1], plain.run()[1])
