import random
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
import torch

from turngym.errors import ConfigError, TrajectoryError
from turngym.rl.algorithm import RunFacts
from turngym.rl.axes import AdaptiveK, Selection, TopK
from turngym.rl.batch import Batch
from turngym.rl.corrections import behavior_weight
from turngym.rl.estimators import Pairs
from turngym.rl.filters import (
    PassRates,
    adaptive_k,
    correct_rows,
    keep_group,
    keep_groups,
    priorities,
    retired,
    wants_more,
)
from turngym.rl.labels import majority_label, proposer_reward
from turngym.rl.masks import quantile, top_tokens
from turngym.rl.metrics import largest, mean_of, merge, part_of_sum
from turngym.rl.mismatch import mismatch, staleness
from turngym.rl.objectives import objective, value_objective
from turngym.rl.padded import batch_from_padded
from turngym.rl.plan import plan
from turngym.rl.preference import build_pairs
from turngym.rl.presets import PRESETS
from turngym.rl.regularizers import (
    adapt,
    kl_penalty,
    next_entropy_coef,
    next_kl_coef,
    penalty,
    value_loss,
)
from turngym.rl.replay import ReplayBuffer, join
from turngym.rl.state import AlgorithmState
from turngym.rl.surrogates import Tokens, surrogate
from turngym.rl.terms import KL, BehaviorCorrection, ClipCov, Entropy, OnlySpan, Regularizer
from turngym.rl.trust_region import DivergenceMask, TrustRegion
from turngym.types import RewardSpec

CORRECT = RewardSpec(name="correct", low=0.0, high=1.0)


@pytest.fixture
def run(group: Any, trajectory: Any) -> RunFacts:
    return RunFacts(
        rubric=group(trajectory()).rubric,
        group_size=16,
        max_tokens=8,
        has_reference=True,
        has_critic=True,
        topk=2,
    )


def padded(lengths: list[int], rewards: list[float], **columns: float) -> Batch:
    width = max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(-1)
    constant = {n: torch.full(mask.shape, v, dtype=torch.float64) for n, v in columns.items()}
    return batch_from_padded(
        mask=mask,
        group=torch.zeros(len(lengths), dtype=torch.int64),
        logp_rollout=torch.full(mask.shape, -1.0, dtype=torch.float64),
        rewards={"correct": torch.tensor(rewards, dtype=torch.float64)},
        columns=constant,
    )


def test_a_group_needs_right_and_wrong_members() -> None:
    assert keep_group([1.0, 0.0], "mixed")
    assert not keep_group([1.0, 1.0, None], "mixed")
    assert not keep_group([None, None], "mixed")
    assert keep_group([0.0, 0.0], "not_all_correct")
    assert keep_group([0.5, 0.7], "nonzero_spread")
    assert not keep_group([0.1 + 0.2, 0.3], "nonzero_spread")
    assert keep_group([0.6, 0.4], "mixed", correct_at=0.5)
    assert keep_group([1.0], "all")


def test_groups_are_filtered_on_the_metric_not_on_what_shapes_it(
    trajectory: Any, group: Any, run: RunFacts
) -> None:
    bound = PRESETS["dapo"].bind(run)
    solved = group(trajectory((2,)), trajectory((9,)))
    mixed = group(trajectory(), trajectory(correct=0.0))
    assert keep_groups(bound, [solved, mixed]) == [False, True]
    assert keep_groups(PRESETS["grpo"].bind(run), [solved]) == [True]


def test_a_turn_component_can_be_the_metric(trajectory: Any, group: Any, run: RunFacts) -> None:
    selection = Selection(metric="tool", keep_groups="nonzero_spread")
    bound = replace(PRESETS["grpo"], selection=selection).bind(run)
    equal = group(trajectory((1, 1), tool=(1.0, 0.0)), trajectory((1,), tool=(1.0,)))
    assert keep_groups(bound, [equal]) == [False]


def test_refilling_stops_at_the_cap(run: RunFacts) -> None:
    bound = PRESETS["dapo"].bind(run)
    assert wants_more(bound, wanted=8, kept=3, batches=9)
    assert not wants_more(bound, wanted=8, kept=8, batches=1)
    assert not wants_more(bound, wanted=8, kept=0, batches=10)
    assert not wants_more(PRESETS["scalerl"].bind(run), wanted=8, kept=0, batches=1)


