import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turngym.rl.algorithm import Algorithm
from turngym.rl.axes import AdaptiveK, Gate, Reward, Selection, TopK
from turngym.rl.batch import Batch
from turngym.rl.estimators import (
    GAE,
    AnchorState,
    Estimator,
    GroupAdvantage,
    OutcomeAndTurn,
    PassAtK,
    StepValues,
    TurnNormalized,
)
from turngym.rl.filters import adaptive_k, keep_members
from turngym.rl.gae import adaptive_lambda
from turngym.rl.padded import batch_from_padded, unflatten
from turngym.rl.passk import pkpo_rewards
from turngym.rl.plan import assign, plan
from turngym.rl.presets import PRESETS
from turngym.rl.returns import returns_of
from turngym.rl.state import AlgorithmState
from turngym.rl.terms import KL
from turngym.rl.trees import treerl_rewards

NUMBER = r"([\d.]+)"
EPS = r"([\d.e-]+)"

Check = Callable[[Any, re.Match[str], Any, Any], None]
CHECKS: list[tuple[str, Check]] = []


def key(pattern: str) -> Callable[[Check], Check]:
    """Register the check of all keys of a form; numbers in a key are its parameters."""

    def keep(check: Check) -> Check:
        CHECKS.append((pattern.replace("#", NUMBER).replace("@", EPS), check))
        return check

    return keep


def find(name: str) -> tuple[re.Match[str], Check] | None:
    for pattern, check in CHECKS:
        match = re.fullmatch(pattern, name)
        if match:
            return match, check
    return None


def test_every_advantage_is_covered(golden: Any) -> None:
    assert not [name for name in golden["advantages"] if find(name) is None]


def test_advantage(golden: Any, advantage_key: str, close: Any) -> None:
    found = find(advantage_key)
    assert found is not None, "no check for this key"
    match, check = found
    check(golden, match, golden["advantages"][advantage_key], close)


def with_estimator(estimator: Estimator, **changes: Any) -> Algorithm:
    """GRPO with another estimator, every token in the loss."""
    axes: dict[str, Any] = {"advantage": estimator, "regularize": ()}
    return replace(PRESETS["grpo"], **(axes | changes))


def painted(golden: Any, estimator: Estimator, rewards: str) -> Tensor:
    """Advantage of each token, (B, T)."""
    found: Tensor = golden.advantage(with_estimator(estimator), golden.batch(rewards))
    return found


GRPO = GroupAdvantage(scale="group_std")
SIMPLE: list[tuple[str, Estimator, str]] = [
    ("reinforce", GroupAdvantage(baseline="none"), "r_real"),
    ("reinforce_batch_mean_baseline", GroupAdvantage(baseline="batch_mean"), "r_real"),
    ("rloo", GroupAdvantage(baseline="leave_one_out"), "r_real"),
    ("dr_grpo", GroupAdvantage(), "r_real"),
    ("maxrl_bin", GroupAdvantage(scale="group_mean"), "r_bin"),
    ("scalerl_batch_norm_bin", GroupAdvantage(scale="centered_batch_std"), "r_bin"),
    ("scalerl_batch_norm_bin_ddof0", GroupAdvantage(scale="centered_batch_std", ddof=0), "r_bin"),
    ("lite_ppo_group_mean_batch_std", GroupAdvantage(scale="batch_std", eps=1e-4), "r_real"),
]


@key("|".join(name for name, _, _ in SIMPLE))
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    estimator, rewards = {name: (e, r) for name, e, r in SIMPLE}[m[0]]
    close(painted(golden, estimator, rewards), golden.by_row(wanted))


@key("grpo_(bin_)?ddof([01])_eps@")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    estimator = replace(GRPO, ddof=int(m[2]), eps=float(m[3]))
    close(painted(golden, estimator, "r_bin" if m[1] else "r_real"), golden.by_row(wanted))


