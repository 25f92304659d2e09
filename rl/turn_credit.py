"""Published ways to credit turns: GiGPO, MT-GRPO, normalised turn returns, VinePPO."""

from dataclasses import replace

import torch
from torch import Tensor

from turngym.errors import TrajectoryError
from turngym.rl.advantages import divide, moments, snap
from turngym.rl.credit import Case, Estimate, estimate, paint
from turngym.rl.estimators import AnchorState, OutcomeAndTurn, StepValues, TurnNormalized
from turngym.rl.returns import Returns
from turngym.rl.segments import discounted_to_go, lengths_of

__all__ = ["normalize_pool"]


def normalize_pool(
    values: Tensor, pool: Tensor, num_pools: int, present: Tensor, *, scale: bool, eps: float
) -> Tensor:
    """(x - mean) / (std + eps) among the present entries of each pool; a pool of one gives 0.

    Args:
        values: (M,).
        pool: (M,) int64.
        num_pools: number of pools.
        present: entries that count, (M,) bool.
        scale: divide by the unbiased deviation, else only centre.
        eps: added to the deviation.
    """
    mean, std = moments(
        values[:, None], present[:, None], pool, num_pools, about_zero=False, ddof=1
    )
    size = values.abs().amax() if values.numel() else values.sum()
    centred = snap(torch.where(present, values - mean[pool], 0.0), size)
    return divide(centred, std[pool], eps) if scale else centred


def _turns(case: Case) -> tuple[Tensor, Tensor]:
    """Weighted reward of each turn and which turns count, (B, K) each."""
    batch, returns = case.batch, case.returns
    steps = returns.filled(batch.group, batch.num_groups)
    return steps, returns.reached & returns.live.unsqueeze(-1)


@estimate.register
def _(estimator: AnchorState, case: Case) -> Estimate:
    batch = case.batch
    if batch.anchor_state is None:
        raise TrajectoryError("GiGPO reads Batch.anchor_state; collate with anchors=True")
    steps, here = _turns(case)
    scale, eps = estimator.scale == "std", estimator.eps
    episode = normalize_pool(
        steps.sum(-1), batch.group, batch.num_groups, case.returns.live, scale=scale, eps=eps
    )
    to_go = discounted_to_go(steps, estimator.gamma)
    state = batch.anchor_state.clamp(min=0)
    # States are compared inside a group only, whatever numbers they carry.
    key = state + batch.group.unsqueeze(-1) * (int(state.max()) + 1 if state.numel() else 1)
    _, pool = torch.unique(key.flatten(), return_inverse=True)
    step = normalize_pool(
        to_go.flatten(), pool, int(pool.max()) + 1 if len(pool) else 0, here.flatten(),
        scale=scale, eps=eps,
    ).reshape(to_go.shape)  # fmt: skip
    # A trajectory that meets one state twice has nobody to be compared with.
    size = lengths_of(batch.group, batch.num_groups, case.returns.live)
    here = here & (size >= 2)[batch.group].unsqueeze(-1)
    values = torch.where(here, episode.unsqueeze(-1) + estimator.omega * step, 0.0)
    return Estimate(paint(values, batch))


def _part(returns: Returns, chosen: Tensor) -> Returns:
    """Some of the components."""
    return replace(
        returns,
        weights=returns.weights[chosen],
        steps=returns.steps[chosen],
        valid=returns.valid[chosen],
    )


@estimate.register
def _(estimator: OutcomeAndTurn, case: Case) -> Estimate:
    batch, returns = case.batch, case.returns
    names = [*batch.rewards, *batch.turn_rewards]
    by_turn = torch.tensor([name in batch.turn_rewards for name in names], dtype=torch.bool)
    if len(names) != len(returns.weights):
        raise TrajectoryError("MT-GRPO knows no shaping; set reward.shaping=()")
    ends = _part(returns, ~by_turn)
    outcome = ends.filled(batch.group, batch.num_groups).sum(-1)
    turn = torch.einsum("c,cbk->bk", returns.weights[by_turn], returns.steps[by_turn])
    paid = torch.stack(
        [~values.isnan() for values in batch.turn_rewards.values()]
        or [torch.zeros_like(returns.reached)]
    ).any(0) & returns.live.unsqueeze(-1)
    known = returns.live & ends.valid.any(0)
    base = normalize_pool(
        outcome, batch.group, batch.num_groups, known, scale=True, eps=estimator.eps
    )
    pool = batch.group.unsqueeze(-1) * batch.max_turns + torch.arange(batch.max_turns)
    extra = normalize_pool(
        turn.flatten(), pool.flatten(), batch.num_groups * batch.max_turns, paid.flatten(),
        scale=True, eps=estimator.eps,
    ).reshape(turn.shape)  # fmt: skip
    values = base.unsqueeze(-1) + estimator.coef * discounted_to_go(extra, 1.0)
    return Estimate(paint(values, batch))


@estimate.register
def _(estimator: TurnNormalized, case: Case) -> Estimate:
    batch = case.batch
    steps, here = _turns(case)
    to_go = discounted_to_go(steps, estimator.gamma)
    width = batch.max_turns
    at = (
        torch.arange(width)
        if estimator.pool == "group_turn"
        else torch.zeros(width, dtype=torch.int64)
    )
    pool = batch.group.unsqueeze(-1) * width + at
    values = normalize_pool(
        to_go.flatten(), pool.flatten(), batch.num_groups * width, here.flatten(),
        scale=True, eps=estimator.eps,
    ).reshape(to_go.shape)  # fmt: skip
    return Estimate(paint(values, batch))


@estimate.register
def _(estimator: StepValues, case: Case) -> Estimate:
    batch = case.batch
    if batch.step_values is None:
        raise TrajectoryError("VinePPO reads Batch.step_values; add them to the batch")
    steps, here = _turns(case)
    value = torch.where(here, batch.step_values.double(), 0.0)
    following = torch.nn.functional.pad(value[:, 1:], (0, 1))
    values = torch.where(here, steps + estimator.gamma * following - value, 0.0)
    return Estimate(paint(values, batch))
