"""What came after GRPO: other ratios, regions, selections, rewards and turns; no torch here."""

from dataclasses import replace

from turngym.rl.algorithm import Algorithm
from turngym.rl.axes import (
    AdaptiveK,
    Aggregate,
    Conditioned,
    Ratio,
    Reward,
    Selection,
    SoftOverlong,
    TopK,
)
from turngym.rl.estimators import AnchorState, GroupAdvantage, OutcomeAndTurn, PassAtK
from turngym.rl.presets_classic import (
    CONSTANT,
    DAPO,
    DR_GRPO,
    GRPO,
    PLAIN_GRADIENT,
    SEQUENCE_MEAN,
    SEQUENCE_SUM,
    TOKEN_MEAN,
)
from turngym.rl.terms import KL, ClipCov, Entropy, HighEntropy, KLCov
from turngym.rl.trust_region import (
    Clip,
    DivergenceMask,
    GeometricClip,
    SoftGate,
    WeightClip,
)

GROUP_STD = GroupAdvantage(scale="group_std")
WHOLE_GROUP_STD = GroupAdvantage(scale="group_std", unit="trajectory")

CISPO = Algorithm(
    name="cispo",
    paper="arXiv:2506.13585",
    formula="token mean of -sg(min(rho, 5)) A logp; A = (r - mean_g) / std_g",
    deviations=("the cap is not published; 5 is ScaleRL's",),
    reward=Reward(shaping=(SoftOverlong(),)),
    selection=Selection(keep_groups="mixed", max_batches=10),
    advantage=GROUP_STD,
    trust_region=WeightClip(max=5.0),
    aggregate=TOKEN_MEAN,
)

GSPO = Algorithm(
    name="gspo",
    paper="arXiv:2507.18071",
    formula="mean_i -min(s A, clip(s, 1 - 3e-4, 1 + 4e-4) A); s = exp(mean_t log rho)",
    deviations=("computed in the token form, which has the same value and gradient",),
    advantage=WHOLE_GROUP_STD,
    ratio=Ratio(level="sequence"),
    trust_region=Clip(low=3e-4, high=4e-4),
    aggregate=SEQUENCE_MEAN,
)

GSPO_TOKEN = replace(
    GSPO,
    name="gspo_token",
    formula="mean_i mean_t -min(s_t A_t, clip(s_t) A_t); s_t = sg(s) exp(logp - sg(logp))",
    deviations=(),
    advantage=GROUP_STD,
)

GMPO = Algorithm(
    name="gmpo",
    paper="arXiv:2507.20673",
    formula="mean_i -A exp(mean_t clip(log rho, -.4, .4)), one-sided by the sign of A",
    deviations=("rows are averaged over the whole optimizer batch, also when it is split",),
    advantage=WHOLE_GROUP_STD,
    trust_region=GeometricClip(low=0.4, high=0.4),
    aggregate=SEQUENCE_MEAN,
)

GFPO = Algorithm(
    name="gfpo",
    paper="arXiv:2508.09726",
    formula="token mean of -min(rho A, clip(rho) A); A = (r - mean) / std over the kept 8, else 0",
    selection=Selection(keep_in_group=TopK(k=8)),
    advantage=GROUP_STD,
    trust_region=Clip(dual=3.0),
    aggregate=TOKEN_MEAN,
    regularize=(KL(coef=0.001), Entropy(coef=0.001)),
)

GFPO_ADAPTIVE = replace(
    GFPO,
    name="gfpo_adaptive",
    formula="GFPO keeping 8, 8, 6 or 4 members by the quartile of the group's mean return",
    deviations=("exact quartiles of the last 4096 group means instead of a t-digest",),
    selection=Selection(keep_in_group=AdaptiveK()),
)

