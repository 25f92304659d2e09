"""Goldens on drawn fixtures, worked out row by row in plain numpy from the papers' formulas.

    python tests/support/drawn_goldens.py SEED

The fixtures hold what a tidy one lacks: groups of different sizes and one of a single row, rows in
any order, a row without policy tokens, a row that nobody rewarded, components that abstained,
ratios far from 1. The keys and the form are those of `goldens.json`; nothing of turngym is used.
"""

import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]
Flags = NDArray[np.bool_]

WIDTH = 9
SIZES = (4, 3, 1, 5)
LOW, HIGH = 0.2, 0.28


class Fixture:
    """Padded (B, T) columns and ragged rows."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        group = np.repeat(np.arange(len(SIZES)), SIZES)
        self.group = rng.permutation(group)
        self.size = len(group)
        shape = (self.size, WIDTH)
        self.turn = np.full(shape, -1)
        for row in range(self.size):
            place = 0
            for k in range(int(rng.integers(1, 4))):
                span = int(rng.integers(1, 4))
                self.turn[row, place : min(place + span, WIDTH)] = k
                place += span + int(rng.integers(0, 2))
        big = np.flatnonzero(self.group == 3)
        self.turn[big[0]] = -1
        self.mask: Flags = self.turn >= 0
        self.turns = self.turn.max(1) + 1
        self.role = np.where(self.mask, rng.integers(0, 2, shape), -1)
        base = -rng.exponential(1.0, shape) - 0.02
        self.logp_old = base
        self.logp_new = np.minimum(base + rng.normal(0, 0.25, shape), -1e-3)
        self.logp_ref = np.minimum(base + rng.normal(0, 0.4, shape), -1e-3)
        self.logp_rollout = np.minimum(base + rng.normal(0, 0.06, shape), -1e-3)
        far = rng.random(shape)
        self.logp_new[far < 0.04] = -30.0 - far[far < 0.04]
        self.logp_old[far > 0.96] = -4.5
        self.logp_new[far > 0.96] = -1.5
        self.logp_rollout[(far > 0.9) & (far < 0.93)] -= 2.0
        self.entropy = np.round(rng.exponential(1.0, shape), 1)
        self.values = rng.normal(0.2, 0.4, shape)
        self.values_new = self.values + rng.normal(0, 0.25, shape)
        self.r_real = rng.choice([-0.5, 0.0, 0.25, 0.4, 0.75, 1.0], self.size)
        self.r_bin = rng.integers(0, 2, self.size).astype(float)
        self.r_greedy = rng.choice([0.0, 0.5, 1.0], len(SIZES))[self.group]
        self.r_multi = rng.integers(0, 2, (self.size, 3)).astype(float)
        self.r_multi[big[2], 1] = np.nan
        self.r_multi[big[3], 0] = np.nan
        for column in (self.r_real, self.r_bin, self.r_multi):
            column[big[1]] = np.nan
        self.w_multi = np.array([1.0, 0.5, 0.25])
        self.truncated = np.zeros(self.size, int)
        self.truncated[rng.choice(self.size, 2, replace=False)] = 1
        self.turn_rewards = [rng.choice([0.0, 0.1, 1.0], n).tolist() for n in self.turns]
        self.anchors = [[f"s{rng.integers(0, 3)}" for _ in range(n)] for n in self.turns]
        self.lengths = self.mask.sum(1)

    def as_json(self) -> dict[str, Any]:
        """The columns by name, null where a reward is missing."""
        names = "group turn mask role logp_old logp_new logp_ref logp_rollout entropy values "
        names += "values_new r_real r_bin r_greedy r_multi w_multi truncated turn_rewards anchors"
        return {name: listed(getattr(self, name)) for name in names.split()}

    def members(self, live: Any) -> list[NDArray[np.int64]]:
        """Rows of each group that can be compared: nobody alone."""
        found = [np.flatnonzero((self.group == g) & live) for g in range(len(SIZES))]
        return [rows for rows in found if len(rows) > 1]

    def paint(self, per_row: Reals) -> Reals:
        """A value a row, on its policy tokens."""
        return np.where(self.mask, per_row[:, None], 0.0)

    def paint_turns(self, ragged: Sequence[Sequence[float]]) -> Reals:
        """A value a turn, on its policy tokens."""
        out = np.zeros(self.mask.shape)
        for row, t in zip(*np.nonzero(self.mask), strict=True):
            out[row, t] = ragged[row][self.turn[row, t]]
        return out


def listed(values: Any) -> Any:
    """Nested lists, null for NaN."""
    if isinstance(values, (np.ndarray, list, tuple)):
        return [listed(value) for value in values]
    number = values.item() if isinstance(values, np.generic) else values
    return None if isinstance(number, float) and math.isnan(number) else number


def std(values: Reals, ddof: int = 1) -> float:
    return float(values.std(ddof=ddof)) if len(values) > ddof else 0.0


def ratio_of(top: Any, bottom: float, eps: float) -> Any:
    """Exactly 0 where there is no spread."""
    return np.asarray(top) / (bottom + eps) if bottom > 1e-12 else np.zeros_like(np.asarray(top))


def grouped(f: Fixture, r: Reals, rule: Callable[[Reals], Reals]) -> Reals:
    """Apply a rule of one group's rewards to all groups; 0 for whoever is alone or unrewarded."""
    out = np.zeros(f.size)
    for rows in f.members(~np.isnan(r)):
        out[rows] = rule(r[rows])
    return out