@key("ngrpo_bin_ddof([01])")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    estimator = replace(GRPO, virtual_rewards=1, ddof=int(m[1]))
    close(painted(golden, estimator, "r_bin"), golden.by_row(wanted))


def one_group(rewards: list[float]) -> Batch:
    size = len(rewards)
    return batch_from_padded(
        mask=torch.ones((size, 1), dtype=torch.bool),
        group=torch.zeros(size, dtype=torch.int64),
        logp_rollout=torch.zeros((size, 1), dtype=torch.float64),
        rewards={"r": torch.tensor(rewards, dtype=torch.float64)},
    )


def group_advantages(golden: Any, estimator: Estimator, rewards: list[float]) -> Tensor:
    algorithm, batch = with_estimator(estimator), one_group(rewards)
    return golden.plan(algorithm, batch).advantage  # type: ignore[no-any-return]


@key("ngrpo_all_wrong_group(\\d+)")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    for ddof in (0, 1):
        estimator = replace(GRPO, virtual_rewards=1, ddof=ddof)
        found = group_advantages(golden, estimator, [0.0] * int(m[1]))
        close(found, [wanted[f"ddof{ddof}"]] * int(m[1]))


@key("ngrpo_seed_example_all_#")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    # The file's example has four wrong answers worth the number in its key, and no eps.
    for ddof in (0, 1):
        estimator = replace(GRPO, virtual_rewards=1, ddof=ddof, eps=0.0)
        found = group_advantages(golden, estimator, [float(m[1])] * 4)
        close(found, [wanted[f"adv_ddof{ddof}"]] * 4)
        spread = (float(m[1]) - wanted["mean"]) / wanted[f"std_ddof{ddof}"]
        close(found, [spread] * 4)


@key("remax")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    algorithm = with_estimator(GroupAdvantage(baseline="greedy"))
    batch = golden.batch("r_real", greedy={"r": golden.column("r_greedy")})
    close(golden.advantage(algorithm, batch), golden.by_row(wanted))


@key("reinforce_ema_baseline_#_init#")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    # Each group of the fixture is one batch: the baseline is read, then moved.
    algorithm = with_estimator(GroupAdvantage(baseline="ema", decay=float(m[1])))
    state = AlgorithmState(ema=float(m[2]))
    rewards, group = golden.column("r_real"), golden.column("group")
    found = torch.empty_like(rewards)
    for number in group.unique():
        members = group == number
        batch = one_group(rewards[members].tolist())
        planned = plan(golden.bind(algorithm, batch), batch, state=state)
        found[members] = planned.advantage
        state = planned.state
    close(found, wanted["adv"])
    close(state.ema, wanted["final_baseline"])


@key("reinforce_pp_baseline")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    algorithm = with_estimator(GroupAdvantage(whiten="token"))
    close(golden.advantage(algorithm, golden.batch("r_real")), wanted)


@key("reinforce_pp_(kl|gamma)#")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    gamma = float(m[2]) if m[1] == "gamma" else 1.0
    kl = KL(coef=float(m[2]), estimator="k1", where="reward") if m[1] == "kl" else None
    batch = golden.batch("r_real")

    def run(**changes: Any) -> Tensor:
        estimator = GroupAdvantage(baseline="none", unit="token", gamma=gamma, **changes)
        algorithm = with_estimator(estimator, regularize=(kl,) if kl else ())
        return golden.advantage(algorithm, batch)  # type: ignore[no-any-return]

    checked = set(wanted) - {"token_rewards"}
    assert checked <= {"returns", "adv", "adv_ddof0", "adv_ddof1"}
    close(run(), golden.column_of(wanted["returns"]) * golden.mask)
    for name, ddof in (("adv_ddof0", 0), ("adv_ddof1", 1), ("adv", 1)):
        if name in wanted:
            close(run(whiten="token", ddof=ddof), wanted[name])
    if "token_rewards" in wanted:
        rewards = golden.column_of(wanted["token_rewards"]) * golden.mask
        to_go = rewards.flip(-1).cumsum(-1).flip(-1) * golden.mask
        close(run(), to_go)