MAXRL = Algorithm(
    name="maxrl",
    paper="arXiv:2602.02710",
    formula="mean_i sum_t -A logp; A = (r - mean_g) / mean_g, 0 where the mean is 0",
    deviations=("no clip and no token mean, which the released code leaves on",),
    advantage=GroupAdvantage(scale="group_mean", unit="trajectory"),
    ratio=PLAIN_GRADIENT,
    aggregate=SEQUENCE_SUM,
)

NGRPO = Algorithm(
    name="ngrpo",
    paper="arXiv:2509.18851",
    formula="token mean of -min(rho A, clip(rho, .84, 1.24) A); a virtual r_max joins each group",
    deviations=("unbiased std, as released; the paper's convention is not stated",),
    selection=Selection(keep_groups="not_all_correct"),
    advantage=GroupAdvantage(scale="group_std", unit="trajectory", virtual_rewards=1),
    trust_region=Clip(low=0.16, high=0.24),
    aggregate=TOKEN_MEAN,
)

DPPO = Algorithm(
    name="dppo",
    paper="arXiv:2602.04879",
    formula="mean_i sum_t -m rho A / L; m = 0 where |p - mu| > .15 and p moves away from mu",
    deviations=("no division by the spread, as in the released scripts; the weight is uncapped",),
    advantage=GroupAdvantage(),
    ratio=Ratio(anchor="rollout"),
    trust_region=DivergenceMask(measure="tv", low=0.15, high=0.15),
    aggregate=CONSTANT,
)

DPPO_KL = replace(
    DPPO,
    name="dppo_kl",
    formula="DPPO with m = 0 where the binary KL(mu, p) > .05 and p moves away from mu",
    trust_region=DivergenceMask(measure="kl", low=0.05, high=0.05),
)

DPPO_TOPK = replace(
    DPPO,
    name="dppo_topk",
    formula="DPPO with TV > .15 over the sampler's K likeliest tokens, the sampled one, the rest",
    trust_region=DivergenceMask(measure="topk_tv", low=0.15, high=0.15),
)

SAPO = Algorithm(
    name="sapo",
    paper="arXiv:2511.20347",
    formula="mean_i mean_t -(4/tau) sigmoid(tau (rho - 1)) A; tau 1 for A > 0, else 1.05",
    advantage=GROUP_STD,
    trust_region=SoftGate(tau_pos=1.0, tau_neg=1.05),
    aggregate=SEQUENCE_MEAN,
)

SCALERL = Algorithm(
    name="scalerl",
    paper="arXiv:2510.13786",
    formula="prompt mean of token mean of -sg(min(rho, 5)) A logp; A = (r - mean_g) / std_batch",
    deviations=("forced interruptions and the FP32 head belong to sampler and model",),
    selection=Selection(keep_groups="mixed", retire_pass_rate=0.9),
    advantage=GroupAdvantage(scale="centered_batch_std"),
    ratio=Ratio(anchor="rollout"),
    trust_region=WeightClip(max=5.0),
    aggregate=Aggregate(mode="prompt_mean"),
)

GDPO = Algorithm(
    name="gdpo",
    paper="arXiv:2601.05242",
    formula="token mean of -min(rho A, clip(rho) A); A = whiten(sum_k w_k (r_k - mean_g) / std_g)",
    deviations=("the batch stage counts every trajectory once, whatever its length",),
    reward=Reward(combine="normalize_then_sum"),
    advantage=GroupAdvantage(scale="group_std", whiten="sequence", eps=1e-4),
    trust_region=Clip(),
    aggregate=TOKEN_MEAN,
)

GDPO_CONDITIONED = replace(
    GDPO,
    name="gdpo_conditioned",
    formula="GDPO with every other component counted only where the metric is reached",
    reward=Reward(combine="normalize_then_sum", shaping=(Conditioned(),)),
)

GRPO_HIGH_ENTROPY = replace(
    DAPO,
    name="grpo_high_entropy",
    paper="arXiv:2506.01939",
    formula="DAPO on the 20 % of policy tokens with the highest entropy",
    deviations=(*DAPO.deviations, "the quantile is taken over the optimizer batch"),
    tokens=(*DAPO.tokens, HighEntropy(frac=0.2)),
)

