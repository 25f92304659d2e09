import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from turngym.config import merge
from turngym.errors import ConfigError
from turngym.rl.algorithm import Algorithm, RunFacts
from turngym.rl.axes import (
    AdaptiveK,
    Aggregate,
    Conditioned,
    NegativeEntropy,
    Ratio,
    Reward,
    Selection,
    SelfCertainty,
    SoftOverlong,
    TopK,
)
from turngym.rl.estimators import GAE, GroupAdvantage, Pairs, PassAtK
from turngym.rl.presets import PRESETS, preset
from turngym.rl.terms import (
    KL,
    BehaviorCorrection,
    ClipCov,
    Entropy,
    HighEntropy,
    KLCov,
    RoleWeight,
    ValueLoss,
)
from turngym.rl.trust_region import (
    Clip,
    DivergenceMask,
    GeometricClip,
    SoftGate,
    WeightClip,
    WeightMask,
)
from turngym.types import RewardSpec

GRPO = PRESETS["grpo"]
RUBRIC = {
    "correct": RewardSpec(name="correct", low=0.0, high=1.0),
    "format": RewardSpec(name="format", low=0.0, high=1.0, weight=0.5),
}
TURN = {"tool": RewardSpec(name="tool", level="turn")}


def facts(**changes: Any) -> RunFacts:
    usual: dict[str, Any] = {
        "rubric": RUBRIC,
        "group_size": 16,
        "max_tokens": 64,
        "updates": 4,
        "has_reference": True,
        "has_critic": True,
        "topk": 2,
    }
    return RunFacts(**(usual | changes))


def test_reading_the_table_needs_no_torch() -> None:
    code = "import sys, turngym.rl.describe, turngym.rl.config; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_binds_to_an_ordinary_run(name: str) -> None:
    bound = PRESETS[name].bind(facts())
    advantage = bound.algorithm.advantage
    assert getattr(advantage, "unit", "trajectory") != "auto"
    assert bound.unit in ("token", "row", "group")


COMBINATIONS: list[tuple[Algorithm, dict[str, Any], str]] = [
    (GRPO, {"ratio": Ratio(anchor="none")}, "set ratio.anchor to 'old' or 'rollout'"),
    (
        GRPO,
        {"ratio": Ratio(anchor="rollout"), "regularize": (BehaviorCorrection(),)},
        "drop the correction or set anchor='old'",
    ),
    (GRPO, {"ratio": Ratio(level="sequence"), "trust_region": SoftGate()}, "set level='token'"),
    (GRPO, {"ratio": Ratio(demo_shaping=0.1)}, "selection.demonstrations"),
    (
        GRPO,
        {"ratio": Ratio(anchor="rollout"), "selection": Selection(demonstrations=1)},
        "no sampler to anchor on",
    ),
    (GRPO, {"trust_region": GeometricClip()}, "unit='trajectory'"),
    (GRPO, {"advantage": GAE(), "trust_region": GeometricClip()}, "unit='trajectory'"),
    (GRPO, {"advantage": Pairs()}, "loss of their own"),
    (GRPO, {"advantage": GAE(), "reward": Reward(combine="normalize_then_sum")}, "GroupAdvantage"),
    (
        GRPO,
        {
            "advantage": GroupAdvantage(baseline="none"),
            "reward": Reward(combine="normalize_then_sum"),
        },
        "normalises in the group",
    ),
    (
        GRPO,
        {
            "advantage": GroupAdvantage(unit="token"),
            "reward": Reward(combine="normalize_then_sum"),
        },
        "no token unit",
    ),
    (GRPO, {"regularize": (KL(), KL(coef=0.1))}, "KL given twice"),
    (
        PRESETS["gdpo"],
        {"regularize": (KL(estimator="k1", where="reward"),)},
        "set KL.where='loss'",
    ),
    (
        GRPO,
        {"advantage": PassAtK(), "regularize": (KL(estimator="k1", where="reward"),)},
        "takes no KL in the reward",
    ),
    (GRPO, {"regularize": (ValueLoss(),)}, "never reads"),
    (GRPO, {"regularize": (KLCov(),)}, "set trust_region=None"),
    (GRPO, {"tokens": (RoleWeight(per="role"),)}, "token_mean"),
]


