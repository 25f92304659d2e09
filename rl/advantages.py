"""`GroupAdvantage`: return minus baseline, over trajectories or over turns.

One computation serves both units: `to_go` is (C, B, U) with U = 1 for whole trajectories and U = K
for turns. Per component, the baseline of a turn is the leave-one-out mean over the group members
that reached it; a member alone at its turn takes the leave-one-out mean of the group's whole
returns. Any function of the other members leaves the policy gradient unbiased; a baseline of zero
for lone members, or a division by the spread at each turn, does not.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turngym.errors import ConfigError, TrajectoryError
from turngym.rl.batch import Batch
from turngym.rl.credit import Case, Estimate, estimate, paint, whiten_tokens
from turngym.rl.estimators import GroupAdvantage
from turngym.rl.returns import Returns, turn_sums
from turngym.rl.segments import TINY, discounted_to_go, segment_sum

__all__ = ["Centred", "centre", "group_advantage", "moments", "token_rewards"]


@dataclass(frozen=True)
class Centred:
    """Returns minus leave-one-out baselines."""

    values: Tensor
    """0 where absent, (C, B, U)."""

    present: Tensor
    """The component counts at that turn of that row, (C, B, U) bool."""

    shrink: Tensor
    """(G-1)/G of each row's pool: turns leave-one-out into mean baselines, (C, B, 1)."""

    mean: Tensor
    """Mean whole return of each row's pool, (C, B)."""


def centre(to_go: Tensor, present: Tensor, pool: Tensor, num_pools: int) -> Centred:
    """Subtract leave-one-out baselines.

    Args:
        to_go: returns from each turn on, (C, B, U).
        present: the component counts there, (C, B, U) bool.
        pool: whose members are compared, (B,) int64.
        num_pools: number of pools.
    """
    width = to_go.shape[-1]
    at_turn = (pool.unsqueeze(-1) * width + torch.arange(width)).reshape(-1)
    kept = present.to(to_go.dtype)
    returns = to_go * kept
    count = segment_sum(kept.flatten(1), at_turn, num_pools * width)[:, at_turn]
    total = segment_sum(returns.flatten(1), at_turn, num_pools * width)[:, at_turn]
    others = count.reshape(to_go.shape) - kept
    baseline = (total.reshape(to_go.shape) - returns) / others.clamp(min=1)

    whole, members = returns[..., 0], kept[..., 0]
    size = segment_sum(members, pool, num_pools)[:, pool]
    earned = segment_sum(whole, pool, num_pools)[:, pool]
    fallback = ((earned - whole) / (size - 1).clamp(min=1)).unsqueeze(-1)
    baseline = torch.where(others >= 1, baseline, fallback)
    comparable = present & (size >= 2).unsqueeze(-1)
    values = torch.where(comparable, to_go - baseline, 0.0)
    return Centred(
        values=values,
        present=present,
        shrink=((size - 1) / size.clamp(min=1)).clamp(min=0).unsqueeze(-1),
        mean=earned / size.clamp(min=1),
    )