def grpo(r: Reals, *, eps: float = 1e-6, ddof: int = 1) -> Reals:
    return np.asarray(ratio_of(r - r.mean(), std(r, ddof), eps))


def ngrpo(r: Reals, *, ddof: int = 1, eps: float = 1e-6) -> Reals:
    more = np.append(r, 1.0)
    return np.asarray(ratio_of(r - more.mean(), std(more, ddof), eps))


def maxrl(r: Reals) -> Reals:
    return (r - r.mean()) / r.mean() if r.mean() > 0 else np.zeros_like(r)


def compared(f: Fixture, r: Reals) -> NDArray[np.int64]:
    """All rows that have somebody to be compared with."""
    rows = f.members(~np.isnan(r))
    return np.sort(np.concatenate(rows))


def batch_scaled(f: Fixture, r: Reals, *, centred: bool, ddof: int = 1, eps: float = 1e-6) -> Reals:
    """r - mean of the group over a spread of the batch: of the centred returns, or of them all."""
    deviation, rows = grouped(f, r, lambda x: x - x.mean()), compared(f, r)
    if centred:
        spread = math.sqrt((deviation[rows] ** 2).sum() / (len(rows) - ddof))
    else:
        spread = std(r[rows], ddof)
    return np.asarray(ratio_of(deviation, spread, eps))


def gdpo(f: Fixture, values: Reals, *, whiten: str, eps: float) -> Reals:
    parts = [grouped(f, column, lambda x: grpo(x, eps=eps)) for column in values.T]
    total = sum(w * part for w, part in zip(f.w_multi, parts, strict=True))
    live = ~np.isnan(values).all(1)
    rows = np.sort(np.concatenate(f.members(live)))
    out = np.zeros(f.size)
    if whiten == "none":
        return np.asarray(total)
    if whiten == "sequence":
        out[rows] = ratio_of(total[rows] - total[rows].mean(), std(total[rows]), eps)
        return out
    tokens = np.repeat(total[rows], f.lengths[rows])
    out[rows] = (total[rows] - tokens.mean()) / math.sqrt(tokens.var(ddof=1) + 1e-8)
    return out


def conditioned(values: Reals) -> Reals:
    """Every component but the first only where the first is reached."""
    gate = np.where(np.isnan(values[:, 0]), np.nan, (values[:, 0] >= 1.0).astype(float))
    return np.column_stack([values[:, :1], values[:, 1:] * gate[:, None]])


def summed(f: Fixture, values: Reals) -> Reals:
    """GRPO of the weighted sum; a missing component is worth its mean in the group."""
    out = np.zeros(f.size)
    for rows in f.members(~np.isnan(values).all(1)):
        total = np.zeros(len(rows))
        for w, column in zip(f.w_multi, values[rows].T, strict=True):
            total += w * np.where(np.isnan(column), np.nanmean(column), column)
        out[rows] = grpo(total, eps=1e-4)
    return out


def kept_rows(f: Fixture, r: Reals, k: int, metric: str) -> Flags:
    """The best k rewarded members of each group, ties by index."""
    keep = np.zeros(f.size, bool)
    for g in range(len(SIZES)):
        rows = [i for i in np.flatnonzero(f.group == g) if not np.isnan(r[i])]
        key = {
            "shortest": lambda i: f.lengths[i],
            "token_efficiency": lambda i: -r[i] / max(1, f.lengths[i]),
        }[metric]
        keep[sorted(rows, key=key)[:k]] = True
    return keep


def gfpo(f: Fixture, r: Reals, k: int, metric: str) -> tuple[Reals, Flags]:
    keep = kept_rows(f, r, k, metric)
    return grouped(f, np.where(keep, r, np.nan), grpo), keep


def chen(r: Reals, k: int) -> Reals:
    n, wrong = len(r), int((r == 0).sum())
    if n < k:
        return np.zeros_like(r)
    rho = 1 - math.comb(wrong, k) / math.comb(n, k)
    spread = math.sqrt(rho * (1 - rho)) + 1e-6
    if rho in (0, 1):
        return np.zeros_like(r)
    bad = 1 - rho - math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)
    return np.where(r == 1, (1 - rho) / spread, bad / spread)


def pkpo(r: Reals, k: int, kind: str) -> Reals:
    n = len(r)
    out = np.zeros(n)
    if n < k + (kind == "sloo"):
        return out
    for i in range(n):
        subsets = [s for s in itertools.combinations(range(n), k) if i in s]
        best = [max(r[j] for j in s) for s in subsets]
        if kind == "sloo_minus_one":
            best = [b - max(r[j] for j in s if j != i) for b, s in zip(best, subsets, strict=True)]
        out[i] = sum(best) / math.comb(n, k)
        if kind == "sloo":
            others = itertools.combinations([j for j in range(n) if j != i], k)
            out[i] -= k / (n - 1) * float(np.mean([max(r[j] for j in s) for s in others]))
    return out