def test_pass_rates_retire_tasks(trajectory: Any, group: Any, run: RunFacts) -> None:
    bound = PRESETS["scalerl"].bind(run)
    rates = PassRates({}, {})
    members = [trajectory(), trajectory(correct=0.0), trajectory(correct=None)]
    rates = rates.updated(bound, group(*members)).updated(bound, group(trajectory(), trajectory()))
    assert rates.rates() == {"t0": 0.75}
    assert retired({"a": 0.9, "b": 0.89}, 0.9) == {"a"}
    assert retired({"a": 1.0}, None) == set()


def test_half_solved_tasks_come_most() -> None:
    found = priorities(["half", "new", "solved"], {"half": 0.5, "solved": 1.0}, floor=0.1)
    assert found == pytest.approx([1 / 2.1, 1 / 2.1, 0.1 / 2.1])


def test_members_are_kept_by_length_or_order() -> None:
    batch = padded([3, 1, 2, 2], [1.0, 1.0, 0.0, 0.0])
    kept = {"shortest": [False, True, True, False], "first": [True, True, False, False]}
    for metric, wanted in kept.items():
        keep = TopK(k=2, metric=metric, denominator="kept")  # type: ignore[arg-type]
        algorithm = replace(PRESETS["grpo"], selection=Selection(keep_in_group=keep), regularize=())
        rubric = {"correct": CORRECT}
        planned = plan(algorithm.bind(RunFacts(rubric=rubric, group_size=4)), batch)
        assert planned.live.tolist() == wanted
        assert (planned.weight != 0).tolist() == torch.tensor(wanted)[batch.row].tolist()


def test_difficulties_are_remembered_between_batches() -> None:
    keep = AdaptiveK(ks=(3, 3, 2, 2), warmup=1)
    algorithm = replace(PRESETS["grpo"], selection=Selection(keep_in_group=keep), regularize=())
    bound = algorithm.bind(RunFacts(rubric={"correct": CORRECT}, group_size=4))
    batch = padded([1, 1, 1, 1], [1.0, 1.0, 1.0, 0.0])
    first = plan(bound, batch)
    assert first.live.sum() == 3
    # The mean over all members, not over the kept ones.
    assert first.state.group_means == (0.75,)
    assert adaptive_k(keep, 0.5, first.state.group_means) == 3
    assert adaptive_k(keep, 0.75, first.state.group_means) == 2
    assert plan(bound, batch, state=first.state).live.sum() == 2


def test_majority_of_nothing_is_nothing() -> None:
    assert majority_label([None, None]) == (None, 0.0)
    assert majority_label(["b", "a", "a", "b"]) == ("b", 0.5)


def test_no_metric_tells_nobody_right_from_wrong(trajectory: Any, group: Any) -> None:
    two = {name: RewardSpec(name=name) for name in ("a", "b")}
    bound = PRESETS["dr_grpo"].bind(RunFacts(rubric=two, group_size=2, max_tokens=4))
    with pytest.raises(ConfigError, match=r"selection\.metric"):
        PassRates({}, {}).updated(bound, group(trajectory()))
    with pytest.raises(ConfigError, match=r"selection\.metric"):
        correct_rows(bound, padded([1, 1], [1.0, 0.0]))


def test_a_turn_component_can_tell_right_from_wrong(
    trajectory: Any, group: Any, run: RunFacts
) -> None:
    algorithm = replace(PRESETS["grpo"], selection=Selection(metric="tool"), regularize=())
    members = [trajectory((1, 1), tool=(0.5, 0.5)), trajectory((1,), tool=(0.5,))]
    batch = Batch.from_groups([group(*members)])
    assert correct_rows(algorithm.bind(run), batch).tolist() == [True, False]


def test_groups_without_a_margin_give_no_pairs(run: RunFacts) -> None:
    batch = padded([1, 1], [1.0, 1.0], logp_ref=-1.0)
    bound = PRESETS["dpo"].bind(run)
    planned = plan(bound, batch)
    logp = torch.zeros(2, requires_grad=True)
    loss, _ = objective(bound, batch, planned, torch.arange(2), logp)
    (gradient,) = torch.autograd.grad(loss, logp)
    assert (loss.item(), gradient.tolist()) == (0.0, [0.0, 0.0])


