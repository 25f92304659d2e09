"""The axes of a policy-optimization algorithm as small frozen values; no torch here.

Axes 1, 2 and 4 to 8 of

    loss = sum_t weight[t] * mask[t] * correction[t] * surrogate[t] + regularizers

live in this module; axis 3, the advantage, has its own (`turngym.rl.estimators`). The arithmetic
behind a value is registered for its type in the module that owns the axis, so that a new kind is
one dataclass and one registered function.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from turngym.errors import ConfigError

Combine = Literal["sum", "normalize_then_sum"]
Missing = Literal["component", "row"]
KeepGroups = Literal["all", "mixed", "not_all_correct", "nonzero_spread"]
RatioLevel = Literal["token", "turn", "sequence"]
Anchor = Literal["old", "rollout", "none"]
AggregateMode = Literal[
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
    "prompt_mean",
    "token_sum",
]
Divergence = Literal["tv", "kl", "topk_tv", "topk_kl"]
KeepMetric = Literal["shortest", "token_efficiency", "first"]
KLEstimator = Literal["k1", "k2", "k3", "k3_plus", "abs"]
CorrectionLevel = Literal["token", "sequence", "geometric"]
CorrectionMode = Literal["truncate", "mask"]


def check_choice(owner: str, name: str, value: object, choices: object) -> None:
    """Raise ConfigError with a suggestion unless `value` is one of a Literal's choices."""
    allowed = get_args(choices)
    if value not in allowed:
        near = difflib.get_close_matches(str(value), [str(choice) for choice in allowed], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{owner}.{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}{hint}"
        )


def check_that(holds: bool, message: str) -> None:
    """Raise ConfigError with `message` unless `holds`."""
    if not holds:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True)
