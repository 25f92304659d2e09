"""A decision problem small enough to enumerate: expectations are exact, without sampling noise.

Turn 0: stop or go. Turn 1, after go: left or right. Three trajectories, so a group of G has 3^G
outcomes. The expected gradient of a loss over all of them is compared with that of the return.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from turngym.rl.advantages import centre
from turngym.rl.algorithm import Algorithm, RunFacts
from turngym.rl.axes import Aggregate, Reward
from turngym.rl.batch import Batch
from turngym.rl.credit import Case, Estimate, estimate, paint
from turngym.rl.estimators import Estimator, GroupAdvantage, PassAtK, TurnNormalized
from turngym.rl.objectives import objective
from turngym.rl.plan import plan
from turngym.rl.presets import PRESETS
from turngym.types import RewardSpec

NAN = float("nan")
STOP, LEFT, RIGHT = range(3)
TURNS = {STOP: 1, LEFT: 2, RIGHT: 2}
# Turn rewards of `tool`, and the outcome `correct`; `judge` abstains on one trajectory.
TOOL = {STOP: [0.7], LEFT: [0.1, 1.0], RIGHT: [0.1, -0.4]}
CORRECT = {STOP: 0.0, LEFT: 0.0, RIGHT: 1.0}
WEIGHTS = {"tool": 1.0, "correct": 0.6}

RUN = RunFacts(
    rubric={
        "tool": RewardSpec(name="tool", level="turn", weight=WEIGHTS["tool"]),
        "correct": RewardSpec(name="correct", low=0.0, high=1.0, weight=WEIGHTS["correct"]),
    },
    group_size=3,
    max_tokens=2,
)


def reals(values: Sequence[object]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def logits() -> Tensor:
    """Go over stop, right over left."""
    return reals([0.4, -0.8]).requires_grad_()


def log_chances(theta: Tensor) -> dict[int, list[Tensor]]:
    """Log-probability of each token of each trajectory."""
    go, right = torch.sigmoid(theta)
    return {
        STOP: [(1 - go).log()],
        LEFT: [go.log(), (1 - right).log()],
        RIGHT: [go.log(), right.log()],
    }


def group_batch(outcome: Sequence[int], theta: Tensor) -> tuple[Batch, Tensor]:
    logp = torch.stack([token for kind in outcome for token in log_chances(theta)[kind]])
    lengths = torch.tensor([TURNS[kind] for kind in outcome])
    tokens = len(logp)
    batch = Batch(
        row=torch.repeat_interleave(torch.arange(len(outcome)), lengths),
        turn=torch.cat([torch.arange(int(n)) for n in lengths]),
        role=torch.full((tokens,), 4, dtype=torch.int8),
        logp_rollout=logp.detach(),
        version=torch.zeros(tokens, dtype=torch.int64),
        group=torch.zeros(len(outcome), dtype=torch.int64),
        num_turns=lengths,
        truncated=torch.zeros(len(outcome), dtype=torch.bool),
        demo=torch.zeros(len(outcome), dtype=torch.bool),
        rewards={"correct": reals([CORRECT[kind] for kind in outcome])},
        turn_rewards={
            "tool": reals([(TOOL[kind] + [NAN])[: int(lengths.max())] for kind in outcome])
        },
    )
    return batch, logp


def expected_gradient(algorithm: Algorithm, size: int = 3) -> Tensor:
    """Minus the gradient of the loss, averaged over every outcome of a group."""
    bound = algorithm.bind(replace(RUN, group_size=size))
    total = torch.zeros(2, dtype=torch.float64)
    for outcome in itertools.product((STOP, LEFT, RIGHT), repeat=size):
        theta = logits()
        batch, logp = group_batch(outcome, theta)
        chance = logp.detach().sum().exp()
        loss, _ = objective(bound, batch, plan(bound, batch), torch.arange(batch.num_tokens), logp)
        (gradient,) = torch.autograd.grad(loss, theta)
        total -= chance * gradient
    return total


def exact_gradient(value_of: dict[int, float]) -> Tensor:
    """Gradient of the expected value of one trajectory."""
    theta = logits()
    expected = sum(
        torch.stack(tokens).sum().exp() * value_of[kind]
        for kind, tokens in log_chances(theta).items()
    )
    assert isinstance(expected, Tensor)
    (gradient,) = torch.autograd.grad(expected, theta)
    return gradient


RETURN = {
    kind: WEIGHTS["tool"] * sum(TOOL[kind]) + WEIGHTS["correct"] * CORRECT[kind] for kind in TURNS
}


def with_advantage(estimator: Estimator) -> Algorithm:
    plain = PRESETS["reinforce"]
    return replace(
        plain,
        advantage=estimator,
        ratio=plain.ratio,
        aggregate=Aggregate(mode="seq_mean_token_sum"),
    )


UNBIASED = {
    "leave_one_out": (GroupAdvantage(baseline="leave_one_out"), 1.0),
    "group_mean": (GroupAdvantage(baseline="group_mean"), 2 / 3),
    "batch_mean": (GroupAdvantage(baseline="batch_mean"), 2 / 3),
    "none": (GroupAdvantage(baseline="none"), 1.0),
    "whole trajectories": (GroupAdvantage(baseline="leave_one_out", unit="trajectory"), 1.0),
    "tokens": (GroupAdvantage(baseline="leave_one_out", unit="token"), 1.0),
}


@pytest.mark.parametrize("name", UNBIASED)
def test_critic_free_estimators_without_division_are_unbiased(name: str) -> None:
    estimator, scale = UNBIASED[name]
    found = expected_gradient(with_advantage(estimator))
    torch.testing.assert_close(found, scale * exact_gradient(RETURN), rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [2, 4])
def test_unbiased_whatever_the_group_size(size: int) -> None:
    found = expected_gradient(with_advantage(GroupAdvantage(baseline="leave_one_out")), size)
    torch.testing.assert_close(found, exact_gradient(RETURN), rtol=0, atol=1e-12)


def test_turns_are_credited_by_what_came_after_them() -> None:
    algorithm = with_advantage(GroupAdvantage(baseline="none", unit="turn"))
    bound = algorithm.bind(RUN)
    batch, _ = group_batch((LEFT, STOP, RIGHT), logits())
    # LEFT: 0.1 + 1.0, then 1.0. STOP: 0.7. RIGHT: 0.1 - 0.4 + 0.6, then -0.4 + 0.6.
    wanted = reals([1.1, 1.0, 0.7, 0.3, 0.2])
    torch.testing.assert_close(plan(bound, batch).advantage, wanted, rtol=0, atol=1e-12)


def test_a_member_alone_at_its_turn_is_measured_against_the_others_whole_returns() -> None:
    algorithm = with_advantage(GroupAdvantage(baseline="leave_one_out"))
    bound = algorithm.bind(RUN)
    batch, _ = group_batch((LEFT, STOP, STOP), logits())
    advantage = plan(bound, batch).advantage
    # Turn 0: 1.1 against 0.7, and 0.7 against (1.1 + 0.7) / 2; turn 1 alone: 1.0 against 0.7.
    wanted = reals([0.4, 0.3, -0.2, -0.2])
    torch.testing.assert_close(advantage, wanted, rtol=0, atol=1e-12)


@dataclass(frozen=True, slots=True)
class ZeroedSingletons(Estimator):
    """Leave-one-out over those who reached the turn, 0 for a member alone there."""


@estimate.register
def _(estimator: ZeroedSingletons, case: Case) -> Estimate:
    batch, returns = case.batch, case.returns
    present = returns.valid.unsqueeze(-1) & returns.reached
    centred = centre(returns.to_go(1.0), present, batch.group, batch.num_groups)
    values = (centred.values * returns.weights.reshape(-1, 1, 1)).sum(0)
    alone = returns.reached & (returns.reached.sum(0) == 1)
    return Estimate(paint(torch.where(alone, 0.0, values), batch))


def bias(estimator: Estimator) -> float:
    """Angle between expected and exact gradient, in radians: no scale can mend it."""
    found, wanted = expected_gradient(with_advantage(estimator)), exact_gradient(RETURN)
    cosine = torch.nn.functional.cosine_similarity(found, wanted, dim=0)
    return float(torch.acos(cosine.clamp(-1, 1)))


def test_zeroed_singletons_are_biased() -> None:
    assert bias(GroupAdvantage(baseline="leave_one_out")) < 1e-6
    assert bias(ZeroedSingletons()) > 0.02


@pytest.mark.parametrize("pool", ["group", "group_turn"])
def test_naive_normalisation_of_turns_is_biased(pool: str) -> None:
    assert bias(TurnNormalized(pool=pool)) > 0.02  # type: ignore[arg-type]


def test_division_by_the_spread_is_biased_by_design() -> None:
    assert bias(GroupAdvantage(scale="group_std")) > 1e-3


@pytest.mark.parametrize("size", [2, 3, 4])
def test_maxrl_ascends_the_truncated_likelihood(size: int) -> None:
    # sum over k < G of (1-p)^(k-1) grad p: the group mean as baseline costs one order.
    only_correct = Reward(weights={"tool": 0.0, "correct": 1.0})
    found = expected_gradient(replace(PRESETS["maxrl"], reward=only_correct), size)
    go, right = torch.sigmoid(logits().detach())
    miss = float(1 - go * right)
    scale = sum(miss ** (k - 1) for k in range(1, size))
    torch.testing.assert_close(found, scale * exact_gradient(CORRECT), rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["sloo", "sloo_minus_one"])
def test_pkpo_ascends_pass_at_k(method: str) -> None:
    algorithm = replace(
        with_advantage(PassAtK(method=method, k=2)),  # type: ignore[arg-type]
        reward=Reward(weights={"tool": 0.0, "correct": 1.0}),
    )
    found = expected_gradient(algorithm, 3)
    theta = logits()
    go, right = torch.sigmoid(theta)
    pass_at_2 = 1 - (1 - go * right) ** 2
    (wanted,) = torch.autograd.grad(pass_at_2, theta)
    # Rewards sum over members, the loss takes their mean.
    torch.testing.assert_close(found, wanted / 3, rtol=0, atol=1e-12)
