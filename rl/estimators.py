"""Axis 3: advantage estimators as small frozen values; no torch here.

The arithmetic is registered for each type with `turngym.rl.credit.estimate`.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from turngym.rl.axes import check_choice, check_that

Baseline = Literal["none", "batch_mean", "ema", "greedy", "group_mean", "leave_one_out"]
Scale = Literal["none", "group_std", "group_mean", "batch_std", "centered_batch_std"]
Whiten = Literal["none", "sequence", "token"]
Unit = Literal["auto", "trajectory", "turn", "token"]


@dataclass(frozen=True, slots=True)
class Estimator:
    """Base of all advantage estimators."""

    per_token: ClassVar[bool] = False
    """Advantages may differ between tokens of one turn."""

    needs_values: ClassVar[bool] = False
    """A critic's values must be in the batch."""

    needs_groups: ClassVar[bool] = True
    """Group members are compared, so that a task needs at least two trajectories."""

    @property
    def compares_groups(self) -> bool:
        """A trajectory alone in its group has nothing to be compared with."""
        return self.needs_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantage(Estimator):
    """Return minus baseline, divided by a scale, whitened: most critic-free methods."""

    baseline: Baseline = "group_mean"
    """With turns as the unit `group_mean` is the leave-one-out baseline times (G-1)/G, so that
    one turn gives back the trajectory form and a turn few members reach keeps its weight."""

    scale: Scale = "none"
    """`group_std`, `batch_std`: spread of returns; `centered_batch_std`: spread of centred
    returns over the batch; `group_mean`: MaxRL's division by the success rate."""

    whiten: Whiten = "none"
    """Over the batch, one value a trajectory, or over all policy tokens."""

    unit: Unit = "auto"
    """What shares one advantage. `trajectory`: the sum of all rewards; `turn`: reward-to-go over
    turns; `token`: reward-to-go over policy tokens; `auto`: `turn` where the environment has turn
    rewards, else `trajectory`."""

    gamma: float = 1.0
    """Discount per turn or, for `token`, per policy token."""

    virtual_rewards: int = 0
    """Copies of the largest possible return that join each group's statistics (NGRPO)."""

    max_return: float | None = None
    """That largest return; None = found from the rubric."""

    pool: Literal["group", "bucket"] = "group"
    """Whose statistics: the task's group, or the trajectory's `bucket` (task kind and role in
    Absolute Zero)."""

    decay: float = 0.9
    """Of the `ema` baseline, read before it is updated."""

    ddof: int = 1
    eps: float = 1e-6
    """Added to a standard deviation before dividing."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("baseline", Baseline),
            ("scale", Scale),
            ("whiten", Whiten),
            ("unit", Unit),
            ("pool", Literal["group", "bucket"]),
        ):
            check_choice("GroupAdvantage", name, getattr(self, name), choices)
        check_that(
            self.scale != "group_mean" or self.baseline == "group_mean",
            f"scale='group_mean' divides what baseline='group_mean' leaves, got {self.baseline!r}",
        )
        whole = self.virtual_rewards > 0 or self.scale == "group_mean"
        check_that(
            not whole or self.unit in ("auto", "trajectory"),
            "virtual rewards and scale='group_mean' are defined on whole returns; "
            f"set unit='trajectory', got {self.unit!r}",
        )
        check_that(
            self.virtual_rewards == 0
            or (self.virtual_rewards > 0 and self.baseline == "group_mean"),
            "virtual_rewards must not be negative and need baseline='group_mean', got "
            f"{self.virtual_rewards} and {self.baseline!r}",
        )
        check_that(
            self.virtual_rewards == 0 or self.scale in ("none", "group_std"),
            "virtual rewards join the group's statistics; set scale='group_std' or 'none', got "
            f"{self.scale!r}",
        )
        check_that(
            self.unit != "token" or (self.scale == "none" and self.whiten != "sequence"),
            "unit='token' is whitened over tokens, if at all; set scale='none' and whiten='token'",
        )
        check_that(
            self.baseline != "batch_mean" or self.scale != "group_std",
            "baseline='batch_mean' compares the batch; set scale='batch_std' or 'none'",
        )
        check_that(0 <= self.gamma <= 1, f"gamma must lie in [0, 1], got {self.gamma}")
        check_that(
            self.unit != "trajectory" or self.gamma == 1,
            f"gamma={self.gamma} discounts nothing inside one trajectory; set unit='turn'",
        )
        check_that(self.ddof in (0, 1), f"ddof must be 0 or 1, got {self.ddof}")
        check_that(0 <= self.decay < 1, f"decay must lie in [0, 1), got {self.decay}")

    @property
    def compares_members(self) -> bool:
        """The baseline or the scale comes from the group."""
        return self.baseline in ("group_mean", "leave_one_out") or self.scale == "group_std"

    @property
    def compares_groups(self) -> bool:
        """The baseline or the scale comes from the task's group."""
        return self.compares_members and self.pool == "group"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassAtK(Estimator):
    """Advantages for pass@k: Chen et al. (arXiv:2508.10751) or PKPO (arXiv:2505.15201)."""

    method: Literal["chen", "sloo", "sloo_minus_one"] = "chen"
    """`chen` reads the metric, right or wrong, where the run has one; PKPO reads the return."""

    k: int = 2
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_choice("PassAtK", "method", self.method, Literal["chen", "sloo", "sloo_minus_one"])
        check_that(self.k >= 2, f"PassAtK.k must be at least 2, got {self.k}; use RLOO for k=1")