@pytest.mark.parametrize(("algorithm", "changes", "fix"), COMBINATIONS)
def test_axes_that_contradict_each_other_are_refused_with_the_fix(
    algorithm: Algorithm, changes: dict[str, Any], fix: str
) -> None:
    with pytest.raises(ConfigError, match=fix):
        replace(algorithm, **changes)


VALUES: list[tuple[Any, str]] = [
    (lambda: GroupAdvantage(baseline="group_maen"), "did you mean 'group_mean'"),  # type: ignore[arg-type]
    (lambda: GroupAdvantage(scale="group_mean", baseline="none"), "baseline='group_mean'"),
    (lambda: GroupAdvantage(virtual_rewards=1, baseline="leave_one_out"), "group_mean"),
    (lambda: GroupAdvantage(virtual_rewards=1, unit="turn"), "unit='trajectory'"),
    (lambda: GroupAdvantage(virtual_rewards=1, scale="batch_std"), "group_std"),
    (lambda: GroupAdvantage(baseline="batch_mean", scale="group_std"), "batch_std"),
    (lambda: GroupAdvantage(unit="token", scale="group_std"), "scale='none'"),
    (lambda: GroupAdvantage(unit="trajectory", gamma=0.9), "unit='turn'"),
    (lambda: GroupAdvantage(gamma=1.5), r"\[0, 1\]"),
    (lambda: GroupAdvantage(ddof=2), "0 or 1"),
    (lambda: GroupAdvantage(decay=1.0), r"\[0, 1\)"),
    (lambda: PassAtK(k=1), "RLOO"),
    (lambda: GAE(lam=1.1), r"\[0, 1\]"),
    (lambda: GAE(length_alpha=0.0), "positive"),
    (lambda: Pairs(beta=0.0), "positive"),
    (lambda: Pairs(margin=-1.0), "negative"),
    (lambda: Clip(low=-0.1), "negative"),
    (lambda: Clip(dual=1.1), "exceed"),
    (lambda: WeightClip(max=0.2), "not epsilons"),
    (lambda: WeightMask(low=1.5), "not epsilons"),
    (lambda: SoftGate(tau_pos=0.0), "positive"),
    (lambda: DivergenceMask(low=0.0), "positive"),
    (lambda: DivergenceMask(cap=0.5), "at least 1"),
    (lambda: GeometricClip(low=0.0), "positive"),
    (lambda: KL(coef=0.0), "drop the term"),
    (lambda: KL(estimator="k1"), "zero expected gradient"),
    (lambda: KL(where="reward"), "estimator='k1'"),
    (lambda: KL(estimator="k1", where="reward", ratio_corrected=True), "where='loss'"),
    (lambda: KL(reset_steps=0), "at least 1"),
    (lambda: KL(reset_mix=0.0), "reset_mix"),
    (lambda: BehaviorCorrection(low=0.5), "mask"),
    (lambda: BehaviorCorrection(high=0.5), "low <= 1 <= high"),
    (lambda: ClipCov(low=2.0, high=1.0), "low < high"),
    (lambda: ClipCov(frac=0.0), "frac"),
    (lambda: KLCov(frac=2.0), "frac"),
    (lambda: HighEntropy(frac=0.0), "frac"),
    (lambda: RoleWeight(action=-1.0), "negative"),
    (lambda: Ratio(level="turn", anchor="none"), "anchor='old'"),
    (lambda: Ratio(demo_shaping=0.0), "positive"),
    (lambda: Aggregate(length=4), "seq_mean_token_sum_norm"),
    (lambda: Aggregate(mode="seq_mean_token_sum_norm", length=0), "at least 1"),
    (lambda: Selection(max_batches=0), "at least 1"),
    (lambda: Selection(max_batches=3), "keep_groups"),
    (lambda: Selection(retire_pass_rate=0.0), "retire_pass_rate"),
    (lambda: Selection(replay=-1), "negative"),
    (lambda: TopK(k=1), "at least 2"),
    (lambda: AdaptiveK(ks=(8, 8, 6, 1)), "at least 2"),
    (lambda: SoftOverlong(max_tokens=4, cache_tokens=5), "max_tokens > cache_tokens"),
    (lambda: Reward(weights={"r": float("nan")}), "finite"),
]


