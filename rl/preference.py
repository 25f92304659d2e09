"""DPO: pairs from groups, and a loss of their own (arXiv:2305.18290)."""

import random

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from turngym.errors import TrajectoryError
from turngym.rl.algorithm import BoundAlgorithm
from turngym.rl.batch import Batch
from turngym.rl.credit import Case, Estimate, estimate
from turngym.rl.estimators import Pairs
from turngym.rl.metrics import Metric, mean_of, part_of_sum
from turngym.rl.segments import segment_sum

__all__ = ["build_pairs", "preference_loss"]


def build_pairs(
    spec: Pairs, returns: list[float | None], *, seed: int = 0
) -> list[tuple[int, int]]:
    """Pair the members of one group as (better, worse).

    Ties are broken by the lower index; a group without a strict margin gives none.

    Args:
        spec: builder, margin, cap.
        returns: of each member; None = no reward.
        seed: of the draw of `random_cross`.
    """
    known = [(value, i) for i, value in enumerate(returns) if value is not None]
    if not known:
        return []
    if spec.builder == "best_worst":
        best = max(known, key=lambda item: (item[0], -item[1]))
        worst = min(known)
        return [(best[1], worst[1])] if best[0] - worst[0] > spec.margin else []
    crossed = [(i, j) for a, i in known for b, j in known if a - b > spec.margin]
    if spec.builder == "random_cross":
        random.Random(spec.seed * 1_000_003 + seed).shuffle(crossed)
    return crossed[: spec.max_pairs]


@estimate.register
def _(estimator: Pairs, case: Case) -> Estimate:
    batch = case.batch
    total = case.returns.filled(batch.group, batch.num_groups).sum(-1).tolist()
    live = case.returns.live.tolist()
    members: list[list[int]] = [[] for _ in range(batch.num_groups)]
    for row, group in enumerate(batch.group.tolist()):
        members[group].append(row)
    pairs = []
    for group, rows in enumerate(members):
        values = [total[row] if live[row] else None for row in rows]
        seed = case.state.step * batch.num_groups + group
        pairs += [(rows[i], rows[j]) for i, j in build_pairs(estimator, values, seed=seed)]
    return Estimate(
        advantage=torch.zeros(batch.num_tokens, dtype=torch.float64),
        pairs=torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2),
    )


def preference_loss(
    bound: BoundAlgorithm,
    batch: Batch,
    mask: Tensor,
    pairs: Tensor,
    weight: Tensor,
    index: Tensor,
    logp_new: Tensor,
) -> tuple[Tensor, dict[str, Metric]]:
    """Sum of weight * -log sigmoid(beta * h) over the pairs whose rows are in `index`.

    h = (s - s_ref)(chosen) - (s - s_ref)(rejected), s the sum of logp over policy tokens.

    Args:
        bound: an algorithm with `Pairs`.
        batch: needs `logp_ref`.
        mask: tokens that count, (N,) bool.
        pairs: rows (chosen, rejected), (M, 2).
        weight: of each pair over the optimizer batch, (M,).
        index: flat indices of the tokens, whole groups, (n,).
        logp_new: differentiable, (n,).
    """
    spec = bound.algorithm.advantage
    if not isinstance(spec, Pairs) or batch.logp_ref is None:
        raise TrajectoryError("the preference loss reads logp_ref; add it to the batch")
    device = logp_new.device
    row = batch.row[index].to(device)
    reference = batch.logp_ref[index].to(logp_new)
    difference = torch.where(mask[index].to(device), logp_new - reference, 0.0)
    gain = segment_sum(difference, row, batch.num_rows)
    here = torch.zeros(batch.num_rows, dtype=torch.bool)
    here[batch.row[index]] = True
    # A row without policy tokens is in no part: it comes with its partner, its sum is 0.
    silent = batch.rows.lengths == 0
    kept = here[pairs].any(-1) & (here | silent)[pairs].all(-1)
    pairs, share = pairs[kept].to(device), weight[kept].to(logp_new)
    margin = gain[pairs[:, 0]] - gain[pairs[:, 1]]
    loss = -(share * logsigmoid(spec.beta * margin)).sum() + 0.0 * gain.sum()
    everyone = torch.ones_like(margin, dtype=torch.bool)
    return loss, {
        "loss/policy": part_of_sum(loss),
        "train/preference_margin": mean_of(margin, everyone),
        "train/preference_accuracy": mean_of((margin > 0).to(margin), everyone),
    }
