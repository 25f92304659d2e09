import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from turngym.errors import ConfigError, TrajectoryError
from turngym.rl.algorithm import Algorithm, RunFacts
from turngym.rl.axes import (
    Gate,
    KeepInGroup,
    MajorityVote,
    NegativeEntropy,
    Reward,
    Selection,
    SelfCertainty,
    Shaping,
    SoftOverlong,
)
from turngym.rl.batch import Batch, Tree
from turngym.rl.estimators import (
    GAE,
    AnchorState,
    Estimator,
    GroupAdvantage,
    OutcomeAndTurn,
    PassAtK,
    StepValues,
    TreeCredit,
)
from turngym.rl.padded import batch_from_padded
from turngym.rl.passk import chen, pkpo, pkpo_rewards
from turngym.rl.plan import plan
from turngym.rl.presets import PRESETS
from turngym.rl.returns import returns_of, soft_overlong
from turngym.rl.state import AlgorithmState
from turngym.rl.trees import should_branch, treepo_advantages, treerl_rewards
from turngym.types import RewardSpec

NAN = float("nan")


def make(
    rewards: dict[str, list[float]],
    *,
    turns: list[list[int]] | None = None,
    turn_rewards: dict[str, list[list[float]]] | None = None,
    group: list[int] | None = None,
) -> Batch:
    """One policy token a turn unless `turns` lists the turn of every token."""
    columns: list[list[Any]] = [*rewards.values(), *(turn_rewards or {}).values()]
    size = len(columns[0])
    turns = turns or [[0]] * size
    width = max(len(row) for row in turns)
    return batch_from_padded(
        mask=torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in turns]),
        group=torch.tensor(group or [0] * size),
        logp_rollout=torch.zeros((size, width), dtype=torch.float64),
        rewards={n: torch.tensor(v, dtype=torch.float64) for n, v in rewards.items()},
        turn_rewards={
            n: torch.tensor(v, dtype=torch.float64) for n, v in (turn_rewards or {}).items()
        },
        turn=torch.tensor([row + [0] * (width - len(row)) for row in turns]),
    )


def bind(batch: Batch, algorithm: Algorithm, **facts: Any) -> Any:
    rubric = {n: RewardSpec(name=n, low=0.0, high=1.0) for n in batch.rewards}
    rubric |= {n: RewardSpec(name=n, level="turn") for n in batch.turn_rewards}
    run = RunFacts(rubric=rubric, group_size=4, has_critic=True, max_tokens=9, **facts)
    return algorithm.bind(run)


def advantage(batch: Batch, estimator: Estimator, **axes: Any) -> list[float]:
    algorithm = replace(PRESETS["reinforce"], advantage=estimator, **axes)
    return plan(bind(batch, algorithm), batch).advantage.tolist()


def near(values: list[float]) -> Any:
    return pytest.approx(values, abs=1e-4)


def test_reward_to_go_over_tokens_skips_observations() -> None:
    # Rewards [0,0,0,0,2], sampled [1,1,0,0,1], gamma .5 per policy token: [.5, 1, -, -, 2].
    batch = make({"r": [2.0]}, turns=[[0, 0, 1]])
    estimator = GroupAdvantage(baseline="none", unit="token", gamma=0.5)
    assert advantage(batch, estimator) == [0.5, 1.0, 2.0]


def test_reward_to_go_over_turns_discounts_turns() -> None:
    batch = make({}, turns=[[0, 0, 1]], turn_rewards={"r": [[0.0, 2.0]]})
    estimator = GroupAdvantage(baseline="none", unit="turn", gamma=0.5)
    assert advantage(batch, estimator) == [1.0, 1.0, 2.0]


JUDGED = {"format": [1.0, 1.0, 0.0, 1.0], "correct": [1.0, 0.0, NAN, 1.0]}
POPULATION = GroupAdvantage(scale="group_std", ddof=0, eps=0.0)


def test_a_failed_judge_can_exclude_the_row() -> None:
    found = advantage(make(JUDGED), POPULATION, reward=Reward(missing="row"))
    assert found == near([0.7071, -1.4142, 0.0, 0.7071])