def to_go(x: Sequence[float], gamma: float) -> list[float]:
    out, carry = [], 0.0
    for value in reversed(x):
        carry = value + gamma * carry
        out.append(carry)
    return out[::-1]


def token_to_go(f: Fixture, rewards: Reals, gamma: float) -> Reals:
    """Discounted over policy tokens: observations neither pay nor discount."""
    out = np.zeros(f.mask.shape)
    for row in range(f.size):
        out[row, f.mask[row]] = to_go(rewards[row, f.mask[row]].tolist(), gamma)
    return out


def on_last_token(f: Fixture, r: Reals) -> Reals:
    out = np.zeros(f.mask.shape)
    for row in range(f.size):
        places = np.flatnonzero(f.mask[row])
        if len(places) and not np.isnan(r[row]):
            out[row, places[-1]] = r[row]
    return out


def whitened(f: Fixture, advantage: Reals, live: Iterable[bool], ddof: int = 1) -> Reals:
    here = f.mask & np.fromiter(live, bool)[:, None]
    kept = advantage[here]
    scale = math.sqrt(kept.var(ddof=ddof) + 1e-8)
    return np.where(here, (advantage - kept.mean()) / scale, 0.0)


def gae(f: Fixture, gamma: float, lam: float | Reals) -> tuple[Reals, Reals]:
    """Advantages and returns; unrewarded rows have a return but no advantage."""
    rewards = on_last_token(f, f.r_real)
    lam = np.broadcast_to(lam, f.size)
    out = np.zeros(f.mask.shape)
    for row in range(f.size):
        carry, following = 0.0, 0.0
        for t in reversed(np.flatnonzero(f.mask[row])):
            delta = rewards[row, t] + gamma * following - f.values[row, t]
            carry = delta + gamma * lam[row] * carry
            out[row, t], following = carry, f.values[row, t]
    returns = np.where(f.mask, out + f.values, 0.0)
    return np.where(np.isnan(f.r_real)[:, None], 0.0, out), returns


def pooled(values: list[tuple[Any, float]], *, scale: bool, eps: float) -> list[float]:
    """(x - mean) / (std + eps) among the values of equal keys; alone = 0."""
    out = []
    for key, value in values:
        pool = np.array([v for k, v in values if k == key])
        centred = value - pool.mean() if len(pool) > 1 else 0.0
        out.append(float(ratio_of(centred, std(pool), eps)) if scale else float(centred))
    return out


def by_turn(f: Fixture, table: Sequence[Sequence[float]], key: Callable[[int, int], Any],
            *, scale: bool, eps: float) -> list[list[float]]:  # fmt: skip
    """Normalise a ragged table among equal keys."""
    cells = [(row, k) for row in range(f.size) for k in range(len(table[row]))]
    found = pooled([(key(row, k), table[row][k]) for row, k in cells], scale=scale, eps=eps)
    out: list[list[float]] = [[0.0] * len(line) for line in table]
    for (row, k), value in zip(cells, found, strict=True):
        out[row][k] = value
    return out


def gigpo(f: Fixture, *, scale: bool) -> dict[str, Any]:
    paid = [row for row in range(f.size) if f.turn_rewards[row]]
    episode = np.zeros(f.size)
    episode[paid] = pooled(
        [(f.group[row], sum(f.turn_rewards[row])) for row in paid], scale=scale, eps=1e-6
    )
    table = [to_go(line, 0.95) for line in f.turn_rewards]
    step = by_turn(
        f, table, lambda row, k: (f.group[row], f.anchors[row][k]), scale=scale, eps=1e-6
    )
    for row in range(f.size):
        # Whoever is alone in its group is compared with nobody, not with its own past.
        if SIZES[f.group[row]] == 1:
            step[row] = [0.0] * len(step[row])
    total = [[episode[row] + value for value in line] for row, line in enumerate(step)]
    return {"adv": listed(f.paint_turns(total)), "episode": listed(episode), "step": step}


def mt_grpo(f: Fixture) -> dict[str, Any]:
    first = [line[0] if line else 0.0 for line in f.turn_rewards]
    outcome = grouped(f, f.r_bin, lambda x: grpo(x, eps=1e-4))
    turn = np.array(pooled(list(zip(f.group, first, strict=True)), scale=True, eps=1e-4))
    # Only the first turn is paid, so that it alone gets the turn's advantage.
    painted = [
        [outcome[row] + turn[row] * (k == 0) for k in range(max(1, f.turns[row]))]
        for row in range(f.size)
    ]
    return {
        "adv": listed(f.paint_turns(painted)),
        "outcome_adv": listed(outcome),
        "turn_adv": listed(turn),
        "turn_reward": first,
    }