@pytest.mark.parametrize(("make", "rule"), VALUES)
def test_impossible_settings_are_refused_when_made(make: Any, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        make()


TWO = {name: replace(spec, name=name) for name, spec in zip("ab", RUBRIC.values(), strict=True)}
NEGATIVE = {"correct": RewardSpec(name="correct", low=-1.0, high=1.0)}
OPEN = {"correct": RewardSpec(name="correct")}
RUNS: list[tuple[str, dict[str, Any], str]] = [
    ("grpo", {"group_size": 1}, "reinforce_pp"),
    ("grpo", {"has_reference": False}, "reference"),
    ("dpo", {"has_reference": False}, "reference"),
    ("ppo", {"has_critic": False}, "critic-free"),
    ("grpo_high_entropy", {"has_entropy": False}, "entropy"),
    ("scalerl", {"has_task_ids": False}, "retire_pass_rate=None"),
    ("dppo_topk", {"topk": 0}, "topk >= 1"),
    ("dr_grpo", {"max_tokens": None}, "aggregate.length"),
    ("dapo", {"max_tokens": None}, "max_tokens"),
    ("dapo", {"rubric": TWO}, "selection.metric"),
    ("vapo", {"rubric": TWO}, "selection.metric"),
    ("gdpo_conditioned", {"rubric": TWO}, "selection.metric"),
    ("maxrl", {"rubric": NEGATIVE}, "can be negative"),
    ("ngrpo", {"rubric": OPEN}, "max_return"),
    ("ngrpo", {"rubric": RUBRIC | TURN}, "max_return"),
    ("gfpo", {"group_size": 8}, "drops none"),
    ("gfpo_adaptive", {"group_size": 8}, "drops none"),
    ("pkpo", {"group_size": 3}, "pass@4"),
]


@pytest.mark.parametrize(("name", "changes", "fix"), RUNS)
def test_runs_that_cannot_feed_an_algorithm_are_refused_with_the_fix(
    name: str, changes: dict[str, Any], fix: str
) -> None:
    with pytest.raises(ConfigError, match=fix):
        PRESETS[name].bind(facts(**changes))


def test_weights_of_unknown_rewards_are_refused() -> None:
    with pytest.raises(ConfigError, match="'correkt'"):
        replace(GRPO, reward=Reward(weights={"correkt": 1.0})).bind(facts())


def test_conditions_on_unknown_rewards_are_refused() -> None:
    reward = Reward(shaping=(Conditioned(on="style"),))
    with pytest.raises(ConfigError, match="style"):
        replace(GRPO, reward=reward).bind(facts())


def test_token_efficiency_refuses_rewards_that_can_be_negative() -> None:
    selection = Selection(keep_in_group=TopK(k=4, metric="token_efficiency"))
    with pytest.raises(ConfigError, match="shift"):
        replace(GRPO, selection=selection).bind(facts(rubric=NEGATIVE))


def test_demonstrations_and_replays_count_as_members() -> None:
    assert PRESETS["luffy"].bind(facts(group_size=1)).run.group_size == 1


def test_turns_are_the_unit_where_the_environment_rewards_them() -> None:
    def unit(name: str, **changes: Any) -> str:
        advantage = PRESETS[name].bind(facts(**changes)).algorithm.advantage
        assert isinstance(advantage, GroupAdvantage)
        return advantage.unit

    assert unit("grpo") == "trajectory"
    assert unit("grpo", rubric=RUBRIC | TURN) == "turn"
    watched = {"tool": replace(TURN["tool"], weight=0.0)}
    assert unit("grpo", rubric=RUBRIC | watched) == "trajectory"
    assert unit("gspo", rubric=RUBRIC | TURN) == "trajectory"
    assert unit("gdpo", rubric=RUBRIC | TURN) == "turn"


def test_binding_fills_in_limits_and_the_largest_return() -> None:
    assert PRESETS["dr_grpo"].bind(facts()).algorithm.aggregate.length == 64
    shaping = PRESETS["dapo"].bind(facts()).algorithm.reward.shaping
    assert shaping == (SoftOverlong(max_tokens=64, cache_tokens=12),)
    advantage = PRESETS["ngrpo"].bind(facts()).algorithm.advantage
    assert isinstance(advantage, GroupAdvantage)
    assert advantage.max_return == 1.5


def test_forward_passes_are_asked_for_only_where_needed() -> None:
    def needs(name: str, **changes: Any) -> set[str]:
        bound = PRESETS[name].bind(facts(**changes))
        flags = ["old_logp", "ref", "values", "prepass", "entropy", "greedy", "anchors", "topk"]
        return {flag for flag in flags if getattr(bound, f"needs_{flag}")}

    assert needs("dr_grpo") == {"old_logp"}
    assert needs("dr_grpo", updates=1) == set()
    assert needs("dppo") == set()
    assert needs("scalerl") == set()
    assert needs("reinforce") == set()
    assert needs("grpo") == {"old_logp", "ref"}
    assert needs("rloo", updates=1) == {"old_logp", "ref"}
    assert needs("ppo") == {"old_logp", "ref", "values"}
    assert needs("clip_cov", updates=1) == {"prepass"}
    assert needs("kl_cov", updates=1) == {"prepass"}
    assert needs("gfpo", updates=1) == {"ref", "entropy"}
    assert needs("remax") == {"old_logp", "ref", "greedy"}
    assert needs("gigpo") == {"old_logp", "ref", "anchors"}
    assert needs("dppo_topk") == {"topk"}
    assert needs("grpo_high_entropy", updates=1) == {"prepass"}


def test_an_unknown_preset_is_answered_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'gspo'"):
        preset("gpso")


def test_recipes_change_fields_kinds_and_entries() -> None:
    changed = merge(
        GRPO,
        {
            "trust_region": {"high": 1},
            "aggregate": {"mode": "token_mean"},
            "regularize": [{"kind": "Entropy", "coef": 0.01}],
            "reward": {"weights": {"format": 0.1}},
        },
    )
    assert changed.trust_region == Clip(low=0.2, high=1.0)
    assert changed.aggregate == Aggregate(mode="token_mean")
    assert changed.regularize == (Entropy(coef=0.01),)
    assert changed.reward.weights == {"format": 0.1}
    assert merge(GRPO, {"trust_region": {"kind": "SoftGate"}}).trust_region == SoftGate()
    kept = {"selection": {"keep_in_group": {"ks": [4, 4, 3, 2]}}}
    adaptive = merge(PRESETS["gfpo_adaptive"], kept)
    assert adaptive.selection.keep_in_group == AdaptiveK(ks=(4, 4, 3, 2))


def test_what_rewards_read_is_asked_for() -> None:
    def bound(*shaping: Any) -> Any:
        return replace(GRPO, reward=Reward(shaping=shaping)).bind(facts())

    assert not bound().needs_certainty
    assert bound(SelfCertainty()).needs_certainty
    assert not bound().needs_batch_entropy
    assert bound(NegativeEntropy()).needs_batch_entropy
    assert PRESETS["grpo_high_entropy"].bind(facts()).needs_batch_entropy


def test_weights_of_the_run_override_the_rubric() -> None:
    bound = merge(GRPO, {"reward": {"weights": {"format": 0.1}}}).bind(facts())
    assert bound.weights == {"correct": 1.0, "format": 0.1}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"trust_region": {"hihg": 0.3}}, "did you mean 'high'"),
    ({"agregate": {"mode": "token_mean"}}, "did you mean 'aggregate'"),
    ({"trust_region": {"kind": "Clop"}}, "did you mean 'Clip'"),
    ({"regularize": [{"kind": "Entropi", "coef": 0.1}]}, "did you mean 'Entropy'"),
    ({"trust_region": {"high": "wide"}}, "valid number"),
    ({"regularize": [{"kind": "KL", "ratio_corrected": "maybe"}]}, "valid boolean"),
    ({"selection": {"metric": {"name": "correct"}}}, "valid string"),
    (
        {
            "regularize": [{"kind": "BehaviorCorrection", "mode": "mask"}],
            "ratio": {"anchor": "rollout"},
        },
        "anchor='old'",
    ),
]


@pytest.mark.parametrize(("settings", "rule"), WRONG)
def test_wrong_settings_name_what_would_be_right(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        merge(GRPO, settings)