def test_the_format_of_the_rows_that_are_left_has_no_spread() -> None:
    reward = Reward(missing="row", weights={"correct": 0.0})
    assert advantage(make(JUDGED), POPULATION, reward=reward) == [0.0] * 4


def test_a_failed_judge_can_exclude_its_reward_only() -> None:
    reward = Reward(combine="normalize_then_sum")
    found = advantage(make(JUDGED), POPULATION, reward=reward)
    assert found == near([1.2845, -0.8369, -1.7321, 1.2845])


def test_an_abstaining_component_neither_pays_nor_costs_in_a_sum() -> None:
    # format: 1/4 above or 3/4 below its mean; correct: mean 2/3 of the three that were judged.
    found = advantage(make(JUDGED), GroupAdvantage())
    assert found == near([0.25 + 1 / 3, 0.25 - 2 / 3, -0.75, 0.25 + 1 / 3])


def test_components_of_equal_sum_cancel_exactly() -> None:
    batch = make({"a": [0.1, 0.2, 0.3], "b": [0.3, 0.2, 0.1]})
    for estimator in (GroupAdvantage(scale="group_std"), GroupAdvantage(baseline="leave_one_out")):
        assert advantage(batch, estimator) == [0.0] * 3


def test_gdpo_keeps_apart_what_the_sum_confuses() -> None:
    batch = make({"a": [1.0, 0.0, 0.0, 0.0], "b": [0.0, 1.0, 1.0, 1.0]})
    summed = advantage(batch, GroupAdvantage(scale="group_std"))
    apart = advantage(
        batch,
        GroupAdvantage(scale="group_std"),
        reward=Reward(combine="normalize_then_sum", weights={"a": 1.0, "b": 0.5}),
    )
    assert summed == [0.0] * 4
    assert apart[0] > 0.7
    assert apart[1] < 0


def test_a_rare_turn_keeps_its_weight() -> None:
    # Two of four reach turn 1; factor 3/4 everywhere, baselines of the others at that turn.
    batch = make(
        {},
        turns=[[0, 1], [0, 1], [0], [0]],
        turn_rewards={"r": [[0.0, 1.0], [0.0, 0.0], [1.0, NAN], [0.0, NAN]]},
    )
    found = advantage(batch, GroupAdvantage())
    wanted = [1 - 1 / 3, 1 - 0, 0 - 2 / 3, 0 - 1, 1 - 1 / 3, 0 - 2 / 3]
    assert found == near([0.75 * value for value in wanted])


def test_turn_credit_of_one_turn_is_the_trajectory_form() -> None:
    rewards = [0.9, 0.1, 0.4, 0.4]
    by_turn = make({}, turn_rewards={"r": [[value] for value in rewards]})
    for scale in ("none", "group_std"):
        estimator = GroupAdvantage(scale=scale)
        assert advantage(by_turn, estimator) == pytest.approx(
            advantage(make({"r": rewards}), estimator), abs=1e-12
        )


def test_whole_trajectories_sum_turn_rewards_and_outcome() -> None:
    batch = make(
        {"r": [1.0, 0.0]}, turns=[[0, 1], [0]], turn_rewards={"t": [[0.25, 0.5], [0.5, NAN]]}
    )
    found = advantage(batch, GroupAdvantage(unit="trajectory"))
    assert found == near([0.625, 0.625, -0.625])


def test_the_outcome_sits_on_the_last_policy_token() -> None:
    batch = make({"r": [1.0]}, turns=[[0, 0, 1]], turn_rewards={"t": [[0.5, NAN]]})
    estimator = GroupAdvantage(baseline="none", unit="token", gamma=0.0)
    assert advantage(batch, estimator) == [0.0, 0.5, 1.0]


def test_buckets_pool_rows_of_different_groups() -> None:
    batch = replace(
        make({"r": [1.0, 0.0, 3.0, 2.0]}, group=[0, 0, 1, 1]), bucket=torch.tensor([0, 1, 0, 1])
    )
    assert advantage(batch, GroupAdvantage(pool="bucket")) == near([-1.0, -1.0, 1.0, 1.0])
    with pytest.raises(TrajectoryError, match="bucket"):
        advantage(replace(batch, bucket=None), GroupAdvantage(pool="bucket"))