def advantages(f: Fixture) -> dict[str, Any]:
    """Every key that depends on the fixture."""
    r, b = f.r_real, f.r_bin
    live = ~np.isnan(r)
    zeroed = np.where(live, r, 0.0)
    found: dict[str, Any] = {
        "reinforce": zeroed,
        "reinforce_batch_mean_baseline": np.where(live, r - r[live].mean(), 0.0),
        "rloo": grouped(f, r, lambda x: (x - x.mean()) * len(x) / (len(x) - 1)),
        "dr_grpo": grouped(f, r, lambda x: x - x.mean()),
        "maxrl_bin": grouped(f, b, maxrl),
        "scalerl_batch_norm_bin": batch_scaled(f, b, centred=True),
        "scalerl_batch_norm_bin_ddof0": batch_scaled(f, b, centred=True, ddof=0),
        "lite_ppo_group_mean_batch_std": batch_scaled(f, r, centred=False, eps=1e-4),
        "grpo_ddof1_eps1e-6": grouped(f, r, grpo),
        "grpo_ddof1_eps1e-4": grouped(f, r, lambda x: grpo(x, eps=1e-4)),
        "grpo_ddof0_eps1e-6": grouped(f, r, lambda x: grpo(x, ddof=0)),
        "grpo_bin_ddof1_eps1e-6": grouped(f, b, grpo),
        "ngrpo_bin_ddof1": grouped(f, b, ngrpo),
        "ngrpo_bin_ddof0": grouped(f, b, lambda x: ngrpo(x, ddof=0)),
        "remax": np.where(live, r - f.r_greedy, 0.0),
        "grpo_sum_then_normalize": summed(f, f.r_multi),
        "passk_chen_k2_bin": grouped(f, b, lambda x: chen(x, 2)),
        "turn_returns_gamma0.9": [to_go(line, 0.9) for line in f.turn_rewards],
        "gigpo_mean_norm": gigpo(f, scale=False),
        "gigpo_mean_std_norm": gigpo(f, scale=True),
        "mt_grpo": mt_grpo(f),
    }
    for kind, k, name, values in itertools.product(
        ("sloo", "sloo_minus_one"), (2, 3), ("bin", "real"), (b, r)
    ):
        if values is (b if name == "bin" else r):
            rule = lambda x, k=k, kind=kind: pkpo(x, k, kind)  # noqa: E731
            found[f"pkpo_{kind}_k{k}_{name}"] = grouped(f, values, rule)
    baseline, moving = np.zeros(f.size), 0.2
    for g in range(len(SIZES)):
        rows = np.flatnonzero((f.group == g) & live)
        baseline[rows], moving = moving, 0.9 * moving + 0.1 * float(r[rows].mean())
    found["reinforce_ema_baseline_0.9_init0.2"] = {
        "adv": listed(np.where(live, r - baseline, 0.0)),
        "final_baseline": moving,
    }
    return {name: listed(value) for name, value in found.items()} | more_advantages(f)


def more_advantages(f: Fixture) -> dict[str, Any]:
    """The keys with parts."""
    r, found = f.r_real, {}
    live = ~np.isnan(r)
    comparable = np.isin(np.arange(f.size), compared(f, r))
    centred = f.paint(grouped(f, r, lambda x: x - x.mean()))
    found["reinforce_pp_baseline"] = listed(whitened(f, centred, comparable))
    returns = np.where(live[:, None], token_to_go(f, on_last_token(f, r), 0.9), 0.0)
    found["reinforce_pp_gamma0.9"] = {"returns": listed(returns)}
    # An unrewarded row is no experience: its penalties leave the batch with it.
    penalty = np.where(f.mask, -0.05 * (f.logp_old - f.logp_ref), 0.0) * live[:, None]
    rewards = on_last_token(f, r) + penalty
    returns = token_to_go(f, rewards, 1.0)
    found["reinforce_pp_kl0.05"] = {
        "token_rewards": listed(rewards),
        "returns": listed(returns),
        "adv_ddof0": listed(whitened(f, returns, live, 0)),
        "adv_ddof1": listed(whitened(f, returns, live, 1)),
    }
    for name, gamma, lam in (("gae_1.0_0.95", 1.0, 0.95), ("gae_0.99_0.9", 0.99, 0.9),
                             ("gae_orz_1_1", 1.0, 1.0)):  # fmt: skip
        adv, targets = gae(f, gamma, lam)
        found[name] = {
            "adv": listed(adv),
            "returns": listed(targets),
            "adv_whitened_ddof1": listed(whitened(f, adv, live)),
        }
    lam = np.clip(1 - 1 / (0.5 * np.maximum(f.lengths, 1)), 0, 1)
    found["vapo_alpha0.5"] = {
        "adv": listed(gae(f, 1.0, lam)[0]),
        "lambda_policy": listed(lam),
        "returns_lambda_critic_1": listed(gae(f, 1.0, 1.0)[1]),
    }
    for whiten, eps in (("none", 1e-4), ("sequence", 1e-4), ("token", 1e-6)):
        found[f"gdpo_batch_{whiten}"] = {
            "adv": listed(gdpo(f, f.r_multi, whiten=whiten, eps=eps)),
            "per_reward": listed(
                np.column_stack([grouped(f, c, partial(grpo, eps=eps)) for c in f.r_multi.T])
            ),
        }
    gated = conditioned(f.r_multi)
    found["gdpo_conditioned_on_correctness"] = {
        "adv": listed(gdpo(f, gated, whiten="sequence", eps=1e-4)),
        "rewards": listed(gated),
        "per_reward": listed(
            np.column_stack([grouped(f, c, lambda x: grpo(x, eps=1e-4)) for c in gated.T])
        ),
    }
    for metric, k in (("shortest", 2), ("token_efficiency", 3)):
        adv, keep = gfpo(f, r, k, metric)
        found[f"gfpo_{metric}_k{k}"] = {"adv": listed(adv), "keep": listed(keep.astype(float))}
    table = [to_go(line, 0.9) for line in f.turn_rewards]
    for pool, key in (
        ("group", lambda row, k: f.group[row]),
        ("group_turn", lambda row, k: (f.group[row], k)),
    ):
        found[f"turn_return_adv_{pool}"] = listed(
            f.paint_turns(by_turn(f, table, key, scale=True, eps=1e-6))
        )
    return found