def test_members_outside_every_pair_may_stay_out_of_the_forward_pass(run: RunFacts) -> None:
    batch = padded([1, 2, 1], [1.0, 0.5, 0.0], logp_ref=-1.0)
    bound = PRESETS["dpo"].bind(run)
    planned = plan(bound, batch)
    moving = planned.moving_rows(batch)
    assert moving.tolist() == [True, False, True]
    logp = torch.tensor([-0.5, -1.0, -1.0, -1.5], dtype=torch.float64)
    whole, _ = objective(bound, batch, planned, torch.arange(4), logp)
    index = moving[batch.row].nonzero().squeeze(-1)
    part, _ = objective(bound, batch, planned, index, logp[index])
    assert part.item() == whole.item()


def test_learnability_is_a_share(trajectory: Any) -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        proposer_reward(1.5)


def test_replay_keeps_sampled_successes_and_joins_them(
    trajectory: Any, group: Any, run: RunFacts
) -> None:
    bound = PRESETS["rlep"].bind(run)
    buffer = ReplayBuffer(per_task=2, tasks=2)
    right, wrong = trajectory((1,)), trajectory((2,), correct=0.0)
    for seen in (right, wrong, right):
        buffer.add(bound, seen)
    assert [kept.num_sampled for kept in buffer] == [1]
    for seen in (trajectory((3,)), trajectory((4,))):
        buffer.add(bound, seen)
    assert [kept.num_sampled for kept in buffer] == [3, 4]

    fresh = group(wrong, wrong)
    joined = join(fresh, buffer.draw(fresh, 5, random.Random(0)))
    assert [member.sample for member in joined.trajectories] == [0, 0, 2, 3]
    assert {member.num_sampled for member in joined.trajectories[2:]} == {3, 4}
    other = group(trajectory(task="t9"))
    assert join(other, buffer.draw(other, 2, random.Random(0))) is other
    for task in ("t1", "t2"):
        buffer.add(bound, trajectory(task=task))
    assert [kept.task_id for kept in buffer] == ["t1", "t2"]
    with pytest.raises(ConfigError, match="at least 1"):
        ReplayBuffer(per_task=0)


def test_pairs_of_a_group() -> None:
    returns = [0.5, None, 1.0, 0.0, 1.0]
    assert build_pairs(Pairs(), returns) == [(2, 3)]
    assert build_pairs(Pairs(margin=1.0), returns) == []
    assert build_pairs(Pairs(), [None]) == []
    crossed = [(0, 3), (2, 0), (2, 3), (4, 0), (4, 3)]
    assert build_pairs(Pairs(builder="all_cross"), returns) == crossed
    assert build_pairs(Pairs(builder="all_cross", max_pairs=2), returns) == crossed[:2]
    drawn = build_pairs(Pairs(builder="random_cross", max_pairs=3), returns, seed=1)
    assert drawn == build_pairs(Pairs(builder="random_cross", max_pairs=3), returns, seed=1)
    assert set(drawn) <= set(crossed)
    assert len(drawn) == 3


def test_a_pair_is_never_split(run: RunFacts) -> None:
    batch = padded([1, 1], [1.0, 0.0], logp_ref=-1.0)
    bound = PRESETS["dpo"].bind(run)
    with pytest.raises(TrajectoryError, match="whole groups"):
        plan(bound, batch, step=torch.tensor([0, 1]))
    with pytest.raises(TrajectoryError, match="whole groups"):
        objective(bound, batch, plan(bound, batch), torch.tensor([0]), torch.zeros(1))


def test_behaviour_weights_at_every_level() -> None:
    batch = padded([2, 1], [0.0, 0.0], logp_old=-0.5)
    batch = replace(batch, demo=torch.tensor([False, True]))
    e = torch.exp(torch.tensor(0.5)).item()
    wanted = {"token": [e, e, 1.0], "sequence": [e * e, e * e, 1.0], "geometric": [e, e, 1.0]}
    for level, weights in wanted.items():
        spec = BehaviorCorrection(level=level, high=9.0)  # type: ignore[arg-type]
        assert behavior_weight(spec, batch, batch.trainable).tolist() == pytest.approx(weights)
    spec = BehaviorCorrection(mode="mask", low=0.5, high=1.5)
    assert behavior_weight(spec, batch, batch.trainable).tolist() == [0.0, 0.0, 1.0]
    with pytest.raises(TrajectoryError, match="logp_old"):
        behavior_weight(spec, replace(batch, logp_old=None), batch.trainable)


