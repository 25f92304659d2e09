"""The loss of any subset of tokens of a planned batch.

Losses of micro-batches, and of data-parallel shards, add up to the loss of the optimizer batch:
every normaliser is in the plan's weights.
"""

import torch
from torch import Tensor

from turngym.errors import TrajectoryError
from turngym.rl.algorithm import BoundAlgorithm
from turngym.rl.batch import Batch
from turngym.rl.metrics import Metric, largest, mean_of, part_of_sum
from turngym.rl.plan import Plan
from turngym.rl.preference import preference_loss
from turngym.rl.regularizers import kl_penalty, penalty, value_loss
from turngym.rl.segments import TINY, lengths_of, segment_mean
from turngym.rl.surrogates import Surrogate, Tokens, surrogate
from turngym.rl.terms import KL, OffPolicySequenceMask, ValueLoss

__all__ = ["objective", "value_objective"]

LOG_RATIO_LIMIT = 20.0


def objective(
    bound: BoundAlgorithm,
    batch: Batch,
    plan: Plan,
    index: Tensor,
    logp_new: Tensor,
    *,
    entropy: Tensor | None = None,
    topk_logp: Tensor | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """Loss of some tokens of a batch; the losses of all parts add up to the whole batch's.

    Args:
        bound: the algorithm.
        batch: the generation batch.
        plan: made for this batch.
        index: flat indices of the tokens, (n,) int64. They must hold whole rows or groups where
            `bound.unit` says so.
        logp_new: log-probabilities under the current policy, differentiable, (n,).
        entropy: entropies under the current policy, differentiable, (n,), where
            `bound.needs_entropy`.
        topk_logp: current log-probabilities of `Batch.topk_ids`, (n, K), where `bound.needs_topk`.

    Returns:
        A scalar, differentiable even where no token trains, and metrics with their reductions.

    Raises:
        TrajectoryError: lengths disagree, a needed column is missing, or a row is split.
    """
    if logp_new.shape != index.shape:
        raise TrajectoryError(
            f"one log-probability per token is needed: {tuple(index.shape)} tokens, "
            f"{tuple(logp_new.shape)} log-probabilities"
        )
    index = index.to(batch.row.device)
    if logp_new.dtype in (torch.float16, torch.bfloat16):
        logp_new = logp_new.float()
    _check_whole(bound, batch, plan, index)
    if plan.pairs is not None and plan.pair_weight is not None:
        pairs, share = plan.pairs, plan.pair_weight
        return preference_loss(bound, batch, plan.mask, pairs, share, index, logp_new)
    tokens = _tokens(bound, batch, plan, index, logp_new, topk_logp)
    weight = _take(plan.policy_weight, index, logp_new)
    found = _surrogate(bound, batch, index, tokens)
    gain = _sequence_gate(bound, tokens)
    if gain is not None:
        weight = weight * gain
    loss = (weight * found.loss).sum()
    metrics: dict[str, Metric] = {"loss/policy": part_of_sum(loss)}
    metrics |= _diagnose(tokens, found, weight)
    for name, term in _extra_terms(bound, batch, plan, index, tokens, entropy).items():
        loss = loss + term.sum()
        metrics[f"loss/{name}"] = part_of_sum(term.sum())
    if entropy is not None:
        metrics["train/entropy"] = mean_of(entropy, tokens.mask)
    if bound.algorithm.term(KL) is not None and batch.logp_ref is not None:
        away = tokens.logp.detach() - _reference(batch, index, tokens)
        metrics["train/kl"] = mean_of(kl_penalty(away, "k3"), tokens.mask)
    return loss, metrics


def _take(column: Tensor, index: Tensor, like: Tensor) -> Tensor:
    """Gather some tokens of a column onto the device and in the dtype of `like`."""
    return column[index].to(device=like.device, dtype=like.dtype)


def _tokens(
    bound: BoundAlgorithm,
    batch: Batch,
    plan: Plan,
    index: Tensor,
    logp_new: Tensor,
    topk_logp: Tensor | None,
) -> Tokens:
    device = logp_new.device
    mask = plan.mask[index].to(device)
    row = batch.row[index].to(device)
    logp = torch.where(mask, logp_new, 0.0)
    anchor = torch.where(mask, _anchor(bound, batch, index, logp), 0.0)
    log_ratio = logp - anchor
    level = bound.algorithm.ratio.level
    if level != "token":
        width = batch.max_turns if level == "turn" else 1
        turn = batch.turn[index].to(device) if level == "turn" else 0
        ids = row * width + turn
        mean = segment_mean(log_ratio.detach(), ids, batch.num_rows * width, mask)[ids]
        log_ratio = mean + logp - logp.detach()
    hit = None
    if topk_logp is not None and batch.topk_ids is not None and batch.token_ids is not None:
        hit = (batch.topk_ids[index] == batch.token_ids[index].unsqueeze(-1)).any(-1).to(device)
    return Tokens(
        logp=logp,
        anchor=anchor,
        log_ratio=log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT),
        advantage=_take(plan.advantage, index, logp),
        mask=mask,
        row=row,
        num_rows=batch.num_rows,
        topk_old=None if batch.topk_logp is None else _take(batch.topk_logp, index, logp),
        topk_new=None if topk_logp is None else topk_logp.detach(),
        topk_hit=hit,
    )


def _anchor(bound: BoundAlgorithm, batch: Batch, index: Tensor, logp: Tensor) -> Tensor:
    kind = bound.algorithm.ratio.anchor
    if kind == "rollout":
        return _take(batch.logp_rollout, index, logp)
    if kind == "none" or batch.logp_old is None:
        return logp.detach()
    return _take(batch.logp_old, index, logp)


