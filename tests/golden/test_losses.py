import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from turngym.rl.algorithm import Algorithm
from turngym.rl.axes import Aggregate, Ratio, Reward, Selection, TopK
from turngym.rl.batch import Batch
from turngym.rl.estimators import GAE, GroupAdvantage
from turngym.rl.objectives import objective
from turngym.rl.presets import PRESETS
from turngym.rl.terms import (
    KL,
    BehaviorCorrection,
    ClipCov,
    DropTruncated,
    HighEntropy,
    KLCov,
    OffPolicySequenceMask,
    PositiveNLL,
)
from turngym.rl.trust_region import (
    Clip,
    DivergenceMask,
    GeometricClip,
    SoftGate,
    WeightClip,
    WeightMask,
)

# Keys name a setting, so that numbers in a key are parameters and any file of this form is read.
NUMBER = r"([\d.]+)"
TOKEN_MEAN = Aggregate(mode="token_mean")
NO_RULES: dict[str, Any] = {"tokens": ()}
NO_TERMS: dict[str, Any] = {"regularize": ()}

Setting = tuple[Algorithm, str]
Maker = Callable[[re.Match[str]], Setting]
SETTINGS: list[tuple[str, Maker]] = []


def setting(pattern: str) -> Callable[[Maker], Maker]:
    def keep(maker: Maker) -> Maker:
        SETTINGS.append((pattern.replace("#", NUMBER), maker))
        return maker

    return keep


def preset(name: str, **changes: Any) -> Algorithm:
    axes: dict[str, Any] = {"reward": Reward(), "selection": Selection()}
    return replace(PRESETS[name], **(axes | changes))


def dapo(**changes: Any) -> Algorithm:
    return preset("dapo", **(NO_RULES | changes))


def grpo(**changes: Any) -> Algorithm:
    return preset("grpo", **(NO_TERMS | changes))


@setting("reinforce_seq_sum_mean")
def _(m: re.Match[str]) -> Setting:
    return preset("reinforce", advantage=GroupAdvantage(baseline="none")), "r_real"


@setting("rloo_seq_sum_mean")
def _(m: re.Match[str]) -> Setting:
    return preset("rloo", regularize=()), "r_real"


@setting("remax_token_mean")
def _(m: re.Match[str]) -> Setting:
    return preset("remax", regularize=()), "r_real"


@setting("maxrl_seq_sum_mean")
def _(m: re.Match[str]) -> Setting:
    return preset("maxrl"), "r_bin"


@setting("ppo_gae_whitened_token_mean")
def _(m: re.Match[str]) -> Setting:
    return preset("ppo", regularize=()), "r_real"


@setting("ppo_dual_clip_c#_token_mean")
def _(m: re.Match[str]) -> Setting:
    return grpo(trust_region=Clip(dual=float(m[1])), aggregate=TOKEN_MEAN), "r_real"


@setting("ppo_two_sided_delta#_token_mean")
def _(m: re.Match[str]) -> Setting:
    return grpo(trust_region=Clip(dual=float(m[1])), aggregate=TOKEN_MEAN), "r_real"


@setting("grpo_seqmean")
def _(m: re.Match[str]) -> Setting:
    return grpo(), "r_real"


@setting("grpo_seqmean_k3_beta#")
def _(m: re.Match[str]) -> Setting:
    return grpo(regularize=(KL(coef=float(m[1])),)), "r_real"


@setting("grpo_seqmean_k3_is_corrected_beta#")
def _(m: re.Match[str]) -> Setting:
    return grpo(regularize=(KL(coef=float(m[1]), ratio_corrected=True),)), "r_real"


@setting("dr_grpo")
def _(m: re.Match[str]) -> Setting:
    return preset("dr_grpo"), "r_real"


@setting("dapo")
def _(m: re.Match[str]) -> Setting:
    return dapo(), "r_real"


@setting("dapo_overlong_filtered")
def _(m: re.Match[str]) -> Setting:
    return dapo(tokens=(DropTruncated(),)), "r_real"