def test_mismatch_and_staleness_are_measured_before_the_update() -> None:
    batch = padded([2, 2], [0.0, 0.0], logp_old=-1.0)
    batch = replace(batch, version=torch.tensor([3, 5, -1, -1]))
    everything, logp = torch.arange(4), batch.logp_rollout
    found = mismatch(batch, everything, logp)
    assert found["train/mismatch_ratio_p01"] == found["train/mismatch_ratio_p99"] == 1.0
    assert found["train/mismatch_kl"] == 0.0
    assert staleness(batch, 6) == {"train/staleness_mean": 2.0, "train/staleness_max": 3.0}
    nothing = replace(batch, mask=torch.zeros(4, dtype=torch.bool))
    assert mismatch(nothing, everything, logp) == {}
    assert staleness(replace(batch, version=torch.full((4,), -1)), 6) == {}


def test_the_top_share_holds_at_least_one_token() -> None:
    values, mask = torch.tensor([3.0, 9.0, 1.0]), torch.tensor([True, False, True])
    assert top_tokens(values, mask, 0.01).tolist() == [True, False, False]
    assert not top_tokens(values, torch.zeros(3, dtype=torch.bool), 0.5).any()


@pytest.mark.parametrize("q", [0.0, 0.37, 0.8, 1.0])
def test_quantiles_interpolate(q: float) -> None:
    values = torch.tensor([0.3, 0.1, 0.9, 0.4, 0.9, 0.2], dtype=torch.float64)
    assert quantile(values, q).item() == pytest.approx(torch.quantile(values, q).item())


def test_random_tokens_are_drawn_anew_and_repeatably() -> None:
    rng = torch.Generator().manual_seed(0)
    batch = replace(
        padded([50, 50], [1.0, 0.0]),
        logp_current=-torch.rand(100, generator=rng, dtype=torch.float64),
    )
    rule = ClipCov(low=0.0, high=9.0, frac=0.05)
    algorithm = replace(PRESETS["clip_cov"], tokens=(rule,))
    bound = algorithm.bind(RunFacts(rubric={"correct": CORRECT}, group_size=2))
    first = plan(bound, batch)
    assert (first.factor == 0).sum() == 5
    assert torch.equal(first.factor, plan(bound, batch).factor)
    assert not torch.equal(first.factor, plan(bound, batch, state=first.state).factor)


def test_only_a_marked_span_trains(trajectory: Any, group: Any, run: RunFacts) -> None:
    marked = [trajectory((1, 2, 1), infos=[{}, {"span": "reflection"}, {}]) for _ in range(2)]
    algorithm = replace(PRESETS["grpo"], tokens=(OnlySpan(),), regularize=())
    batch = Batch.from_groups([group(*marked)])
    planned = plan(algorithm.bind(run), batch)
    assert planned.mask.tolist() == [False, True, True, False] * 2
    assert planned.weight.sum().item() == pytest.approx(1.0)
    unmarked = plan(algorithm.bind(run), Batch.from_groups([group(trajectory())]))
    assert not unmarked.mask.any()


@pytest.mark.parametrize("name", ["grpo_high_entropy", "clip_cov", "kl_cov"])
def test_statistics_of_the_current_policy_need_a_pre_pass(name: str) -> None:
    algorithm = replace(PRESETS[name], reward=PRESETS["grpo"].reward)
    bound = algorithm.bind(RunFacts(rubric={"correct": CORRECT}, group_size=2))
    with pytest.raises(TrajectoryError, match="pre-pass"):
        plan(bound, padded([1, 1], [1.0, 0.0]))