@key("gae_(?:orz_)?#_#")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    batch = golden.batch("r_real")
    for whiten, name in (("none", "adv"), ("token", "adv_whitened_ddof1")):
        gae = GAE(gamma=float(m[1]), lam=float(m[2]), whiten=whiten)  # type: ignore[arg-type]
        planned = golden.plan(with_estimator(gae), batch)
        close(unflatten(planned.advantage, golden.mask), wanted[name])
        assert planned.value_targets is not None
        close(unflatten(planned.value_targets, golden.mask), wanted["returns"])


@key("vapo_alpha#")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    gae = GAE(length_alpha=float(m[1]), lam_critic=1.0, whiten="none")
    planned = golden.plan(with_estimator(gae), golden.batch("r_real"))
    close(unflatten(planned.advantage, golden.mask), wanted["adv"])
    assert planned.value_targets is not None
    close(unflatten(planned.value_targets, golden.mask), wanted["returns_lambda_critic_1"])
    close(adaptive_lambda(golden.mask.sum(-1), float(m[1])), wanted["lambda_policy"])


@key("vapo_lambda_alpha#")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    lengths = torch.tensor([int(length) for length in wanted])
    close(adaptive_lambda(lengths, float(m[1])), list(wanted.values()))


def multi(golden: Any, values: Tensor, estimator: GroupAdvantage, reward: Reward) -> Tensor:
    """Advantage of each token under several weighted components, (B, T)."""
    names = [f"r{k}" for k in range(values.shape[1])]
    weights = dict(zip(names, golden["fixture"]["w_multi"], strict=True))
    algorithm = with_estimator(estimator, reward=replace(reward, weights=weights))
    batch = golden.batch(dict(zip(names, values.unbind(-1), strict=True)))
    found: Tensor = golden.advantage(algorithm, batch)
    return found


def alone(golden: Any, values: Tensor, estimator: GroupAdvantage, wanted: Any, close: Any) -> None:
    """Compare each component normalised by itself with the columns of a (B, C) table."""
    algorithm = with_estimator(estimator)
    table = golden.column_of(wanted)
    for column, expected in zip(values.unbind(-1), table.unbind(-1), strict=True):
        found = golden.advantage(algorithm, golden.batch({"r": column}))
        close(found, golden.by_row(expected.tolist()))


@key("grpo_sum_then_normalize")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    values = golden.column("r_multi")
    found = multi(golden, values, replace(GRPO, eps=1e-4), Reward())
    close(found, golden.by_row(wanted))


@key("gdpo_batch_(none|sequence|token)")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    # verl whitens over tokens with eps 1e-6, TRL over trajectories with 1e-4.
    estimator = replace(GRPO, eps=1e-6 if m[1] == "token" else 1e-4, whiten=m[1])  # type: ignore[arg-type]
    values = golden.column("r_multi")
    found = multi(golden, values, estimator, Reward(combine="normalize_then_sum"))
    close(found, golden.by_row(wanted["adv"]))
    alone(golden, values, replace(estimator, whiten="none"), wanted["per_reward"], close)


@key("gdpo_conditioned_on_correctness")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    algorithm = PRESETS["gdpo_conditioned"]
    values = golden.column("r_multi")
    names = ["correct", *(f"r{k}" for k in range(1, values.shape[1]))]
    weights = dict(zip(names, golden["fixture"]["w_multi"], strict=True))
    algorithm = replace(algorithm, reward=replace(algorithm.reward, weights=weights))
    batch = golden.batch(dict(zip(names, values.unbind(-1), strict=True)))
    close(golden.advantage(algorithm, batch), golden.by_row(wanted["adv"]))
    returns = returns_of(golden.bind(algorithm, batch), batch)
    gated = golden.column_of(wanted["rewards"])
    close(returns.steps.sum(-1).T, gated.nan_to_num())
    alone(golden, gated, replace(GRPO, eps=1e-4), wanted["per_reward"], close)