class Shaping:
    """Base of what changes reward components before any advantage is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftOverlong(Shaping):
    """Soft overlong punishment: 0, then linear to -1 (DAPO, arXiv:2503.14476, equation 13)."""

    max_tokens: int | None = None
    """Policy tokens at which the penalty reaches -1; None = the run's limit."""

    cache_tokens: int | None = None
    """Width of the linear part; None = a fifth of `max_tokens`, as in the paper."""

    weight: float = 1.0

    def __post_init__(self) -> None:
        check_that(
            self.max_tokens is None or self.max_tokens > (self.cache_tokens or 0) >= 0,
            f"SoftOverlong needs max_tokens > cache_tokens >= 0, got {self.max_tokens} and "
            f"{self.cache_tokens}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate(Shaping):
    """Turn rewards count only above a threshold of the outcome (G-RA, arXiv:2508.10548)."""

    threshold: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditioned(Shaping):
    """Components count only where another one reaches a threshold (GDPO, conditioned rewards)."""

    on: str | None = None
    """Component that opens the gate; None = the metric of the selection axis."""

    components: tuple[str, ...] = ()
    """Components behind the gate; empty = every other one."""

    threshold: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MajorityVote(Shaping):
    """Reward 1 for the group's most common answer, without labels (TTRL, arXiv:2504.16084)."""

    weight: float = 1.0
    replace: bool = True
    """Forget the environment's own components."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCertainty(Shaping):
    """Mean KL(uniform || policy) over policy tokens as the reward (Intuitor, arXiv:2505.19590)."""

    weight: float = 1.0
    replace: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class NegativeEntropy(Shaping):
    """Minus the mean entropy over policy tokens as the reward (RENT, arXiv:2505.22660)."""

    weight: float = 1.0
    replace: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """Axis 1: how named components become returns."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """Overrides the rubric's weights by name."""

    combine: Combine = "sum"
    """`sum`: baseline on the weighted sum; `normalize_then_sum`: each component is centred and
    scaled in its group first (GDPO, arXiv:2601.05242)."""

    missing: Missing = "component"
    """What an abstaining component does: leave its own statistics only, or exclude the row."""

    shaping: tuple[Shaping, ...] = ()

    def __post_init__(self) -> None:
        check_choice("Reward", "combine", self.combine, Combine)
        check_choice("Reward", "missing", self.missing, Missing)
        for name, weight in self.weights.items():
            check_that(
                math.isfinite(weight), f"weight of reward {name!r} must be finite, got {weight}"
            )


@dataclass(frozen=True, slots=True)
class KeepInGroup:
    """Base of what drops members of a group after sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK(KeepInGroup):
    """Keep the best k members of a group (GFPO, arXiv:2508.09726)."""

    k: int = 8
    metric: KeepMetric = "shortest"
    """`shortest`: fewest policy tokens; `token_efficiency`: largest return per token; `first`:
    the order of sampling, as when many members vote and some train (TTRL)."""

    denominator: Literal["all", "kept"] = "all"
    """Rows that count in the aggregation: the paper's equation 2 keeps rejected rows in it."""

    def __post_init__(self) -> None:
        check_choice("TopK", "metric", self.metric, KeepMetric)
        check_choice("TopK", "denominator", self.denominator, Literal["all", "kept"])
        check_that(self.k >= 2, f"TopK.k must be at least 2 for a group baseline, got {self.k}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveK(KeepInGroup):
    """GFPO with k by difficulty: fewer are kept of what the policy solves (arXiv:2508.09726)."""

    ks: tuple[int, int, int, int] = (8, 8, 6, 4)
    """k below the first, second and third quartile of the group means seen so far, and above."""

    warmup: int = 8
    """Group means to have seen before quartiles mean anything; until then `ks[0]`."""

    metric: KeepMetric = "shortest"
    denominator: Literal["all", "kept"] = "all"

    def __post_init__(self) -> None:
        check_choice("AdaptiveK", "metric", self.metric, KeepMetric)
        check_choice("AdaptiveK", "denominator", self.denominator, Literal["all", "kept"])
        check_that(min(self.ks) >= 2, f"AdaptiveK.ks must be at least 2, got {self.ks}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Axis 2: which trajectories train."""

    metric: str | None = None
    """Outcome component that filters and tells right from wrong; None = found in the rubric."""

    correct_at: float = 1.0
    """`metric` from which a trajectory counts as correct."""

    keep_groups: KeepGroups = "all"
    max_batches: int = 1
    """Generation batches drawn until the batch is full of kept groups; at the cap the learner
    trains on what there is. 1 = dropped groups are not replaced."""

    keep_in_group: KeepInGroup | None = None
    retire_pass_rate: float | None = None
    """Tasks whose pass rate reached it are not sampled again (ScaleRL, arXiv:2510.13786)."""

    replay: int = 0
    """Stored verified successes that join each group (RLEP, arXiv:2507.07451)."""

    demonstrations: int = 0
    """Expert trajectories that join each group (LUFFY, arXiv:2504.14945)."""

    def __post_init__(self) -> None:
        check_choice("Selection", "keep_groups", self.keep_groups, KeepGroups)
        check_that(
            self.max_batches >= 1,
            f"Selection.max_batches must be at least 1, got {self.max_batches}",
        )
        check_that(
            self.max_batches == 1 or self.keep_groups != "all",
            "Selection.max_batches refills dropped groups; set keep_groups to what drops them",
        )
        check_that(
            self.retire_pass_rate is None or 0 < self.retire_pass_rate <= 1,
            f"Selection.retire_pass_rate must lie in (0, 1], got {self.retire_pass_rate}",
        )
        check_that(
            min(self.replay, self.demonstrations) >= 0,
            "Selection.replay and demonstrations must not be negative, got "
            f"{self.replay} and {self.demonstrations}",
        )

    @property
    def needs_metric(self) -> bool:
        """Something reads `metric`."""
        return self.keep_groups != "all" or self.retire_pass_rate is not None or self.replay > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Axis 4: what the new policy is compared with."""

    level: RatioLevel = "token"
    """`sequence` and `turn` are geometric means over the policy tokens of a row or of a turn,
    with the gradient of each token passed straight through (GSPO-token, arXiv:2507.18071)."""

    anchor: Anchor = "old"
    """`old`: the trainer with the weights that sampled; `rollout`: the sampler; `none`: no ratio,
    the plain policy gradient."""

    demo_shaping: float | None = None
    """gamma of p / (p + gamma), the surrogate of demonstrations, whose behaviour probability is
    taken as 1 (LUFFY, arXiv:2504.14945); None = demonstrations are treated like any row."""

    def __post_init__(self) -> None:
        check_choice("Ratio", "level", self.level, RatioLevel)
        check_choice("Ratio", "anchor", self.anchor, Anchor)
        check_that(
            self.anchor != "none" or self.level == "token",
            f"Ratio.level {self.level!r} needs a ratio; set anchor='old' or 'rollout'",
        )
        check_that(
            self.demo_shaping is None or self.demo_shaping > 0,
            f"Ratio.demo_shaping must be positive, got {self.demo_shaping}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """Axis 7: the only normaliser of the loss, a weight per token over the optimizer batch."""

    mode: AggregateMode = "token_mean"
    length: int | None = None
    """The constant L of `seq_mean_token_sum_norm`; None = the run's limit of policy tokens."""

    count: Literal["active", "all"] = "active"
    """Rows in the denominator of `seq_*`: those with a trainable token, or every row."""

    def __post_init__(self) -> None:
        check_choice("Aggregate", "mode", self.mode, AggregateMode)
        check_choice("Aggregate", "count", self.count, Literal["active", "all"])
        check_that(
            self.length is None or self.length >= 1,
            f"Aggregate.length must be at least 1, got {self.length}",
        )
        check_that(
            self.length is None or self.mode == "seq_mean_token_sum_norm",
            f"Aggregate.length is read by 'seq_mean_token_sum_norm' only, not by {self.mode!r}",
        )