def test_missing_columns_are_named(run: RunFacts) -> None:
    batch = padded([1, 1], [1.0, 0.0])
    index, logp = torch.arange(2), torch.full((2,), -1.0)

    def loss(name: str, **columns: Any) -> None:
        bound = PRESETS[name].bind(run)
        found = replace(batch, **columns)
        objective(bound, found, plan(bound, found), index, logp)

    with pytest.raises(TrajectoryError, match="logp_ref"):
        loss("grpo")
    with pytest.raises(TrajectoryError, match="entropies"):
        loss("gfpo", logp_ref=batch.logp_rollout)
    with pytest.raises(TrajectoryError, match="topk_logp"):
        loss("dppo_topk")
    with pytest.raises(TrajectoryError, match="logp_ref"):
        loss("dpo")
    with pytest.raises(TrajectoryError, match="logp_old"):
        loss("rloo")
    bound = PRESETS["dr_grpo"].bind(run)
    planned = plan(bound, batch)
    with pytest.raises(TrajectoryError, match="one log-probability per token"):
        objective(bound, batch, planned, index, logp[:1])
    with pytest.raises(TrajectoryError, match="logp_old"):
        plan(PRESETS["dr_grpo"].bind(replace(run, updates=4)), batch)
    with pytest.raises(TrajectoryError, match="values"):
        value_objective(bound, batch, planned, index, logp)


def test_rows_must_not_be_split_where_ratios_are_of_sequences(run: RunFacts) -> None:
    batch = padded([2, 2], [1.0, 0.0])
    bound = PRESETS["gspo"].bind(run)
    planned = plan(bound, batch)
    with pytest.raises(TrajectoryError, match="row 0 is split"):
        objective(bound, batch, planned, torch.tensor([0]), torch.zeros(1))


def test_the_distance_to_the_reference_is_measured_wherever_it_is_used(run: RunFacts) -> None:
    batch = padded([1, 1], [1.0, 0.0], logp_ref=-1.5, logp_old=-1.0)
    for name in ("grpo", "rloo"):
        bound = PRESETS[name].bind(run)
        logp = torch.full((2,), -1.0, dtype=torch.float64)
        _, metrics = objective(bound, batch, plan(bound, batch), torch.arange(2), logp)
        # k3 of d = 0.5: exp(-0.5) + 0.5 - 1.
        assert metrics["train/kl"].value() == pytest.approx(0.1065307)


def test_low_precision_is_computed_in_float32(run: RunFacts) -> None:
    batch = padded([2, 2], [1.0, 0.0])
    bound = PRESETS["dr_grpo"].bind(run)
    logp = torch.full((4,), -1.0, dtype=torch.bfloat16, requires_grad=True)
    loss, metrics = objective(bound, batch, plan(bound, batch), torch.arange(4), logp)
    assert loss.dtype == torch.float32
    assert metrics["train/ratio"].value() == 1.0


def test_an_unregistered_region_says_how_to_register(run: RunFacts) -> None:
    with pytest.raises(ConfigError, match=r"surrogate\.register"):
        surrogate(TrustRegion(), None)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surprise(Regularizer):
    """Keep sampled tokens likely."""

    coef: float = 0.5


@penalty.register
def surprise(term: Surprise, tokens: Tokens) -> torch.Tensor:
    return term.coef * tokens.logp.square()


def test_a_regularizer_of_ones_own_adds_to_the_loss(run: RunFacts) -> None:
    batch = padded([2, 1, 1], [1.0, 1.0, 1.0])
    bound = replace(PRESETS["dr_grpo"], regularize=(Surprise(),)).bind(run)
    planned = plan(bound, batch)
    assert (planned.advantage == 0).all()
    assert planned.moving_rows(batch).all()
    logp = torch.tensor([-1.0, -2.0, -3.0, -4.0], requires_grad=True)
    loss, metrics = objective(bound, batch, planned, torch.arange(4), logp)
    # Sums over tokens, mean over three rows, divided by the constant.
    length = bound.algorithm.aggregate.length
    assert length is not None
    assert loss.item() == pytest.approx(0.5 * (1 + 4 + 9 + 16) / 3 / length)
    assert metrics["loss/Surprise"].value() == pytest.approx(loss.item())
    parts = [
        objective(bound, batch, planned, index, logp[index])[0]
        for index in torch.tensor([[0], [1], [2], [3]])
    ]
    assert sum(part.item() for part in parts) == pytest.approx(loss.item())


def test_a_regularizer_without_arithmetic_is_not_ignored(run: RunFacts) -> None:
    batch = padded([1, 1], [1.0, 0.0])
    bound = replace(PRESETS["dr_grpo"], regularize=(Regularizer(),)).bind(run)
    with pytest.raises(ConfigError, match=r"penalty\.register"):
        objective(bound, batch, plan(bound, batch), torch.arange(2), torch.zeros(2))