@dataclass(frozen=True, slots=True, kw_only=True)
class GAE(Estimator):
    """Generalised advantage estimation over policy tokens (arXiv:1506.02438)."""

    needs_values: ClassVar[bool] = True
    needs_groups: ClassVar[bool] = False
    per_token: ClassVar[bool] = True

    gamma: float = 1.0
    lam: float = 0.95
    lam_critic: float | None = None
    """lambda of the critic's targets; None = `lam` (VAPO decouples them, arXiv:2504.05118)."""

    length_alpha: float | None = None
    """VAPO's length-adaptive lambda 1 - 1/(alpha * |y|), clamped to [0, 1]; replaces `lam`."""

    whiten: Literal["none", "token"] = "token"
    bootstrap_truncated: bool = False
    """The critic's last value stands for what a truncated row would still have earned."""

    ddof: int = 1

    def __post_init__(self) -> None:
        check_choice("GAE", "whiten", self.whiten, Literal["none", "token"])
        for name in ("gamma", "lam", "lam_critic"):
            value = getattr(self, name)
            check_that(
                value is None or 0 <= value <= 1, f"GAE.{name} must lie in [0, 1], got {value}"
            )
        check_that(
            self.length_alpha is None or self.length_alpha > 0,
            f"GAE.length_alpha must be positive, got {self.length_alpha}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorState(Estimator):
    """Episode advantage plus advantage among steps from equal states (GiGPO, arXiv:2505.10978)."""

    gamma: float = 0.95
    """Discount per turn."""

    omega: float = 1.0
    """Weight of the step part."""

    scale: Literal["none", "std"] = "none"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_choice("AnchorState", "scale", self.scale, Literal["none", "std"])
        check_that(0 <= self.gamma <= 1, f"gamma must lie in [0, 1], got {self.gamma}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeAndTurn(Estimator):
    """Outcome and turn rewards normalised apart (MT-GRPO, arXiv:2505.11821).

    A_k = A_outcome + coef * sum over j >= k of A_turn_j, the published two-turn form generalised.
    """

    coef: float = 1.0
    eps: float = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnNormalized(Estimator):
    """Discounted turn returns normalised in a pool: biased by when the policy stops.

    Kept for comparison; `GroupAdvantage(unit="turn")` is the unbiased form.
    """

    gamma: float = 1.0
    pool: Literal["group", "group_turn"] = "group"
    """All turns of the group together, or each turn index apart (a pool of one gives 0)."""

    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_choice("TurnNormalized", "pool", self.pool, Literal["group", "group_turn"])
        check_that(0 <= self.gamma <= 1, f"gamma must lie in [0, 1], got {self.gamma}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepValues(Estimator):
    """r + V(next) - V(here), V from fresh completions of each prefix (VinePPO, arXiv:2410.01679).

    The batch carries `step_values`.
    """

    needs_groups: ClassVar[bool] = False
    gamma: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeCredit(Estimator):
    """Credit of tree nodes (TreeRL, arXiv:2506.11902; TreePO, arXiv:2508.17445).

    The batch carries `tree`: which node each token belongs to.
    """

    per_token: ClassVar[bool] = True

    method: Literal["treerl", "treepo", "arpo"] = "treerl"
    """`arpo`: a shared prefix has the mean of its branches' group advantages, the hard form of
    ARPO (arXiv:2507.19849); its soft form is `GroupAdvantage`."""

    by_size: bool = False
    """TreePO weighs a leaf's ancestors by their leaves instead of equally."""

    def __post_init__(self) -> None:
        check_choice("TreeCredit", "method", self.method, Literal["treerl", "treepo", "arpo"])
        check_that(
            not self.by_size or self.method == "treepo",
            "TreeCredit.by_size weighs the ancestors of TreePO; set method='treepo'",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs(Estimator):
    """No advantage: pairs from groups with a loss of their own (DPO, arXiv:2305.18290)."""

    beta: float = 0.1
    builder: Literal["best_worst", "all_cross", "random_cross"] = "best_worst"
    margin: float = 0.0
    """Difference of returns a pair must exceed."""

    max_pairs: int = 16
    """Per group, for `all_cross` and `random_cross`."""

    seed: int = 0

    def __post_init__(self) -> None:
        check_choice(
            "Pairs", "builder", self.builder, Literal["best_worst", "all_cross", "random_cross"]
        )
        check_that(self.beta > 0, f"Pairs.beta must be positive, got {self.beta}")
        check_that(self.margin >= 0, f"Pairs.margin must not be negative, got {self.margin}")