def test_the_moving_average_starts_with_the_first_batch() -> None:
    algorithm = replace(PRESETS["reinforce"], advantage=GroupAdvantage(baseline="ema"))
    batch = make({"r": [1.0, 0.0]})
    bound = bind(batch, algorithm)
    first = plan(bound, batch)
    second = plan(bound, batch, state=first.state)
    assert first.advantage.tolist() == [1.0, 0.0]
    assert second.advantage.tolist() == [0.5, -0.5]
    assert (second.state.ema, second.state.step) == (0.5, 2)


def test_negative_returns_have_no_success_rate() -> None:
    with pytest.raises(ConfigError, match=r"\[0, 1\]"):
        advantage(make({"r": [1.0, -1.0]}), GroupAdvantage(scale="group_mean"))


def test_greedy_baselines_need_greedy_rollouts() -> None:
    with pytest.raises(TrajectoryError, match="greedy"):
        advantage(make({"r": [1.0]}), GroupAdvantage(baseline="greedy"))


def test_labels_come_from_the_majority_of_each_group() -> None:
    batch = replace(
        make({"r": [0.0] * 5}, group=[0, 0, 0, 1, 1]), answers=("7", "7", "3", None, None)
    )
    reward = Reward(shaping=(MajorityVote(),))
    found = advantage(batch, GroupAdvantage(baseline="none"), reward=reward)
    assert found == [1.0, 1.0, 0.0, 0.0, 0.0]
    with pytest.raises(TrajectoryError, match="answers"):
        advantage(replace(batch, answers=()), GroupAdvantage(), reward=reward)


def test_certainty_and_entropy_are_rewards_of_the_policy_itself() -> None:
    batch = make({"r": [0.0, 0.0]}, turns=[[0, 0], [0]])
    column = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)
    plain = GroupAdvantage(baseline="none")
    sure = replace(batch, certainty=column)
    found = advantage(sure, plain, reward=Reward(shaping=(SelfCertainty(),)))
    assert found == [2.0, 2.0, 0.5]
    calm = replace(batch, entropy=column)
    found = advantage(calm, plain, reward=Reward(shaping=(NegativeEntropy(),)))
    assert found == [-2.0, -2.0, -0.5]
    with pytest.raises(TrajectoryError, match="certainty"):
        advantage(batch, plain, reward=Reward(shaping=(SelfCertainty(),)))


def test_length_punishes_only_scored_rows() -> None:
    batch = make({"r": [1.0, NAN]}, turns=[[0] * 4, [0] * 4])
    reward = Reward(shaping=(SoftOverlong(max_tokens=4, cache_tokens=2),))
    bound = bind(batch, replace(PRESETS["grpo"], reward=reward, regularize=()))
    returns = returns_of(bound, batch)
    assert returns.live.tolist() == [True, False]
    assert returns.steps.sum((0, 2)).tolist() == [0.0, 0.0]


def test_turn_rewards_wait_for_the_outcome() -> None:
    batch = make(
        {"right": [1.0, 0.0, NAN], "style": [0.0, 1.0, NAN]},
        turns=[[0, 1]] * 3,
        turn_rewards={"step": [[1.0, 0.5], [1.0, NAN], [1.0, 1.0]]},
    )
    gated = replace(
        PRESETS["reinforce"],
        reward=Reward(shaping=(Gate(threshold=0.5),), weights={"style": 0.5}),
    )
    returns = returns_of(bind(batch, gated), batch)
    # The outcome is 1, above the gate; 0.5, not above it; unknown, and then so is what it gates.
    assert returns.steps[2].tolist() == [[1.0, 0.5], [0.0, 0.0], [0.0, 0.0]]
    assert returns.valid[2].tolist() == [True, True, False]
    assert returns.live.tolist() == [True, True, False]
    alone = make({}, turns=[[0], [0]], turn_rewards={"step": [[1.0], [0.5]]})
    with pytest.raises(ConfigError, match="outcome"):
        returns_of(bind(alone, replace(gated, reward=Reward(shaping=(Gate(),)))), alone)