def test_topk_divergence_masks_tokens_that_move_away() -> None:
    def tokens(topk_new: list[float]) -> Tokens:
        old = torch.tensor([[0.5, 0.3]]).log()
        logp = torch.tensor([topk_new[0]]).log()
        return Tokens(
            logp=logp,
            anchor=torch.tensor([0.5]).log(),
            log_ratio=logp - torch.tensor([0.5]).log(),
            advantage=torch.ones(1),
            mask=torch.ones(1, dtype=torch.bool),
            row=torch.zeros(1, dtype=torch.int64),
            num_rows=1,
            topk_old=old,
            topk_new=torch.tensor([topk_new]).log(),
            topk_hit=torch.tensor([True]),
        )

    for kind, bound in (("topk_tv", 0.15), ("topk_kl", 0.05)):
        region = DivergenceMask(measure=kind, low=bound, high=bound)  # type: ignore[arg-type]
        near, far = surrogate(region, tokens([0.55, 0.3])), surrogate(region, tokens([0.8, 0.1]))
        assert near.bound is not None
        assert far.bound is not None
        assert (near.bound.item(), far.bound.item()) == (False, True)


def test_the_gradient_of_k3_plus_is_that_of_k2() -> None:
    d = torch.tensor([0.3, -0.7], requires_grad=True)
    for estimator in ("k2", "k3_plus"):
        (gradient,) = torch.autograd.grad(kl_penalty(d, estimator).sum(), d)
        assert gradient.tolist() == pytest.approx([0.3, -0.7])


def test_values_are_not_rewarded_for_leaving_the_clip() -> None:
    values = torch.tensor([1.0], requires_grad=True)
    loss = value_loss(values, torch.tensor([0.0]), torch.tensor([2.0]), clip=0.2)
    assert loss.item() == pytest.approx(0.5 * 1.8**2)
    assert value_loss(values, values, torch.tensor([2.0]), clip=None).item() == 0.5


def test_coefficients_adapt_to_their_targets(run: RunFacts) -> None:
    assert next_kl_coef(1.0, 9.0, target=1.0, horizon=100, count=10) == pytest.approx(1.02)
    assert next_kl_coef(1.0, 0.9, target=1.0, horizon=100, count=10) == pytest.approx(0.99)
    assert next_entropy_coef(0.01, 0.1, target=0.2, step=0.005) == pytest.approx(0.015)
    assert next_entropy_coef(0.001, 0.3, target=0.2, step=0.005) == 0.0
    terms = (KL(coef=1.0, target=1.0, horizon=100), Entropy(coef=0.01, target=0.2))
    bound = replace(PRESETS["grpo"], regularize=terms).bind(run)
    state = adapt(bound, AlgorithmState(), kl=9.0, entropy=0.1, count=10)
    assert (state.kl_coef, state.entropy_coef) == pytest.approx((1.02, 0.015))
    batch = padded([1, 1], [1.0, 0.0], logp_ref=-1.0)
    planned = plan(bound, batch, state=state)
    assert (planned.kl_coef, planned.entropy_coef) == pytest.approx((1.02, 0.015))
    assert adapt(PRESETS["grpo"].bind(run), state, kl=9.0, entropy=0.0, count=1) == state


def test_the_reference_moves_every_so_many_steps() -> None:
    term = KL(reset_steps=200)
    assert [step for step in range(1, 601) if term.resets_after(step)] == [200, 400, 600]
    assert not KL().resets_after(200)


def test_state_is_plain_data() -> None:
    state = AlgorithmState(step=3, ema=0.5, group_means=(0.1,))
    assert AlgorithmState(**asdict(state)) == state


def test_metrics_combine_by_their_reduction() -> None:
    ones, mask = torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False])
    parts = [
        {"loss": part_of_sum(ones[0]), "mean": mean_of(ones, mask), "max": largest(ones, mask)},
        {"loss": part_of_sum(ones[1]), "mean": mean_of(ones, ~mask), "max": largest(ones, ~mask)},
    ]
    assert merge(parts) == {"loss": 3.0, "mean": 4.0, "max": 9.0}
    assert merge([{"max": largest(ones[:0], mask[:0])}]) == {"max": float("-inf")}
    with pytest.raises(TypeError, match="sum does not combine with a max"):
        merge([{"x": parts[0]["loss"]}, {"x": parts[0]["max"]}])