@setting("dapo_tis_(token|sequence)_cap#")
def _(m: re.Match[str]) -> Setting:
    tis = BehaviorCorrection(level=m[1], mode="truncate", high=float(m[2]))  # type: ignore[arg-type]
    return dapo(regularize=(tis,)), "r_real"


@setting("dapo_mis_token_#_#")
def _(m: re.Match[str]) -> Setting:
    mis = BehaviorCorrection(mode="mask", low=float(m[1]), high=float(m[2]))
    return dapo(regularize=(mis,)), "r_real"


@setting("dapo_mis_sequence_cap#")
def _(m: re.Match[str]) -> Setting:
    mis = BehaviorCorrection(level="sequence", mode="mask", high=float(m[1]))
    return dapo(regularize=(mis,)), "r_real"


@setting("ngrpo")
def _(m: re.Match[str]) -> Setting:
    return preset("ngrpo"), "r_bin"


@setting("gfpo_shortest_k(\\d+)_denominator_(all|kept)")
def _(m: re.Match[str]) -> Setting:
    keep = TopK(k=int(m[1]), denominator=m[2])  # type: ignore[arg-type]
    selection = Selection(keep_in_group=keep)
    return preset("gfpo", selection=selection, regularize=(), trust_region=Clip()), "r_real"


@setting("gdpo_token_mean")
def _(m: re.Match[str]) -> Setting:
    return preset("gdpo", reward=PRESETS["gdpo"].reward), "r_multi"


@setting("cispo_wmax#")
def _(m: re.Match[str]) -> Setting:
    return preset("cispo", trust_region=WeightClip(max=float(m[1]))), "r_real"


@setting("cispo_wmax#_wmin#")
def _(m: re.Match[str]) -> Setting:
    region = WeightClip(max=float(m[1]), min=float(m[2]))
    return preset("cispo", trust_region=region), "r_real"


@setting("scalerl_wmax#_rollout_anchor_prompt_mean")
def _(m: re.Match[str]) -> Setting:
    return preset("scalerl", trust_region=WeightClip(max=float(m[1]))), "r_bin"


@setting("gspo(_token|_turn_level)?_lo#_hi#")
def _(m: re.Match[str]) -> Setting:
    region = Clip(low=float(m[2]), high=float(m[3]))
    name = "gspo" if m[1] is None else "gspo_token"
    level = Ratio(level="turn" if m[1] == "_turn_level" else "sequence")
    return preset(name, trust_region=region, ratio=level), "r_real"


@setting("gmpo_log_clip#")
def _(m: re.Match[str]) -> Setting:
    region = GeometricClip(low=float(m[1]), high=float(m[1]))
    return preset("gmpo", trust_region=region), "r_real"


@setting("sapo_#_#")
def _(m: re.Match[str]) -> Setting:
    region = SoftGate(tau_pos=float(m[1]), tau_neg=float(m[2]))
    return preset("sapo", trust_region=region), "r_real"


@setting("dppo_(tv|kl)_#_(literal|truncated#)")
def _(m: re.Match[str]) -> Setting:
    bound, cap = float(m[2]), m[4]
    region = DivergenceMask(measure=m[1], low=bound, high=bound, cap=float(cap) if cap else None)  # type: ignore[arg-type]
    return preset("dppo", trust_region=region, aggregate=TOKEN_MEAN), "r_real"


@setting("icepop_#_#_rollout_anchor")
def _(m: re.Match[str]) -> Setting:
    region = WeightMask(low=float(m[1]), high=float(m[2]))
    return (
        grpo(trust_region=region, ratio=Ratio(anchor="rollout"), aggregate=TOKEN_MEAN),
        "r_real",
    )


@setting("high_entropy_(\\d+)pct")
def _(m: re.Match[str]) -> Setting:
    return dapo(tokens=(HighEntropy(frac=int(m[1]) / 100),)), "r_real"


@setting("clip_cov_all_candidates_band#_#")
def _(m: re.Match[str]) -> Setting:
    rule = ClipCov(low=float(m[1]), high=float(m[2]), frac=None)
    return preset("clip_cov", tokens=(rule,), trust_region=Clip()), "r_real"