def test_shaping_never_overwrites_a_reward_of_the_environment() -> None:
    reward = Reward(shaping=(SoftOverlong(),))
    with pytest.raises(ConfigError, match="rename"):
        advantage(make({"overlong": [1.0, 0.0]}), GroupAdvantage(), reward=reward)


def test_returns_refuse_components_outside_the_rubric() -> None:
    batch = make({"r": [1.0, 0.0]})
    bound = bind(batch, replace(PRESETS["grpo"], regularize=()))
    with pytest.raises(TrajectoryError, match="'other'"):
        plan(bound, replace(batch, rewards={"other": batch.rewards["r"]}))


def test_unbound_algorithms_are_told_to_bind() -> None:
    batch = make({"r": [1.0, 0.0], "correct": [1.0, 0.0]})
    unbound: list[tuple[Algorithm, str]] = [
        (replace(PRESETS["grpo"], regularize=()), "no unit"),
        (replace(PRESETS["ngrpo"], reward=Reward()), "no value"),
        (PRESETS["dapo"], "no limit"),
        (PRESETS["gdpo_conditioned"], "no component"),
        (
            replace(PRESETS["dr_grpo"], advantage=GroupAdvantage(unit="trajectory")),
            "no constant L",
        ),
    ]
    for algorithm, rule in unbound:
        bound = replace(bind(batch, replace(PRESETS["reinforce"])), algorithm=algorithm)
        with pytest.raises(ConfigError, match=rule):
            plan(bound, batch)


def test_new_kinds_must_be_registered() -> None:
    batch = make({"r": [1.0, 0.0]})
    with pytest.raises(ConfigError, match=r"estimate\.register"):
        advantage(batch, Estimator())
    with pytest.raises(ConfigError, match=r"shape\.register"):
        advantage(batch, GroupAdvantage(), reward=Reward(shaping=(Shaping(),)))
    selection = Selection(keep_in_group=KeepInGroup())
    with pytest.raises(ConfigError, match="KeepInGroup"):
        advantage(batch, GroupAdvantage(), selection=selection)


def test_mt_grpo_knows_no_shaping() -> None:
    batch = make({"r": [1.0, 0.0]})
    with pytest.raises(TrajectoryError, match="no shaping"):
        advantage(batch, OutcomeAndTurn(), reward=Reward(shaping=(SoftOverlong(),)))


def test_the_penalty_may_start_at_the_limit() -> None:
    lengths = torch.tensor([3, 4, 5])
    assert soft_overlong(lengths, max_tokens=4, cache_tokens=0).tolist() == [0.0, 0.0, -1.0]


def test_normalised_components_may_keep_their_spread() -> None:
    batch = make({"a": [1.0, 0.0], "b": [4.0, 0.0]})
    reward = Reward(combine="normalize_then_sum", weights={"a": 1.0, "b": 0.5})
    assert advantage(batch, GroupAdvantage(), reward=reward) == [1.5, -1.5]
    loo = GroupAdvantage(baseline="leave_one_out")
    assert advantage(batch, loo, reward=reward) == [3.0, -3.0]


def test_virtual_rewards_may_shift_without_dividing() -> None:
    estimator = GroupAdvantage(virtual_rewards=1, max_return=1.0)
    assert advantage(make({"r": [0.0, 0.0]}), estimator) == near([-1 / 3, -1 / 3])


def test_a_batch_without_rewards_leaves_the_moving_average_alone() -> None:
    algorithm = replace(PRESETS["reinforce"], advantage=GroupAdvantage(baseline="ema"))
    batch = make({"r": [NAN, NAN]})
    planned = plan(bind(batch, algorithm), batch, state=AlgorithmState(ema=0.5))
    assert planned.advantage.tolist() == [0.0, 0.0]
    assert planned.state.ema == 0.5


MISSING: list[tuple[Estimator, str]] = [
    (GAE(), "values"),
    (AnchorState(), "anchor_state"),
    (StepValues(), "step_values"),
    (TreeCredit(), "tree"),
]