@key("gdpo_collapse_demo")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    # A reward sum of (0, 1) and one of (0, 2) normalise to the same pair in a group of two.
    for name in (name for name in wanted if name.startswith("grpo_")):
        sums = [float(digit) for digit in name.removeprefix("grpo_")]
        close(group_advantages(golden, GRPO, sums), wanted[name])
    close(wanted["grpo_01"], wanted["grpo_02"])


@key("gfpo_(shortest|token_efficiency)_k(\\d+)")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    keep = TopK(k=int(m[2]), metric=m[1])  # type: ignore[arg-type]
    algorithm = with_estimator(GRPO, selection=Selection(keep_in_group=keep))
    batch = golden.batch("r_real")
    close(golden.advantage(algorithm, batch), golden.by_row(wanted["adv"]))
    bound = golden.bind(algorithm, batch)
    total = batch.rewards["r"]
    kept, _ = keep_members(bound, batch, total.nan_to_num(), ~total.isnan(), AlgorithmState())
    close(kept, wanted["keep"])


@key("gfpo_adaptive_k")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    spec, history = AdaptiveK(warmup=0), wanted["history"]
    close(np.quantile(history, [0.25, 0.5, 0.75]), wanted["quartiles"])
    for mean, k in wanted["k"].items():
        assert adaptive_k(spec, float(mean), history) == k
    assert adaptive_k(replace(spec, warmup=len(history) + 1), 1.0, history) == wanted["warmup"]


@key("passk_chen_k(\\d+)_bin")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    close(painted(golden, PassAtK(method="chen", k=int(m[1])), "r_bin"), golden.by_row(wanted))


@key("pkpo_s_k(\\d+)_(bin|real)")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    rewards, group = golden.column(f"r_{m[2]}"), golden.column("group")
    found = torch.empty_like(rewards)
    for number in group.unique():
        members = group == number
        found[members] = torch.from_numpy(
            pkpo_rewards(rewards[members].numpy()[None], int(m[1]))[0]
        )
    close(found, wanted)


@key("pkpo_(sloo|sloo_minus_one)_k(\\d+)_(bin|real)")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    estimator = PassAtK(method=m[1], k=int(m[2]))  # type: ignore[arg-type]
    close(painted(golden, estimator, f"r_{m[3]}"), golden.by_row(wanted))


def turn_table(golden: Any) -> Tensor:
    """The fixture's ragged turn rewards, (B, K), NaN after the last turn."""
    ragged = golden["fixture"]["turn_rewards"]
    width = max(len(row) for row in ragged)
    return golden.column_of(  # type: ignore[no-any-return]
        [row + [float("nan")] * (width - len(row)) for row in ragged]
    )


@key("turn_returns_gamma#")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    batch = golden.batch({}, turn_rewards={"r": turn_table(golden)})
    algorithm = with_estimator(GroupAdvantage(unit="turn", gamma=float(m[1])))
    to_go = golden.returns(algorithm, batch).to_go(float(m[1]))[0]
    for row, returns in enumerate(wanted):
        close(to_go[row, : len(returns)], returns)


@key("turn_return_adv_(group|group_turn)")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    # The discount is that of the file's own turn returns.
    gamma = next(
        float(name.removeprefix("turn_returns_gamma"))
        for name in golden["advantages"]
        if name.startswith("turn_returns_gamma")
    )
    batch = golden.batch({}, turn_rewards={"r": turn_table(golden)})
    estimator = TurnNormalized(gamma=gamma, pool=m[1])  # type: ignore[arg-type]
    close(golden.advantage(with_estimator(estimator), batch), wanted)