Surrogate = tuple[Reals, Reals]
"""Loss of each token, and its derivative with respect to logp_new."""


def weights(f: Fixture, mode: str, mask: Flags) -> Reals:
    """Share of each token in the loss."""
    lengths = mask.sum(1)
    rows = max(1, int((lengths > 0).sum()))
    out = np.zeros(mask.shape)
    for i, t in zip(*np.nonzero(mask), strict=True):
        of_group = int(lengths[f.group == f.group[i]].sum())
        groups = len({int(g) for g in f.group[lengths > 0]})
        out[i, t] = {
            "TM": 1 / mask.sum(),
            "TS": 1.0,
            "SMTM": 1 / (rows * lengths[i]),
            "SMTS": 1 / rows,
            "CONST": 1 / (rows * WIDTH),
            "PM": 1 / (groups * of_group),
        }[mode]
    return out


def clip(ratio: Reals, a: Reals, low: float, high: float, dual: float | None = None) -> Surrogate:
    loss = -np.minimum(ratio * a, np.clip(ratio, 1 - low, 1 + high) * a)
    stopped = ((a > 0) & (ratio > 1 + high)) | ((a < 0) & (ratio < 1 - low))
    if dual is not None:
        loss = np.where(a < 0, np.minimum(loss, -dual * a), loss)
        stopped |= (a < 0) & (ratio > dual)
    return loss, np.where(stopped, 0.0, -ratio * a)


def weighed(weight: Reals, a: Reals, logp: Reals) -> Surrogate:
    return -weight * a * logp, -weight * a


def log_ratio(f: Fixture, anchor: Reals) -> Reals:
    return np.clip(np.where(f.mask, f.logp_new - anchor, 0.0), -20, 20)


def level_ratio(f: Fixture, level: str) -> Reals:
    """Geometric mean over each row or each turn."""
    d, out = np.where(f.mask, f.logp_new - f.logp_old, 0.0), np.ones(f.mask.shape)
    for i, t in zip(*np.nonzero(f.mask), strict=True):
        here = f.mask[i] & ((f.turn[i] == f.turn[i, t]) | (level == "sequence"))
        out[i, t] = math.exp(min(20.0, max(-20.0, d[i, here].mean())))
    return out


def geometric(f: Fixture, a: Reals, bound: float) -> Surrogate:
    d = log_ratio(f, f.logp_old)
    clipped = np.where(a > 0, np.minimum(d, bound), np.maximum(d, -bound))
    loss, slope = np.zeros(d.shape), np.zeros(d.shape)
    for i in range(f.size):
        here = f.mask[i]
        if here.any():
            gain = math.exp(clipped[i, here].mean())
            loss[i] = -gain * a[i]
            # The numerical limit of +-20 stops the gradient, like the clip.
            slope[i] = np.where((clipped[i] == d[i]) & (np.abs(d[i]) < 20), -gain * a[i], 0.0)
    return loss, slope


def soft_gate(ratio: Reals, a: Reals, positive: float, negative: float) -> Surrogate:
    tau = np.where(a > 0, positive, negative)
    s = 1 / (1 + np.exp(-tau * (ratio - 1)))
    return -4 / tau * s * a, -4 * s * (1 - s) * ratio * a


def far_from_sampler(f: Fixture, a: Reals, kind: str, bound: float) -> Flags:
    """Tokens that the divergence mask lets through."""
    p, mu = np.exp(f.logp_new), np.exp(f.logp_rollout)
    if kind == "tv":
        return ~(((a > 0) & (p - mu > bound)) | ((a < 0) & (mu - p > bound)))
    kl = mu * np.log(mu / p) + (1 - mu) * (np.log(1 - mu + 1e-8) - np.log(1 - p + 1e-8))
    kept: Flags = ~((kl > bound) & (((a > 0) & (p > mu)) | ((a < 0) & (p < mu))))
    return kept