@pytest.mark.parametrize(("estimator", "column"), MISSING)
def test_estimators_name_the_column_they_miss(estimator: Estimator, column: str) -> None:
    with pytest.raises(TrajectoryError, match=column):
        advantage(make({"r": [1.0, 0.0]}), estimator)


def test_truncated_rows_may_bootstrap() -> None:
    batch = replace(
        make({"r": [0.0, 0.0]}, turns=[[0, 0], [0, 0]]),
        values=torch.zeros(4, dtype=torch.float64),
        truncated=torch.tensor([True, False]),
        bootstrap=torch.tensor([2.0, 2.0], dtype=torch.float64),
    )
    estimator = GAE(lam=1.0, whiten="none", bootstrap_truncated=True)
    assert advantage(batch, estimator) == [2.0, 2.0, 0.0, 0.0]
    with pytest.raises(TrajectoryError, match="bootstrap"):
        advantage(replace(batch, bootstrap=None), estimator)


def test_mt_grpo_counts_each_turn_from_there_on() -> None:
    batch = make(
        {"r": [1.0, 0.0]},
        turns=[[0, 1], [0, 1]],
        turn_rewards={"t": [[1.0, 1.0], [0.0, 0.0]]},
    )
    half = 0.5**0.5
    found = advantage(batch, OutcomeAndTurn(eps=0.0))
    assert found == near([3 * half, 2 * half, -3 * half, -2 * half])


def brute_force(rewards: list[float], k: int) -> tuple[list[float], list[float], list[float]]:
    n = len(rewards)
    s, minus_one, sloo = [0.0] * n, [0.0] * n, [0.0] * n
    for subset in itertools.combinations(range(n), k):
        best = max(rewards[i] for i in subset)
        for i in subset:
            s[i] += best / math.comb(n, k)
            without = max(rewards[j] for j in subset if j != i)
            minus_one[i] += (best - without) / math.comb(n, k)
    for i in range(n):
        others = [rewards[j] for j in range(n) if j != i]
        if len(others) >= k:
            tops = [max(subset) for subset in itertools.combinations(others, k)]
            sloo[i] = s[i] - k / (n - 1) * sum(tops) / len(tops)
    return s, minus_one, sloo


@pytest.mark.parametrize("k", [2, 3, 4])
def test_pkpo_agrees_with_enumerating_subsets(k: int) -> None:
    for seed in range(5):
        rewards = np.random.default_rng(seed).choice([0.0, 0.5, 1.0, 2.0], 6).tolist()
        s, minus_one, sloo = brute_force(rewards, k)
        table = np.array([rewards])
        np.testing.assert_allclose(pkpo_rewards(table, k)[0], s, atol=1e-12)
        np.testing.assert_allclose(pkpo(table, k, minus_one=True)[0], minus_one, atol=1e-12)
        np.testing.assert_allclose(pkpo(table, k, minus_one=False)[0], sloo, atol=1e-12)


def test_chen_rewards_the_one_that_was_right() -> None:
    # n=5, one right, k=2: rate 1 - C(4,2)/C(5,2) = .4, spread sqrt(.24), C(3,1)/C(4,1) = .75.
    found = chen(np.array([[1.0, 0.0, 0.0, 0.0, 0.0]]), 2, eps=0.0)[0]
    spread = 0.24**0.5
    assert found.tolist() == near([0.6 / spread] + [(0.6 - 0.75) / spread] * 4)
    with pytest.raises(ConfigError, match="0 and 1"):
        chen(np.array([[0.5, 0.0]]), 2)


def test_pass_at_k_takes_groups_of_different_sizes() -> None:
    batch = make({"r": [1.0, 0.0, 0.0, 1.0, 0.0]}, group=[0, 0, 0, 1, 1])
    found = advantage(batch, PassAtK(method="sloo_minus_one", k=2))
    first = pkpo(np.array([[1.0, 0.0, 0.0]]), 2, minus_one=True)[0].tolist()
    second = pkpo(np.array([[1.0, 0.0]]), 2, minus_one=True)[0].tolist()
    assert found == near(first + second)