@setting("kl_cov_k#_beta#")
def _(m: re.Match[str]) -> Setting:
    return preset("kl_cov", regularize=(KLCov(frac=float(m[1]), coef=float(m[2])),)), "r_real"


@setting("off_policy_seq_mask_delta#")
def _(m: re.Match[str]) -> Setting:
    return grpo(tokens=(OffPolicySequenceMask(delta=float(m[1])),)), "r_real"


@setting("vapo_total_mu#")
def _(m: re.Match[str]) -> Setting:
    nll = PositiveNLL(coef=float(m[1]))
    return preset("vapo", regularize=(nll,)), "r_real"


def find(key: str) -> Setting | None:
    for pattern, maker in SETTINGS:
        match = re.fullmatch(pattern, key)
        if match:
            return maker(match)
    return None


def prepare(golden: Any, key: str) -> tuple[Algorithm, Batch]:
    """The algorithm and the batch of a key; `correct` says right or wrong and pays nothing."""
    found = find(key)
    assert found is not None
    algorithm, rewards = found
    if algorithm.name == "vapo":
        # The file says which alpha in the key of its advantages.
        (alpha,) = [key for key in golden["advantages"] if key.startswith("vapo_alpha")]
        gae = GAE(lam_critic=1.0, length_alpha=float(alpha.removeprefix("vapo_alpha")))
        algorithm = replace(algorithm, advantage=gae)
    weights = {"correct": 0.0}
    components = {"correct": golden.column("r_bin")}
    if rewards == "r_multi":
        multi = golden.column("r_multi")
        names = [f"r{k}" for k in range(multi.shape[1])]
        components |= dict(zip(names, multi.unbind(-1), strict=True))
        weights |= dict(zip(names, golden["fixture"]["w_multi"], strict=True))
    else:
        components["r"] = golden.column(rewards)
    nothing = torch.zeros_like(components["correct"])
    batch = golden.batch(components, greedy={"correct": nothing, "r": golden.column("r_greedy")})
    return replace(algorithm, reward=replace(algorithm.reward, weights=weights)), batch


SPECIAL = (
    r"dpo_beta[\d.]+_best_worst",
    r"dppo_keep_mask_(tv|kl)_[\d.]+",
    r"dppo_topk_k\d+_sampled\d+",
    r"kl_loss_\w+_token_mean",
    r"luffy_gamma[\d.]+_const_norm",
    r"value_loss_clip[\d.]+_token_mean",
)


def test_every_loss_is_covered(golden: Any) -> None:
    uncovered = [
        key
        for key in golden["losses"]
        if find(key) is None and not any(re.fullmatch(pattern, key) for pattern in SPECIAL)
    ]
    assert not uncovered


def test_loss_and_gradient(golden: Any, loss_key: str, close: Any) -> None:
    if find(loss_key) is None:
        assert any(re.fullmatch(pattern, loss_key) for pattern in SPECIAL)
        return
    algorithm, batch = prepare(golden, loss_key)
    wanted = golden["losses"][loss_key]
    loss, gradient = golden.loss(algorithm, batch)
    close(loss, wanted["loss"])
    close(gradient, wanted["grad"])


def test_loss_of_each_token(golden: Any, loss_key: str, close: Any) -> None:
    if find(loss_key) is None or "per_token" not in golden["losses"][loss_key]:
        return
    algorithm, batch = prepare(golden, loss_key)
    bound, planned = golden.bind(algorithm, batch), golden.plan(algorithm, batch)
    logp = golden.column("logp_new")[golden.mask]
    wanted = golden.column_of(golden["losses"][loss_key]["per_token"])[golden.mask]
    parts = batch.row if bound.unit == "row" else torch.arange(batch.num_tokens)
    for part in torch.unique(parts[planned.weight != 0]).tolist():
        index = (parts == part).nonzero().squeeze(-1)
        loss, _ = objective(bound, batch, planned, index, logp[index])
        close(loss, (planned.weight[index] * wanted[index]).sum())