def behaviour(f: Fixture, level: str, mode: str, low: float, high: float) -> Reals:
    d = np.where(f.mask, f.logp_old - f.logp_rollout, 0.0)
    d = np.broadcast_to(d.sum(1, keepdims=True), d.shape) if level == "sequence" else d
    w = np.exp(np.clip(d, -20, 20))
    return np.minimum(w, high) if mode == "tis" else np.where((w >= low) & (w <= high), w, 0.0)


def covariance(f: Fixture, a: Reals) -> Reals:
    here = f.mask
    return np.where(here, (a - a[here].mean()) * (f.logp_new - f.logp_new[here].mean()), 0.0)


def kl_terms(f: Fixture, kind: str) -> Surrogate:
    d = np.clip(f.logp_new - f.logp_ref, -20, 20)
    inside = np.abs(f.logp_new - f.logp_ref) < 20
    k2, k3 = d**2 / 2, np.exp(-d) + d - 1
    return {
        "k1": (d, inside * 1.0),
        "k2": (k2, inside * d),
        "k3": (k3, inside * (1 - np.exp(-d))),
        "k3plus": (k3, inside * d),
        "abs": (np.abs(d), inside * np.sign(d)),
    }[kind]


def entry(f: Fixture, w: Reals, found: Surrogate, *more: Surrogate) -> dict[str, Any]:
    """The sum over tokens, w times the surrogate and whatever is added to it."""
    loss, slope = w * found[0], w * found[1]
    for extra, extra_slope in more:
        loss, slope = loss + extra, slope + extra_slope
    return {
        "loss": float(loss[f.mask].sum()),
        "grad": listed(np.where(f.mask, slope, 0.0)),
    }


def clipped_losses(f: Fixture) -> dict[str, Any]:
    """PPO's surrogate under other advantages, masks and weights."""
    ratio, r = np.exp(log_ratio(f, f.logp_old)), f.r_real
    a = f.paint(grouped(f, r, grpo))
    tm, smtm = weights(f, "TM", f.mask), weights(f, "SMTM", f.mask)
    dapo, plain = clip(ratio, a, LOW, HIGH), clip(ratio, a, LOW, LOW)
    found = {
        "grpo_seqmean": entry(f, smtm, plain),
        "dr_grpo": entry(
            f, weights(f, "CONST", f.mask),
            clip(ratio, f.paint(grouped(f, r, lambda x: x - x.mean())), LOW, LOW),
        ),
        "dapo": entry(f, tm, dapo),
        "ppo_dual_clip_c1.5_token_mean": entry(f, tm, clip(ratio, a, LOW, LOW, 1.5)),
        "ppo_dual_clip_c3_token_mean": entry(f, tm, clip(ratio, a, LOW, LOW, 3.0)),
        "ppo_two_sided_delta1.5_token_mean": entry(f, tm, clip(ratio, a, LOW, LOW, 1.5)),
        "ngrpo": entry(f, tm, clip(ratio, f.paint(grouped(f, f.r_bin, ngrpo)), 0.16, 0.24)),
        "gdpo_token_mean": entry(
            f, tm, clip(ratio, f.paint(gdpo(f, f.r_multi, whiten="sequence", eps=1e-4)), LOW, LOW)
        ),
    }  # fmt: skip
    whole = f.mask & (f.truncated == 0)[:, None]
    found["dapo_overlong_filtered"] = entry(f, weights(f, "TM", whole), dapo)
    for name, w in (
        ("tis_token_cap1.02", behaviour(f, "token", "tis", 0, 1.02)),
        ("tis_sequence_cap1.05", behaviour(f, "sequence", "tis", 0, 1.05)),
        ("mis_token_0.95_1.02", behaviour(f, "token", "mis", 0.95, 1.02)),
        ("mis_sequence_cap1.05", behaviour(f, "sequence", "mis", 0, 1.05)),
    ):
        found[f"dapo_{name}"] = entry(f, tm * w, dapo)
    adv, keep = gfpo(f, r, 2, "shortest")
    cut = clip(ratio, f.paint(adv), LOW, LOW)
    found["gfpo_shortest_k2_denominator_all"] = entry(f, tm, cut)
    kept = f.mask & keep[:, None]
    found["gfpo_shortest_k2_denominator_kept"] = entry(f, weights(f, "TM", kept), cut)
    k3, slope = kl_terms(f, "k3")
    found["grpo_seqmean_k3_beta0.04"] = entry(
        f, smtm, plain, (0.04 * smtm * k3, 0.04 * smtm * slope)
    )
    inside = np.abs(f.logp_new - f.logp_old) < 20
    product = ratio * slope + np.where(inside, ratio * k3, 0.0)
    found["grpo_seqmean_k3_is_corrected_beta0.04"] = entry(
        f, smtm, plain, (0.04 * smtm * ratio * k3, 0.04 * smtm * product)
    )
    chosen = f.entropy >= np.quantile(f.entropy[f.mask], 0.8) - 1e-9
    found["high_entropy_20pct"] = entry(f, tm * chosen, dapo)
    cov = covariance(f, a)
    bound = ((a > 0) & (ratio > 1 + LOW)) | ((a < 0) & (ratio < 1 - LOW))
    found["clip_cov_all_candidates_band0.3_1.5"] = entry(
        f, tm * ~((cov > 0.3) & (cov < 1.5) & ~bound), plain
    )
    drift = np.array([
        (f.logp_old - f.logp_new)[i, f.mask[i]].mean() if f.mask[i].any() else 0.0
        for i in range(f.size)
    ])  # fmt: skip
    stays = (a >= 0) | (drift[:, None] <= 0.02)
    return found | {"off_policy_seq_mask_delta0.02": entry(f, smtm * stays, plain)}


