"""Advantages for pass@k, in closed form per group size."""

import math
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from turngym.errors import ConfigError
from turngym.rl.credit import Case, Estimate, estimate, paint
from turngym.rl.estimators import PassAtK
from turngym.rl.filters import correct_rows, metric_column
from turngym.rl.segments import TINY

__all__ = ["chen", "pkpo", "pkpo_rewards"]

Reals = NDArray[np.float64]


@lru_cache(maxsize=64)
def _counts(n: int, k: int) -> tuple[Reals, Reals, Reals]:
    """Counts of k-subsets by the 0-based place i of a member in ascending order.

    Returns:
        C(i, k-1): the member is the largest; C(i-1, k-2): the largest, another given member below
        it; C(i, k-2): (k-1)-subsets whose largest is the member.
    """
    own = np.array([math.comb(i, k - 1) for i in range(n)], np.float64)
    above = np.array([math.comb(i - 1, k - 2) if i else 0 for i in range(n)], np.float64)
    below = np.array([math.comb(i, k - 2) for i in range(n)], np.float64)
    return own, above, below


def _sum_before(values: Reals) -> Reals:
    return np.cumsum(values, -1) - values


def _sum_after(values: Reals) -> Reals:
    return np.cumsum(values[..., ::-1], -1)[..., ::-1] - values


def _by_rank(rewards: Reals) -> tuple[Reals, NDArray[np.int64]]:
    order = np.argsort(rewards, -1, kind="stable")
    return np.take_along_axis(rewards, order, -1), order


def _unrank(values: Reals, order: NDArray[np.int64]) -> Reals:
    out = np.empty_like(values)
    np.put_along_axis(out, order, values, -1)
    return out


def pkpo_rewards(rewards: Reals, k: int) -> Reals:
    """Mean over all k-subsets of their largest reward, counting those with the member.

    PKPO, arXiv:2505.15201: s_i = sum over k-subsets I with i in I of max(I) / C(n, k).

    Args:
        rewards: groups of one size, (P, n).
        k: size of the subsets, 2 <= k <= n.
    """
    ranked, order = _by_rank(rewards)
    n = rewards.shape[-1]
    own, above, _ = _counts(n, k)
    return _unrank((ranked * own + _sum_after(ranked * above)) / math.comb(n, k), order)


def pkpo(rewards: Reals, k: int, *, minus_one: bool) -> Reals:
    """PKPO's rewards minus a baseline of the other members (arXiv:2505.15201).

    Args:
        rewards: groups of one size, (P, n).
        k: size of the subsets, 2 <= k <= n, and k < n for `sloo`.
        minus_one: `sloo_minus_one`: subtract the largest of the same subset without the member;
            else `sloo`: subtract k / (n - 1) times the mean largest over subsets of the others.
    """
    ranked, order = _by_rank(rewards)
    n = rewards.shape[-1]
    own, _, below = _counts(n, k)
    if minus_one:
        kept = (ranked * own - _sum_before(ranked * below)) / math.comb(n, k)
        return _unrank(kept, order)
    # Places above the member count one candidate less: the member is not among the others.
    shifted = np.concatenate([[0.0], own[:-1]])
    others = _sum_before(ranked * own) + _sum_after(ranked * shifted)
    baseline = k / (n - 1) * others / math.comb(n - 1, k)
    return pkpo_rewards(rewards, k) - _unrank(baseline, order)


def chen(rewards: Reals, k: int, *, eps: float = 1e-6) -> Reals:
    """Pass@k advantages of binary rewards (arXiv:2508.10751, section 2.4).

    Args:
        rewards: 0 or 1, groups of one size, (P, n).
        k: size of the subsets.
        eps: added to the deviation.

    Raises:
        ConfigError: a reward that is neither 0 nor 1.
    """
    if not np.isin(rewards, (0.0, 1.0)).all():
        raise ConfigError("PassAtK 'chen' takes rewards of 0 and 1; use method='sloo_minus_one'")
    n = rewards.shape[-1]
    wrong = (n - rewards.sum(-1)).astype(int)
    fail = np.array([math.comb(m, k) for m in range(n + 1)]) / math.comb(n, k)
    fail_with = np.array([math.comb(max(m - 1, 0), k - 1) for m in range(n + 1)])
    fail_with = fail_with / math.comb(n - 1, k - 1)
    rate = 1 - fail[wrong]
    spread = np.sqrt(rate * (1 - rate)) + eps
    good, bad = (1 - rate) / spread, (1 - rate - fail_with[wrong]) / spread
    certain = rate * (1 - rate) <= TINY
    return np.where(certain[:, None], 0.0, np.where(rewards == 1.0, good[:, None], bad[:, None]))


@estimate.register
def _(estimator: PassAtK, case: Case) -> Estimate:
    batch, live = case.batch, case.returns.live
    total = case.returns.filled(batch.group, batch.num_groups).sum(-1).numpy()
    if estimator.method == "chen" and case.bound.algorithm.selection.metric is not None:
        total = correct_rows(case.bound, batch).double().numpy()
        live = live & ~metric_column(case.bound, batch).isnan()
    rows = live.nonzero().squeeze(-1).numpy()
    rows = rows[np.argsort(batch.group.numpy()[rows], kind="stable")]
    sizes = np.bincount(batch.group.numpy()[rows], minlength=batch.num_groups)
    ends = np.cumsum(sizes)
    advantage = np.zeros(batch.num_rows)
    least = estimator.k + (estimator.method == "sloo")
    for size in np.unique(sizes[sizes >= least]):
        chosen = np.flatnonzero(sizes == size)
        table = rows[(ends[chosen] - size)[:, None] + np.arange(size)]
        if estimator.method == "chen":
            found = chen(total[table], estimator.k, eps=estimator.eps)
        else:
            found = pkpo(total[table], estimator.k, minus_one=estimator.method == "sloo_minus_one")
        advantage[table] = np.where(np.abs(found) <= TINY, 0.0, found)
    return Estimate(paint(torch.from_numpy(advantage).unsqueeze(-1), batch))
