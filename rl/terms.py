"""Axes 6 and 8: token rules, regularizers and corrections as small frozen values; no torch here.

The arithmetic is registered for each type in `turngym.rl.masks`, `turngym.rl.regularizers` and
`turngym.rl.corrections`.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from turngym.rl.axes import (
    CorrectionLevel,
    CorrectionMode,
    KLEstimator,
    check_choice,
    check_that,
)


@dataclass(frozen=True, slots=True)
class TokenRule:
    """Base of what selects or weighs tokens."""

    needs_entropy: ClassVar[bool] = False
    """Reads `Batch.entropy`, of the current policy over the whole optimizer batch."""

    needs_prepass: ClassVar[bool] = False
    """Reads `Batch.logp_current`, of the current policy over the whole optimizer batch."""


@dataclass(frozen=True, slots=True)
class DropTruncated(TokenRule):
    """Rows cut off by a limit leave the loss and its denominator, not the group statistics.

    Overlong filtering, DAPO, arXiv:2503.14476.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlySpan(TokenRule):
    """Only tokens of turns marked `span` train (Reflect-Retry-Reward, arXiv:2505.24726)."""

    span: str = "reflection"
    """`info["span"]` of the turns that train; others leave the loss and its denominator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleWeight(TokenRule):
    """Weigh reasoning and action tokens differently."""

    reasoning: float = 1.0
    action: float = 1.0
    per: Literal["token", "role"] = "token"
    """`token`: factors under the usual aggregation; `role`: weighted sum of the means over each
    role's tokens."""

    def __post_init__(self) -> None:
        check_choice("RoleWeight", "per", self.per, Literal["token", "role"])
        check_that(
            min(self.reasoning, self.action) >= 0,
            f"role weights must not be negative, got {self.reasoning} and {self.action}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HighEntropy(TokenRule):
    """Only the most uncertain tokens train (the 80/20 rule, arXiv:2506.01939).

    The denominator stays the full token count and KL is not masked.
    """

    frac: float = 0.2
    needs_entropy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_that(0 < self.frac <= 1, f"HighEntropy.frac must lie in (0, 1], got {self.frac}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipCov(TokenRule):
    """Random tokens of high covariance lose their gradient (Clip-Cov, arXiv:2505.22617)."""

    low: float = 1.0
    high: float = 5.0
    """Band of (A - mean A)(logp - mean logp) from which tokens are drawn."""

    frac: float | None = 2e-4
    """Share of all policy tokens that is dropped; None = every candidate."""

    seed: int = 0
    needs_prepass: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_that(
            self.low < self.high, f"ClipCov needs low < high, got {self.low} and {self.high}"
        )
        check_that(
            self.frac is None or 0 < self.frac <= 1,
            f"ClipCov.frac must lie in (0, 1], got {self.frac}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicySequenceMask(TokenRule):
    """Rows that the policy has left behind and that were bad teach nothing (DeepSeek-V3.2).

    arXiv:2512.02556. A row counts as left behind when mean(logp_anchor - logp_new) > `delta`.
    """

    delta: float = 0.5


@dataclass(frozen=True, slots=True)
class Regularizer:
    """Base of extra loss terms and corrections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KL(Regularizer):
    """Distance to a reference policy."""

    coef: float = 0.001
    estimator: KLEstimator = "k3"
    """d = logp - logp_ref. k1: d; k2: d^2/2; k3: exp(-d) + d - 1; k3_plus: value of k3, gradient
    of k2; abs: |d|."""

    where: Literal["loss", "reward"] = "loss"
    """`reward` subtracts coef * k1 of the old policy from the reward of each token, detached."""

    ratio_corrected: bool = False
    """Multiply the term by the differentiable token ratio (DeepSeek-V3.2)."""

    target: float | None = None
    """KL the adaptive controller steers to; None = fixed coefficient."""

    horizon: int = 10_000
    """Trajectories over which the controller reacts."""

    reset_steps: int | None = None
    """Optimizer steps after which the reference moves to the current policy and the optimizer
    state is cleared (ProRL, arXiv:2505.24864); None = never."""

    reset_mix: float = 1.0
    """Share of the current policy's weights in the new reference; 0.6 is TR-DPO's
    (arXiv:2404.09656). Adapters cannot be mixed."""

    def __post_init__(self) -> None:
        check_choice("KL", "estimator", self.estimator, KLEstimator)
        check_choice("KL", "where", self.where, Literal["loss", "reward"])
        check_that(self.coef > 0, f"KL.coef must be positive, got {self.coef}; drop the term")
        check_that(
            self.where == "loss" or self.estimator == "k1",
            f"KL in the reward is k1, got {self.estimator!r}; set estimator='k1' or where='loss'",
        )
        check_that(
            self.where == "reward" or self.estimator != "k1" or self.ratio_corrected,
            "KL 'k1' in the loss has zero expected gradient; use 'k2' or 'k3_plus', "
            "ratio_corrected=True, or where='reward'",
        )
        check_that(
            not (self.where == "reward" and self.ratio_corrected),
            "KL.ratio_corrected needs the loss; set where='loss'",
        )
        check_that(
            self.reset_steps is None or self.reset_steps >= 1,
            f"KL.reset_steps must be at least 1, got {self.reset_steps}",
        )
        check_that(
            0 < self.reset_mix <= 1, f"KL.reset_mix must lie in (0, 1], got {self.reset_mix}"
        )

    def resets_after(self, step: int) -> bool:
        """Tell whether the reference moves after the optimizer step number `step`, from 1."""
        return self.reset_steps is not None and step % self.reset_steps == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entropy(Regularizer):
    """Bonus on the mean entropy over the tokens that train."""

    coef: float = 0.001
    target: float | None = None
    """Entropy at or below which the bonus is active and adapted (Skywork-OR1, arXiv:2505.22312);
    None = always active, fixed."""

    step: float = 0.005
    """Change of the coefficient per update, when adapted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PositiveNLL(Regularizer):
    """Imitate correct rows: minus the mean logp over their tokens (VAPO, arXiv:2504.05118)."""

    coef: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss(Regularizer):
    """Clipped regression of the critic on its returns (PPO)."""

    clip: float | None = 0.2
    coef: float = 1.0
    """Factor of the term; 0.1 is usual where policy and critic share an optimizer."""

    updates: int = 1
    """Critic steps per policy step (12 in Open-Reasoner-Zero)."""

    pretrain_steps: int = 0
    """Steps of regression with a frozen policy before training (VAPO)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KLCov(Regularizer):
    """Penalty on tokens of highest covariance (KL-Cov, arXiv:2505.22617)."""

    frac: float = 2e-3
    """Share of all policy tokens; 2e-3 for 7B, 2e-4 for 32B models in the paper."""

    coef: float = 1.0

    def __post_init__(self) -> None:
        check_that(0 < self.frac <= 1, f"KLCov.frac must lie in (0, 1], got {self.frac}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BehaviorCorrection(Regularizer):
    """Weight exp(logp_old - logp_rollout) for engine mismatch, detached (TIS, MIS).

    Multiplies the surrogate only, never the denominators or the KL term.
    """

    level: CorrectionLevel = "token"
    """`sequence`: product over the row's policy tokens; `geometric`: its |y|-th root."""

    mode: CorrectionMode = "truncate"
    """`truncate`: min(w, high); `mask`: w inside [low, high], 0 outside."""

    low: float = 0.0
    high: float = 2.0

    def __post_init__(self) -> None:
        check_choice("BehaviorCorrection", "level", self.level, CorrectionLevel)
        check_choice("BehaviorCorrection", "mode", self.mode, CorrectionMode)
        check_that(
            0 <= self.low <= 1 <= self.high,
            f"BehaviorCorrection needs 0 <= low <= 1 <= high, got {self.low} and {self.high}",
        )
        check_that(
            self.mode == "mask" or self.low == 0,
            "BehaviorCorrection.low is read by mode 'mask' only; truncation has no lower bound",
        )