def weighted_losses(f: Fixture) -> dict[str, Any]:
    """Plain policy gradients, detached weights, and what is neither."""
    r, logp, tm = f.r_real, f.logp_new, weights(f, "TM", f.mask)
    old, sampled = np.exp(log_ratio(f, f.logp_old)), np.exp(log_ratio(f, f.logp_rollout))
    one = np.ones(f.mask.shape)
    a, smts = f.paint(grouped(f, r, grpo)), weights(f, "SMTS", f.mask)
    centred = f.paint(grouped(f, r, lambda x: x - x.mean()))
    rows = {name: np.nan_to_num(np.asarray(x, float)) for name, x in (
        ("reinforce", r),
        ("rloo", grouped(f, r, lambda x: (x - x.mean()) * len(x) / (len(x) - 1))),
        ("maxrl", grouped(f, f.r_bin, maxrl)),
    )}  # fmt: skip
    found = {
        f"{name}_seq_sum_mean": entry(f, smts, weighed(one, f.paint(x), logp))
        for name, x in rows.items()
    }
    remax = f.paint(np.where(np.isnan(r), 0.0, r - f.r_greedy))
    found["remax_token_mean"] = entry(f, tm, weighed(one, remax, logp))
    found["cispo_wmax1.2"] = entry(f, tm, weighed(np.minimum(old, 1.2), a, logp))
    found["cispo_wmax1.2_wmin0.8"] = entry(f, tm, weighed(np.clip(old, 0.8, 1.2), a, logp))
    scaled = f.paint(batch_scaled(f, f.r_bin, centred=True))
    found["scalerl_wmax1.3_rollout_anchor_prompt_mean"] = entry(
        f, weights(f, "PM", f.mask), weighed(np.minimum(sampled, 1.3), scaled, logp)
    )
    band = np.where((sampled >= 0.9) & (sampled <= 1.1), sampled, 0.0)
    found["icepop_0.9_1.1_rollout_anchor"] = entry(f, tm, weighed(band, a, logp))
    for kind, bound in (("tv", 0.05), ("tv", 0.15), ("kl", 0.01), ("kl", 0.05)):
        kept = far_from_sampler(f, centred, kind, bound) & f.mask
        literal = (-sampled * centred * kept, -sampled * centred * kept)
        found[f"dppo_{kind}_{bound}_literal"] = entry(f, tm, literal)
        found[f"dppo_keep_mask_{kind}_{bound}"] = listed(kept.astype(float))
    capped = np.minimum(sampled, 1.2) * far_from_sampler(f, centred, "tv", 0.05)
    found["dppo_tv_0.05_truncated1.2"] = entry(f, tm, weighed(capped, centred, logp))
    smtm = weights(f, "SMTM", f.mask)
    for name, level in (("", "sequence"), ("_token", "sequence"), ("_turn_level", "turn")):
        cut = clip(level_ratio(f, level), a, 0.03, 0.04)
        found[f"gspo{name}_lo0.03_hi0.04"] = entry(f, smtm, cut)
    for bound in (0.1, 0.4):
        found[f"gmpo_log_clip{bound}"] = entry(f, smtm, geometric(f, a, bound))
    found["sapo_1.0_1.05"] = entry(f, smtm, soft_gate(old, a, 1.0, 1.05))
    cov = covariance(f, a)
    count = max(1, int(0.1 * f.mask.sum()))
    top = f.mask & (cov >= np.sort(cov[f.mask])[-count])
    drift = f.logp_new - f.logp_old
    found["kl_cov_k0.1_beta1"] = entry(
        f, tm, (-old * a, -old * a), (tm * top * np.abs(drift), tm * top * np.sign(drift))
    )
    return found


