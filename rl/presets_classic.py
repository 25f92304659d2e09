"""REINFORCE, the actor-critics, GRPO and its direct heirs, DPO; no torch here."""

from dataclasses import replace

from turngym.rl.algorithm import Algorithm
from turngym.rl.axes import Aggregate, Ratio, Reward, Selection, SoftOverlong
from turngym.rl.estimators import GAE, GroupAdvantage, Pairs
from turngym.rl.terms import KL, DropTruncated, PositiveNLL, ValueLoss
from turngym.rl.trust_region import Clip

PLAIN_GRADIENT = Ratio(anchor="none")
TOKEN_MEAN = Aggregate(mode="token_mean")
SEQUENCE_MEAN = Aggregate(mode="seq_mean_token_mean")
SEQUENCE_SUM = Aggregate(mode="seq_mean_token_sum")
CONSTANT = Aggregate(mode="seq_mean_token_sum_norm")

REINFORCE = Algorithm(
    name="reinforce",
    paper="doi:10.1007/BF00992696",
    formula="mean_i sum_t -A logp; A = r - mean over the batch",
    advantage=GroupAdvantage(baseline="batch_mean"),
    ratio=PLAIN_GRADIENT,
    aggregate=SEQUENCE_SUM,
)

REINFORCE_PP = Algorithm(
    name="reinforce_pp",
    paper="arXiv:2501.03262",
    formula="token mean of -min(rho A, clip(rho) A); A = whiten(reward-to-go - beta k1 to go)",
    deviations=("unbiased variance in the whitening; the authors' code divides by the count",),
    advantage=GroupAdvantage(baseline="none", unit="token", whiten="token"),
    trust_region=Clip(),
    aggregate=TOKEN_MEAN,
    regularize=(KL(coef=0.001, estimator="k1", where="reward"),),
)

REINFORCE_PP_BASELINE = replace(
    REINFORCE_PP,
    name="reinforce_pp_baseline",
    formula="token mean of -min(rho A, clip(rho) A) + beta k2; A = whiten(r - mean_g)",
    advantage=GroupAdvantage(whiten="token"),
    regularize=(KL(coef=0.001, estimator="k2"),),
)

REMAX = Algorithm(
    name="remax",
    paper="arXiv:2310.10505",
    formula="token mean of -A logp; A = r - r(greedy rollout) - beta k1 to go",
    deviations=("the KL penalty is summed to go; the released code takes the immediate one",),
    advantage=GroupAdvantage(baseline="greedy", unit="token"),
    ratio=PLAIN_GRADIENT,
    aggregate=TOKEN_MEAN,
    regularize=(KL(coef=0.01, estimator="k1", where="reward"),),
)

RLOO = Algorithm(
    name="rloo",
    paper="arXiv:2402.14740",
    formula="mean_i sum_t -A logp; A = r - mean of the others' r, r less beta sum_t k1",
    advantage=GroupAdvantage(baseline="leave_one_out"),
    ratio=PLAIN_GRADIENT,
    aggregate=SEQUENCE_SUM,
    regularize=(KL(coef=0.05, estimator="k1", where="reward"),),
)

PPO = Algorithm(
    name="ppo",
    paper="arXiv:1707.06347",
    formula="token mean of -min(rho A, clip(rho) A); A = whiten(GAE(1, .95)) over policy tokens",
    deviations=("token mean instead of sample mean, as all released code for language models",),
    advantage=GAE(lam=0.95),
    trust_region=Clip(),
    aggregate=TOKEN_MEAN,
    regularize=(ValueLoss(), KL(coef=0.001, estimator="k1", where="reward")),
)

OPEN_REASONER_ZERO = Algorithm(
    name="open_reasoner_zero",
    paper="arXiv:2503.24290",
    formula="token mean of -min(rho A, clip(rho) A); A = whiten(R - V)",
    deviations=("the mean of the whitening is masked; the released code averages over padding",),
    advantage=GAE(lam=1.0),
    trust_region=Clip(),
    aggregate=TOKEN_MEAN,
    regularize=(ValueLoss(updates=12),),
)

VAPO = Algorithm(
    name="vapo",
    paper="arXiv:2504.05118",
    formula=(
        "token mean of -min(rho A, clip(rho, .8, 1.28) A) + .1 NLL(correct); "
        "A = whiten(GAE(1, 1 - 1/(.05 |y|))), critic's lambda 1"
    ),
    deviations=("lambda is clamped to [0, 1]: rows of at most 20 tokens get one-step advantages",),
    advantage=GAE(lam_critic=1.0, length_alpha=0.05),
    trust_region=Clip(low=0.2, high=0.28),
    aggregate=TOKEN_MEAN,
    regularize=(PositiveNLL(coef=0.1), ValueLoss(pretrain_steps=50)),
)

GRPO = Algorithm(
    name="grpo",
    paper="arXiv:2402.03300",
    formula="mean_i mean_t of -min(rho A, clip(rho) A) + .04 k3; A = (r - mean_g) / std_g",
    advantage=GroupAdvantage(scale="group_std"),
    trust_region=Clip(),
    aggregate=SEQUENCE_MEAN,
    regularize=(KL(coef=0.04),),
)

DR_GRPO = replace(
    GRPO,
    name="dr_grpo",
    paper="arXiv:2503.20783",
    formula="mean_i sum_t -min(rho A, clip(rho) A) / L; A = r - mean_g",
    advantage=GroupAdvantage(),
    aggregate=CONSTANT,
    regularize=(),
)

DAPO = replace(
    GRPO,
    name="dapo",
    paper="arXiv:2503.14476",
    formula="token mean of -min(rho A, clip(rho, .8, 1.28) A); A = (r - mean_g) / std_g",
    deviations=(
        "token mean over the optimizer batch, as released; the formula is 'prompt_mean'",
        "at most 10 generation batches, then it trains on what there is",
    ),
    reward=Reward(shaping=(SoftOverlong(),)),
    selection=Selection(keep_groups="mixed", max_batches=10),
    trust_region=Clip(low=0.2, high=0.28),
    tokens=(DropTruncated(),),
    aggregate=TOKEN_MEAN,
    regularize=(),
)

DPO = Algorithm(
    name="dpo",
    paper="arXiv:2305.18290",
    formula="mean over pairs of -log sigmoid(beta ((s - s_ref)(chosen) - (s - s_ref)(rejected)))",
    deviations=("online: pairs are the best and the worst of each fresh group",),
    advantage=Pairs(beta=0.1),
    ratio=PLAIN_GRADIENT,
)

CLASSIC = (
    REINFORCE,
    REINFORCE_PP,
    REINFORCE_PP_BASELINE,
    REMAX,
    RLOO,
    PPO,
    OPEN_REASONER_ZERO,
    VAPO,
    GRPO,
    DR_GRPO,
    DAPO,
    DPO,
)