def test_trees_credit_the_fork_that_made_the_difference() -> None:
    # Root 0 forks into 1 (leaves 3, 4) and 2 (leaf 5).
    parents, leaves = [-1, 0, 0, 1, 1, 2], {3: 1.0, 4: 0.0, 5: 0.0}
    found = treerl_rewards(parents, leaves)
    assert found[0] == 0.0
    assert found[1] > 0 > found[2]
    advantages = treepo_advantages(parents, leaves)
    # Leaf 3: 1 - 1/2 in node 1 and 1 - 1/3 in the root.
    assert advantages[3] == pytest.approx((1 / 2 + 2 / 3) / 2)
    weighted = treepo_advantages(parents, leaves, by_size=True)
    assert weighted[3] == pytest.approx((2 * 1 / 2 + 3 * 2 / 3) / 5)
    with pytest.raises(TrajectoryError, match="before its parent"):
        treerl_rewards([1, -1], {0: 1.0})


@pytest.mark.parametrize("method", ["treerl", "treepo"])
def test_tree_credit_reaches_tokens(method: str) -> None:
    batch = make({"r": [1.0, 0.0, 0.0]}, turns=[[0, 0]] * 3)
    node = torch.tensor([1, 3, 1, 4, 2, 5])
    tree = Tree(node, torch.tensor([-1, 0, 0, 1, 1, 2]), torch.tensor([3, 4, 5]))
    found = advantage(replace(batch, tree=tree), TreeCredit(method=method))  # type: ignore[arg-type]
    assert found[1] > found[3]
    if method == "treerl":
        # The first token of rows 0 and 1 is one shared node.
        assert found[0] == found[2]


def test_a_shared_prefix_has_the_mean_of_its_branches() -> None:
    batch = make({"r": [1.0, 0.0, 0.0]}, turns=[[0, 0]] * 3)
    node = torch.tensor([1, 3, 1, 4, 2, 5])
    tree = Tree(node, torch.tensor([-1, 0, 0, 1, 1, 2]), torch.tensor([3, 4, 5]))
    found = advantage(replace(batch, tree=tree), TreeCredit(method="arpo"))
    right, wrong = 2 / 3 / math.sqrt(1 / 3), -1 / 3 / math.sqrt(1 / 3)
    shared = (right + wrong) / 2
    assert found == near([shared, right, shared, wrong, wrong, wrong])


def test_trees_are_weighed_by_size_where_asked() -> None:
    batch = make({"r": [1.0, 0.0, 0.0]}, turns=[[0, 0]] * 3)
    node = torch.tensor([1, 3, 1, 4, 2, 5])
    tree = Tree(node, torch.tensor([-1, 0, 0, 1, 1, 2]), torch.tensor([3, 4, 5]))
    even, sized = (
        advantage(replace(batch, tree=tree), TreeCredit(method="treepo", by_size=by_size))
        for by_size in (False, True)
    )
    assert even != near(sized)
    with pytest.raises(ConfigError, match="method='treepo'"):
        TreeCredit(by_size=True)


def test_branching_needs_a_rise_of_uncertainty() -> None:
    assert should_branch(0.1)
    assert not should_branch(0.0)


def test_one_component_of_two_levels_pays_each_turn() -> None:
    batch = make(
        {},
        turns=[[0, 1], [0]],
        turn_rewards={"a": [[1.0, NAN], [NAN, NAN]], "b": [[0.0, 2.0], [1.0, NAN]]},
    )
    bound = bind(batch, replace(PRESETS["grpo"], regularize=()))
    returns = returns_of(bound, batch)
    assert returns.valid.tolist() == [[True, False], [True, True]]
    wanted = torch.tensor([[[1.0, 0.0], [0.0, 0.0]], [[2.0, 2.0], [1.0, 0.0]]]).double()
    assert torch.equal(returns.to_go(1.0), wanted)
    filled: Tensor = returns.filled(batch.group, 1)
    assert filled.tolist() == [[1.0, 2.0], [2.0, 0.0]]