CLIP_COV = Algorithm(
    name="clip_cov",
    paper="arXiv:2505.22617",
    formula="token mean of -rho A without .02 % of tokens, drawn where 1 < cov(A, logp) < 5",
    deviations=("the base clip is [0, 2], as released",),
    selection=Selection(keep_groups="mixed", max_batches=10),
    advantage=GROUP_STD,
    trust_region=Clip(low=1.0, high=1.0),
    tokens=(ClipCov(),),
    aggregate=TOKEN_MEAN,
)

KL_COV = replace(
    CLIP_COV,
    name="kl_cov",
    formula="token mean of -rho A, plus |log rho| on the .2 % of tokens of highest cov(A, logp)",
    deviations=(),
    trust_region=None,
    tokens=(),
    regularize=(KLCov(),),
)

PASSK_GRPO = Algorithm(
    name="passk_grpo",
    paper="arXiv:2508.10751",
    formula="token mean of -min(rho A, clip(rho) A); A = closed form of pass@k in the group",
    deviations=("a pass is what selection.metric says; other components do not count",),
    advantage=PassAtK(method="chen", k=4),
    trust_region=Clip(),
    aggregate=TOKEN_MEAN,
)

PKPO = Algorithm(
    name="pkpo",
    paper="arXiv:2505.15201",
    formula="mean_i sum_t -A logp; A = mean over k-subsets with i of max - max without i",
    advantage=PassAtK(method="sloo_minus_one", k=4),
    ratio=PLAIN_GRADIENT,
    aggregate=SEQUENCE_SUM,
)

GIGPO = Algorithm(
    name="gigpo",
    paper="arXiv:2505.10978",
    formula="token mean of -min(rho A, clip(rho) A) + .01 k3; A = A_episode + A_step(same state)",
    deviations=("no division by the spread, the default of the released code",),
    advantage=AnchorState(gamma=0.95, omega=1.0),
    trust_region=Clip(),
    aggregate=TOKEN_MEAN,
    regularize=(KL(coef=0.01),),
)

MT_GRPO = Algorithm(
    name="mt_grpo",
    paper="arXiv:2505.11821",
    formula="token mean of -min(rho A, clip(rho) A); A_k = A_outcome + sum over j >= k of A_turn_j",
    deviations=("any number of turns instead of two",),
    advantage=OutcomeAndTurn(coef=1.0),
    trust_region=Clip(),
    aggregate=TOKEN_MEAN,
)

LUFFY = replace(
    DR_GRPO,
    name="luffy",
    paper="arXiv:2504.14945",
    formula="mean_i sum_t -rho A / L, demonstrations -p/(p + .1) A / L; A = r - mean_g",
    selection=Selection(demonstrations=1),
    ratio=Ratio(demo_shaping=0.1),
    trust_region=None,
    regularize=(Entropy(coef=0.001),),
)

RLEP = replace(
    GRPO,
    name="rlep",
    paper="arXiv:2507.07451",
    formula="token mean of -min(rho A, clip(rho, .8, 1.28) A); 2 successes are replayed per group",
    selection=Selection(replay=2),
    trust_region=Clip(low=0.2, high=0.28),
    aggregate=TOKEN_MEAN,
    regularize=(),
)

MODERN = (
    CISPO,
    GSPO,
    GSPO_TOKEN,
    GMPO,
    GFPO,
    GFPO_ADAPTIVE,
    MAXRL,
    NGRPO,
    DPPO,
    DPPO_KL,
    DPPO_TOPK,
    SAPO,
    SCALERL,
    GDPO,
    GDPO_CONDITIONED,
    GRPO_HIGH_ENTROPY,
    CLIP_COV,
    KL_COV,
    PASSK_GRPO,
    PKPO,
    GIGPO,
    MT_GRPO,
    LUFFY,
    RLEP,
)