@key("gigpo_(mean|mean_std)_norm")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    table = turn_table(golden)
    numbers: dict[str, int] = {}
    anchors = torch.full(table.shape, -1)
    for row, names in enumerate(golden["fixture"]["anchors"]):
        for k, name in enumerate(names):
            anchors[row, k] = numbers.setdefault(name, len(numbers))
    batch = golden.batch({}, turn_rewards={"r": table}, anchor_state=anchors)
    scale = "std" if m[1] == "mean_std" else "none"

    def run(omega: float) -> Tensor:
        estimator = AnchorState(omega=omega, scale=scale)  # type: ignore[arg-type]
        return golden.advantage(with_estimator(estimator), batch)  # type: ignore[no-any-return]

    close(run(1.0), wanted["adv"])
    close(run(0.0), golden.by_row(wanted["episode"]))
    step = run(1.0) - run(0.0)
    turn = golden.column("turn").long()
    for row, values in enumerate(wanted["step"]):
        for k, value in enumerate(values):
            close(step[row][turn[row] == k], [value] * int((turn[row] == k).sum()))


@key("mt_grpo")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    first = golden.column_of(wanted["turn_reward"])
    table = torch.full_like(turn_table(golden), float("nan"))
    table[:, 0] = first
    batch = golden.batch("r_bin", turn_rewards={"tool": table})

    def run(coef: float) -> Tensor:
        algorithm = with_estimator(OutcomeAndTurn(coef=coef))
        return golden.advantage(algorithm, batch)  # type: ignore[no-any-return]

    close(run(1.0), wanted["adv"])
    close(run(0.0), golden.by_row(wanted["outcome_adv"]))
    on_first = golden.mask & (golden.column("turn") == 0)
    close(run(1.0) - run(0.0), golden.by_row(wanted["turn_adv"]) * on_first)


@key("vineppo_steps")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    values = golden.column_of(wanted["v_mc"])
    steps = len(values)
    batch = batch_from_padded(
        mask=torch.ones((1, steps), dtype=torch.bool),
        group=torch.zeros(1, dtype=torch.int64),
        logp_rollout=torch.zeros((1, steps), dtype=torch.float64),
        rewards={"r": golden.column_of([wanted["terminal_reward"]])},
        turn=torch.arange(steps).unsqueeze(0),
    )
    batch = replace(batch, step_values=values.unsqueeze(0))
    close(golden.plan(with_estimator(StepValues()), batch).advantage, wanted["adv"])


@key("treerl_binary_tree")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    parents = [-1 if parent is None else parent for parent in wanted["parents"]]
    leaves = {int(node): float(reward) for node, reward in wanted["leaf_reward"].items()}
    found = treerl_rewards(parents, leaves)
    for node, reward in wanted["node_reward"].items():
        close(found[int(node)], reward)


@key("luffy_mixed_group_no_std")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    batch = one_group([float(reward) for reward in wanted["rewards"]])
    batch = replace(batch, demo=torch.tensor(wanted["off_policy"], dtype=torch.bool))
    algorithm = replace(PRESETS["luffy"], regularize=())
    close(golden.plan(algorithm, batch).advantage, wanted["adv"])


@key("rlep_mixed_group")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    batch = one_group(wanted["rewards"])
    close(golden.plan(PRESETS["rlep"], batch).advantage, wanted["adv_ddof1"])


@key("gated_reward_accumulation")
def _(golden: Any, m: re.Match[str], wanted: Any, close: Any) -> None:
    for case in wanted["cases"]:
        steps = golden.column_of([case["steps"]])
        batch = replace(
            one_group([case["outcome"]]),
            turn_rewards={"step": steps},
            num_turns=torch.tensor([steps.shape[1]]),
        )
        reward = Reward(shaping=(Gate(threshold=case["threshold"]),))
        algorithm = with_estimator(GRPO, reward=reward)
        total = golden.returns(algorithm, batch).steps.sum()
        close(total, case["reward"])


def test_credit_comes_before_the_split(golden: Any) -> None:
    algorithm, batch = with_estimator(GRPO), golden.batch("r_real")
    credit = assign(golden.bind(algorithm, batch), batch)
    assert torch.equal(golden.plan(algorithm, batch).advantage, credit.advantage)