def _surrogate(bound: BoundAlgorithm, batch: Batch, index: Tensor, tokens: Tokens) -> Surrogate:
    ratio, region = bound.algorithm.ratio, bound.algorithm.trust_region
    if region is None and ratio.anchor == "none":
        found = Surrogate(-tokens.advantage * tokens.logp)
    else:
        found = surrogate(region, tokens)
    if ratio.demo_shaping is None:
        return found
    demo = batch.demo.to(tokens.row.device)[tokens.row]
    chance = tokens.logp.exp()
    shaped = -tokens.advantage * chance / (chance + ratio.demo_shaping)
    return Surrogate(torch.where(demo, shaped, found.loss), found.bound)


def _sequence_gate(bound: BoundAlgorithm, tokens: Tokens) -> Tensor | None:
    rule = bound.algorithm.rule(OffPolicySequenceMask)
    if not isinstance(rule, OffPolicySequenceMask):
        return None
    drift = (tokens.anchor - tokens.logp).detach()
    drift = segment_mean(drift, tokens.row, tokens.num_rows, tokens.mask)[tokens.row]
    return ((tokens.advantage >= 0) | (drift <= rule.delta + TINY)).to(tokens.logp)


def _extra_terms(
    bound: BoundAlgorithm,
    batch: Batch,
    plan: Plan,
    index: Tensor,
    tokens: Tokens,
    entropy: Tensor | None,
) -> dict[str, Tensor]:
    """Regularizers in the loss, weighted, per token."""
    logp = tokens.logp
    terms: dict[str, Tensor] = {}
    kl = bound.algorithm.term(KL)
    if kl is not None and plan.kl_coef is not None:
        away = kl_penalty(logp - _reference(batch, index, tokens), kl.estimator)
        if kl.ratio_corrected:
            ratio = (logp - tokens.anchor).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
            away = away * ratio
        terms["kl"] = plan.kl_coef * _take(plan.weight, index, logp) * away
    if plan.entropy_weight is not None and plan.entropy_coef is not None:
        if entropy is None:
            raise TrajectoryError("the entropy bonus reads entropies of the current policy")
        kept = torch.where(tokens.mask, entropy, 0.0)
        terms["entropy"] = -plan.entropy_coef * _take(plan.entropy_weight, index, logp) * kept
    if plan.nll_weight is not None:
        terms["nll"] = -_take(plan.nll_weight, index, logp) * logp
    if plan.drift_weight is not None:
        drift = (logp - tokens.anchor).abs()
        terms["kl_cov"] = _take(plan.drift_weight, index, logp) * drift
    for term in bound.algorithm.regularize:
        added = penalty(term, tokens)
        if added is not None:
            terms[type(term).__name__] = _take(plan.weight, index, logp) * added
    return terms


def _reference(batch: Batch, index: Tensor, tokens: Tokens) -> Tensor:
    """Log-probabilities of the reference, 0 outside the mask, (n,)."""
    if batch.logp_ref is None:
        raise TrajectoryError("KL in the loss reads logp_ref; add it to the batch")
    return torch.where(tokens.mask, _take(batch.logp_ref, index, tokens.logp), 0.0)


def _diagnose(tokens: Tokens, found: Surrogate, weight: Tensor) -> dict[str, Metric]:
    log_ratio = tokens.log_ratio.detach()
    metrics: dict[str, Metric] = {
        "train/ratio": mean_of(log_ratio.exp(), tokens.mask),
        "train/log_ratio_max": largest(log_ratio.abs(), tokens.mask),
        "train/anchor_kl": mean_of(log_ratio.exp() - 1 - log_ratio, tokens.mask),
        "train/kept_frac": mean_of((weight != 0).to(log_ratio), tokens.mask),
    }
    if found.bound is not None:
        metrics["train/clip_frac"] = mean_of(found.bound.to(log_ratio), tokens.mask)
    return metrics


def value_objective(
    bound: BoundAlgorithm, batch: Batch, plan: Plan, index: Tensor, values_new: Tensor
) -> tuple[Tensor, dict[str, Metric]]:
    """Loss of the critic on some tokens of a batch; parts add up like `objective`'s.

    Args:
        bound: the algorithm.
        batch: needs `values`.
        plan: made for this batch.
        index: flat indices of the tokens, (n,) int64.
        values_new: the critic's values now, differentiable, (n,).
    """
    term = bound.algorithm.term(ValueLoss) or ValueLoss()
    if plan.value_targets is None or batch.values is None:
        raise TrajectoryError("the value loss reads Batch.values and an estimator with targets")
    targets = _take(plan.value_targets, index, values_new)
    old = _take(batch.values, index, values_new)
    live = plan.live[batch.row[index]].to(values_new.device)
    weight = _take(plan.weight, index, values_new) * live
    per_token = value_loss(values_new, old, targets, clip=term.clip)
    loss = term.coef * (weight * per_token).sum()
    return loss, {
        "loss/value": part_of_sum(loss),
        "train/value_error": mean_of((values_new - targets).square(), weight != 0),
    }


def _check_whole(bound: BoundAlgorithm, batch: Batch, plan: Plan, index: Tensor) -> None:
    if bound.unit == "token":
        return
    index = index.to(batch.row.device)
    found = lengths_of(batch.row[index], batch.num_rows)
    split = (found > 0) & (found < batch.rows.lengths)
    if plan.pairs is not None:
        here = (found > 0)[plan.pairs]
        missing = ~here & (batch.rows.lengths > 0)[plan.pairs]
        split[plan.pairs[here.any(-1) & missing.any(-1)].flatten()] = True
    if bool(split.any()):
        raise TrajectoryError(
            f"{bound.algorithm.name} needs whole {bound.unit}s in every micro-batch; row "
            f"{int(split.nonzero()[0])} is split, from itself or from its pair"
        )