def moments(
    values: Tensor, present: Tensor, pool: Tensor, num_pools: int, *, about_zero: bool, ddof: int
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per pool, every row counting once however many turns it has.

    Args:
        values: (..., B, U).
        present: entries that count, (..., B, U) bool.
        pool: (B,) int64.
        num_pools: number of pools.
        about_zero: the values are centred already: take their second moment.
        ddof: rows subtracted from the count in the variance.

    Returns:
        Mean and deviation, (..., num_pools) each; deviation 0 where there are too few rows.
    """
    kept = present.to(values.dtype)
    share = kept / kept.sum(-1, keepdim=True).clamp(min=1)
    size = segment_sum(present.any(-1).to(values.dtype), pool, num_pools)
    mean = segment_sum((values * share).sum(-1), pool, num_pools) / size.clamp(min=1)
    if about_zero:
        mean = torch.zeros_like(mean)
    squares = ((values - mean[..., pool].unsqueeze(-1)).square() * share).sum(-1)
    variance = segment_sum(squares, pool, num_pools) / (size - ddof).clamp(min=1)
    return mean, torch.where(size > ddof, variance, 0.0).sqrt()


def divide(values: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Divide by `scale + eps`; exactly 0 where there is no spread."""
    return torch.where(scale > TINY, values / (scale + eps), 0.0)


def snap(values: Tensor, size: Tensor) -> Tensor:
    """Make differences that are rounding errors of returns as large as `size` exactly 0."""
    return torch.where(values.abs() <= TINY * size.clamp(min=1), 0.0, values)


@estimate.register
def group_advantage(estimator: GroupAdvantage, case: Case) -> Estimate:
    """Advantages of `GroupAdvantage`, whatever its unit."""
    batch, returns, state = case.batch, case.returns, case.state
    if estimator.unit == "auto":
        raise ConfigError("GroupAdvantage has no unit; bind the algorithm first")
    if estimator.unit == "token":
        return _token_advantage(estimator, case)
    returns = _with_kl(returns, batch)
    by_turn = estimator.unit == "turn"
    to_go = returns.to_go(estimator.gamma) if by_turn else returns.steps.sum(-1, keepdim=True)
    values, ema = _combined(estimator, case, returns, to_go)
    if estimator.whiten == "sequence":
        values = _whiten_sequences(values, _live_turns(returns, values), estimator)
    advantage = paint(values, batch)
    if estimator.whiten == "token":
        mask = batch.trainable & returns.live[batch.row]
        advantage = whiten_tokens(advantage, mask, ddof=estimator.ddof)
    return Estimate(advantage, state=replace(state, ema=ema))


def _with_kl(returns: Returns, batch: Batch) -> Returns:
    """Turn the KL penalty of tokens into one more component, paid turn by turn."""
    if returns.kl is None:
        return returns
    one = torch.ones(1, dtype=torch.float64)
    return replace(
        returns,
        weights=torch.cat([returns.weights, one]),
        steps=torch.cat([returns.steps, turn_sums(returns.kl, batch).unsqueeze(0)]),
        valid=torch.cat([returns.valid, returns.live.unsqueeze(0)]),
    )


def _live_turns(returns: Returns, values: Tensor) -> Tensor:
    reached = returns.reached[:, : values.shape[-1]]
    return reached & returns.live.unsqueeze(-1)


def _combined(
    estimator: GroupAdvantage, case: Case, returns: Returns, to_go: Tensor
) -> tuple[Tensor, float | None]:
    """Advantages before whitening, (B, U), and the moving average after this batch."""
    batch, ema = case.batch, case.state.ema
    pool, num_pools = _pools(estimator, batch)
    here = returns.reached[:, : to_go.shape[-1]] & returns.live.unsqueeze(-1)
    present = returns.valid.unsqueeze(-1) & here
    weights = returns.weights.reshape(-1, 1, 1)
    centred = centre(to_go, present, pool, num_pools)
    deviation = centred.values * centred.shrink
    size = (to_go.abs() * weights.abs()).sum(0).amax() if to_go.numel() else to_go.sum()

    if case.bound.algorithm.reward.combine == "normalize_then_sum":
        parts = centred.values if estimator.baseline == "leave_one_out" else deviation
        parts = snap(parts, size)
        if estimator.scale == "group_std":
            _, spread = moments(
                deviation, present, pool, num_pools, about_zero=True, ddof=estimator.ddof
            )
            parts = divide(parts, spread[:, pool].unsqueeze(-1), estimator.eps)
        return (parts * weights).sum(0), ema

    combined = snap((deviation * weights).sum(0), size)
    whole_mean = (centred.mean * returns.weights.unsqueeze(-1)).sum(0)
    match estimator.baseline:
        case "group_mean" | "batch_mean":
            values = combined
        case "leave_one_out":
            values = snap((centred.values * weights).sum(0), size)
        case "greedy":
            values = (torch.where(present, to_go - _greedy(returns, batch), 0.0) * weights).sum(0)
        case "none" | "ema":
            values = (torch.where(present, to_go, 0.0) * weights).sum(0)
            if estimator.baseline == "ema":
                values = torch.where(here, values - (ema or 0.0), 0.0)
                ema = _moving_average(ema, combined[:, 0] + whole_mean, returns.live, estimator)
    if estimator.virtual_rewards:
        values, scale = _with_virtual_rewards(estimator, combined, here, whole_mean, pool)
    else:
        scale = _spread(estimator, combined, here, whole_mean, (pool, num_pools))
    if scale is None:
        return values, ema
    if estimator.scale == "group_mean":
        return torch.where(scale > TINY, values / scale, 0.0), ema
    return divide(values, scale, estimator.eps), ema


def _pools(estimator: GroupAdvantage, batch: Batch) -> tuple[Tensor, int]:
    if estimator.baseline == "batch_mean":
        return torch.zeros_like(batch.group), 1
    if estimator.pool == "group":
        return batch.group, batch.num_groups
    if batch.bucket is None:
        raise TrajectoryError("pool='bucket' reads Batch.bucket; add it to the batch")
    return batch.bucket, int(batch.bucket.max()) + 1 if len(batch.bucket) else 0


def _greedy(returns: Returns, batch: Batch) -> Tensor:
    names = [*batch.rewards, *batch.turn_rewards]
    missing = [name for name in names if name not in batch.greedy]
    if missing or len(names) < len(returns.weights) - (returns.kl is not None):
        raise TrajectoryError(
            f"baseline='greedy' reads what the greedy rollout earned; {missing or 'shaping'} is "
            "not in Batch.greedy"
        )
    columns = [batch.greedy[name].nan_to_num(0.0) for name in names]
    columns += [torch.zeros(batch.num_rows)] * (len(returns.weights) - len(names))
    return torch.stack(columns).unsqueeze(-1)


def _moving_average(
    ema: float | None, total: Tensor, live: Tensor, estimator: GroupAdvantage
) -> float | None:
    if not bool(live.any()):
        return ema
    mean = float(total[live].mean())
    return mean if ema is None else estimator.decay * ema + (1 - estimator.decay) * mean


def _with_virtual_rewards(
    estimator: GroupAdvantage, deviation: Tensor, here: Tensor, mean: Tensor, pool: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Let copies of the largest return join each group (NGRPO, arXiv:2509.18851)."""
    if estimator.max_return is None:
        raise ConfigError("virtual rewards have no value; bind the algorithm or set max_return")
    copies, num_pools = estimator.virtual_rewards, int(pool.max()) + 1 if len(pool) else 0
    size = segment_sum(here[:, 0].double(), pool, num_pools)[pool].unsqueeze(-1)
    gap = torch.where(here, (estimator.max_return - mean).unsqueeze(-1), 0.0)
    shift = copies * gap / (size + copies)
    values = torch.where(here & (size >= 2), deviation - shift, 0.0)
    if estimator.scale != "group_std":
        return values, None
    squares = segment_sum(deviation.square().sum(-1), pool, num_pools)[pool].unsqueeze(-1)
    squares = squares + copies * gap.square() - (size + copies) * shift.square()
    variance = squares.clamp(min=0) / (size + copies - estimator.ddof).clamp(min=1)
    return values, variance.sqrt()


def _spread(
    estimator: GroupAdvantage,
    deviation: Tensor,
    here: Tensor,
    mean: Tensor,
    pools: tuple[Tensor, int],
) -> Tensor | None:
    """What the advantages are divided by, broadcastable to (B, U); None = nothing."""
    pool, num_pools = pools
    everyone = torch.zeros_like(pool)
    match estimator.scale:
        case "none":
            return None
        case "group_mean":
            if bool((deviation[:, 0] + mean < -TINY).any()):
                raise ConfigError(
                    "scale='group_mean' divides by the mean return and needs rewards in [0, 1], "
                    f"got a return of {float((deviation[:, 0] + mean).min()):g}"
                )
            return mean.unsqueeze(-1)
        case "group_std":
            ddof = estimator.ddof
            _, std = moments(deviation, here, pool, num_pools, about_zero=True, ddof=ddof)
            return std[pool].unsqueeze(-1)
        case "centered_batch_std":
            _, std = moments(deviation, here, everyone, 1, about_zero=True, ddof=estimator.ddof)
            return std
        case "batch_std":
            total = (deviation[:, :1] + mean.unsqueeze(-1)) * here[:, :1]
            _, std = moments(total, here[:, :1], everyone, 1, about_zero=False, ddof=estimator.ddof)
            return std


def _whiten_sequences(values: Tensor, here: Tensor, estimator: GroupAdvantage) -> Tensor:
    everyone = torch.zeros(len(values), dtype=torch.int64)
    mean, std = moments(values, here, everyone, 1, about_zero=False, ddof=estimator.ddof)
    size = values.abs().amax() if values.numel() else values.sum()
    return divide(snap(torch.where(here, values - mean, 0.0), size), std, estimator.eps)


def token_rewards(batch: Batch, returns: Returns) -> Tensor:
    """Reward of each token: a turn's on its last policy token, minus the KL penalty, (N,).

    The reward of a turn without policy tokens goes to the last token before it, else to the
    row's first.
    """
    steps = returns.filled(batch.group, batch.num_groups)
    rewards = torch.zeros(batch.num_tokens, dtype=torch.float64)
    if returns.kl is not None:
        rewards = rewards + returns.kl
    per_turn = turn_sums(torch.ones(batch.num_tokens, dtype=torch.int64), batch)
    ends = per_turn.cumsum(-1)
    has_tokens = batch.rows.lengths > 0
    starts = batch.rows.last - batch.rows.lengths + 1
    place = starts.unsqueeze(-1) + (ends - 1).clamp(min=0)
    paid = returns.reached & (returns.live & has_tokens).unsqueeze(-1)
    return rewards.index_add(0, place[paid], steps[paid])


def _token_advantage(estimator: GroupAdvantage, case: Case) -> Estimate:
    """Reward-to-go over policy tokens minus the row's baseline."""
    batch, returns = case.batch, case.returns
    rows = batch.rows
    to_go = rows.flat(discounted_to_go(rows.dense(token_rewards(batch, returns)), estimator.gamma))
    whole = returns.steps.sum(-1, keepdim=True)
    plain = replace(returns, kl=None)
    centred, ema = _combined(estimator, case, plain, whole)
    total = returns.filled(batch.group, batch.num_groups).sum(-1)
    advantage = to_go - (total - centred[:, 0])[batch.row]
    live = batch.trainable & returns.live[batch.row]
    advantage = torch.where(live, advantage, 0.0)
    if estimator.whiten == "token":
        advantage = whiten_tokens(advantage, live, ddof=estimator.ddof)
    return Estimate(advantage, state=replace(case.state, ema=ema))
