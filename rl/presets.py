"""Every algorithm as a value, so that the family reads like a table; no torch here.

Formulas: rho is the ratio to the anchor, A the advantage, |y| the policy tokens of a row, sums run
over policy tokens. `docs/algorithms.md` is the same table with the paper index.
"""

from dataclasses import replace

from turngym.rl.algorithm import Algorithm
from turngym.rl.axes import Aggregate, Ratio, Reward, Selection, SoftOverlong
from turngym.rl.estimators import GroupAdvantage
from turngym.rl.terms import KL, DropTruncated
from turngym.rl.trust_region import Clip

__all__ = ["PRESETS"]

NO_RATIO = Ratio(anchor="none")

REINFORCE = Algorithm(
    name="reinforce",
    paper="10.1007/BF00992696",
    formula="-A sum_t logp_t, A = r - mean over the batch",
    advantage=GroupAdvantage(baseline="batch_mean"),
    ratio=NO_RATIO,
    aggregate=Aggregate(mode="seq_mean_token_sum"),
)

RLOO = Algorithm(
    name="rloo",
    paper="2402.14740",
    formula="-A sum_t logp_t, A_i = r_i - mean of the other r",
    deviations=("KL in the reward is off; add KL(coef=.05, estimator='k1', where='reward')",),
    advantage=GroupAdvantage(baseline="leave_one_out"),
    ratio=NO_RATIO,
    aggregate=Aggregate(mode="seq_mean_token_sum"),
)

GRPO = Algorithm(
    name="grpo",
    paper="2402.03300",
    formula="mean_i mean_t [-min(rho A, clip(rho, .8, 1.2) A) + .04 k3], A = (r - mean_g) / std_g",
    advantage=GroupAdvantage(scale="group_std"),
    trust_region=Clip(),
    aggregate=Aggregate(mode="seq_mean_token_mean"),
    regularize=(KL(coef=0.04),),
)

DR_GRPO = replace(
    GRPO,
    name="dr_grpo",
    paper="2503.20783",
    formula="mean_i sum_t -min(rho A, clip(rho, .8, 1.2) A) / L, A = r - mean_g",
    advantage=GroupAdvantage(),
    aggregate=Aggregate(mode="seq_mean_token_sum_norm"),
    regularize=(),
)

DAPO = replace(
    GRPO,
    name="dapo",
    paper="2503.14476",
    formula="mean over tokens of -min(rho A, clip(rho, .8, 1.28) A), A = (r - mean_g) / std_g",
    deviations=(
        "token mean over the whole optimizer batch, as released; the paper's formula is "
        "'prompt_mean'",
    ),
    reward=Reward(shaping=(SoftOverlong(),)),
    selection=Selection(keep_groups="mixed", max_batches=10),
    trust_region=Clip(low=0.2, high=0.28),
    tokens=(DropTruncated(),),
    aggregate=Aggregate(mode="token_mean"),
    regularize=(),
)

PRESETS: dict[str, Algorithm] = {
    algorithm.name: algorithm for algorithm in (REINFORCE, RLOO, GRPO, DR_GRPO, DAPO)
}