def other_losses(f: Fixture) -> dict[str, Any]:
    """Critics, preferences, demonstrations and distances to the reference."""
    ratio, tm = np.exp(log_ratio(f, f.logp_old)), weights(f, "TM", f.mask)
    live = ~np.isnan(f.r_real)
    found: dict[str, Any] = {
        f"kl_loss_{kind}_token_mean": {
            **entry(f, tm, kl_terms(f, kind)),
            "per_token": listed(np.where(f.mask, kl_terms(f, kind)[0], 0.0)),
        }
        for kind in ("k1", "k2", "k3", "k3plus", "abs")
    }
    adv, _ = gae(f, 1.0, 0.95)
    found["ppo_gae_whitened_token_mean"] = entry(
        f, tm, clip(ratio, whitened(f, adv, live), LOW, LOW)
    )
    lam = np.clip(1 - 1 / (0.5 * np.maximum(f.lengths, 1)), 0, 1)
    adv, targets = gae(f, 1.0, lam)[0], gae(f, 1.0, 1.0)[1]
    right = f.mask & (f.r_bin == 1)[:, None]
    share = right / right.sum()
    imitation = (-0.1 * share * f.logp_new, -0.1 * share)
    found["vapo_total_mu0.1"] = {
        **entry(f, tm, clip(ratio, whitened(f, adv, live), LOW, HIGH), imitation),
        "nll": float(-f.logp_new[right].mean()),
    }
    moved = f.values + np.clip(f.values_new - f.values, -0.2, 0.2)
    free, held = (f.values_new - targets) ** 2, (moved - targets) ** 2
    slope = np.where(
        free >= held, f.values_new - targets,
        np.where(np.abs(f.values_new - f.values) < 0.2, moved - targets, 0.0),
    )  # fmt: skip
    value = entry(f, tm * live[:, None], (0.5 * np.maximum(free, held), slope))
    found["value_loss_clip0.2_token_mean"] = {
        "loss": value["loss"], "grad_v": value["grad"], "returns": listed(targets)
    }  # fmt: skip
    return found | {
        "dpo_beta0.1_best_worst": dpo(f, 0.1),
        "luffy_gamma0.1_const_norm": luffy(f, ratio, 0.1),
    }


def dpo(f: Fixture, beta: float) -> dict[str, Any]:
    pairs = []
    for rows in f.members(~np.isnan(f.r_real)):
        best, worst = rows[np.argmax(f.r_real[rows])], rows[np.argmin(f.r_real[rows])]
        if f.r_real[best] > f.r_real[worst]:
            pairs.append((int(best), int(worst)))
    new, ref = ((np.where(f.mask, x, 0.0)).sum(1) for x in (f.logp_new, f.logp_ref))
    margins = [float((new - ref)[i] - (new - ref)[j]) for i, j in pairs]
    grad = np.zeros(f.mask.shape)
    for (i, j), h in zip(pairs, margins, strict=True):
        pull = beta / (1 + math.exp(beta * h)) / len(pairs)
        grad[i] -= np.where(f.mask[i], pull, 0.0)
        grad[j] += np.where(f.mask[j], pull, 0.0)
    return {
        "pairs": listed(pairs),
        "margins": margins,
        "loss": float(np.mean([math.log1p(math.exp(-beta * h)) for h in margins])),
        "grad": listed(grad),
        "seq_logp_new": listed(new),
        "seq_logp_ref": listed(ref),
    }


def luffy(f: Fixture, ratio: Reals, gamma: float) -> dict[str, Any]:
    a = f.paint(grouped(f, f.r_real, lambda x: x - x.mean()))
    demo = int(np.argmax(np.abs(a).sum(1)))
    p = np.exp(f.logp_new)
    loss, slope = -ratio * a, -ratio * a
    loss[demo] = (-a * p / (p + gamma))[demo]
    slope[demo] = (-a * p * gamma / (p + gamma) ** 2)[demo]
    return entry(f, weights(f, "CONST", f.mask), (loss, slope))


def aggregation(f: Fixture) -> dict[str, Any]:
    """Means of one loss, whatever the algorithm."""
    loss = np.where(f.mask, np.random.default_rng(f.size).random(f.mask.shape), 0.0)
    whole = f.mask & (f.truncated == 0)[:, None]
    acts = f.mask & (f.role == 1)
    thinks = f.mask & (f.role == 0)
    per_row = np.array([x[m].mean() if m.any() else 0.0 for x, m in zip(loss, whole, strict=True)])
    names = {
        "token_mean": "TM",
        "token_sum": "TS",
        "seq_mean_token_mean": "SMTM",
        "seq_mean_token_sum": "SMTS",
        "seq_mean_token_sum_norm": "CONST",
        "prompt_mean": "PM",
    }
    return {
        "per_token_loss": listed(loss),
        **{name: float((weights(f, mode, f.mask) * loss).sum()) for name, mode in names.items()},
        "token_mean_overlong_filtered": float(loss[whole].mean()),
        "seq_mean_token_mean_overlong_filtered_active": float(
            per_row.sum() / (whole.sum(1) > 0).sum()
        ),
        "seq_mean_token_mean_overlong_filtered_all": float(per_row.sum() / f.size),
        "dart_role_weight_rolemean_0.3_0.7": float(
            0.3 * loss[thinks].mean() + 0.7 * loss[acts].mean()
        ),
        "dart_role_weight_tokenwise_0.3_0.7": float(
            (0.3 * loss[thinks].sum() + 0.7 * loss[acts].sum()) / f.mask.sum()
        ),
    }


def goldens(seed: int) -> dict[str, Any]:
    """A goldens file for one seed."""
    f = Fixture(seed)
    return {
        "fixture": f.as_json(),
        "advantages": advantages(f),
        "losses": clipped_losses(f) | weighted_losses(f) | other_losses(f),
        "aggregation": aggregation(f),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(goldens(int(sys.argv[1]))))
