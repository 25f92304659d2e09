"""Axis 5: trust regions as small frozen values; no torch here.

Each bounds how far one batch may move the policy. The per-token loss of a region is registered for
its type in `turngym.rl.surrogates`, where the gate of every region is written down.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from turngym.rl.axes import Divergence, check_choice, check_that


@dataclass(frozen=True, slots=True)
class TrustRegion:
    """Base of all trust regions."""

    needs_rows: ClassVar[bool] = False
    """The loss of a token depends on other tokens of its row, which no micro-batch may split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip(TrustRegion):
    """PPO's clipped surrogate (arXiv:1707.06347), the gradient stops outside [1-low, 1+high]."""

    low: float = 0.2
    """Binds where the advantage is negative."""

    high: float = 0.2
    """Binds where the advantage is positive."""

    dual: float | None = None
    """Ratio from which a negative advantage has no gradient (dual clip, arXiv:1912.09729; the
    two-sided clip of INTELLECT-2 is the same function); None = unbounded."""

    def __post_init__(self) -> None:
        check_that(
            self.low >= 0 and self.high >= 0,
            f"Clip.low and high must not be negative, got {self.low} and {self.high}",
        )
        check_that(
            self.dual is None or self.dual > 1 + self.high,
            f"Clip.dual must exceed 1 + high = {1 + self.high:g}, got {self.dual}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightClip(TrustRegion):
    """A clamped, detached ratio weighs the policy gradient (CISPO, arXiv:2506.13585)."""

    max: float = 5.0
    """Absolute cap of the ratio, not an epsilon."""

    min: float = 0.0

    def __post_init__(self) -> None:
        check_that(
            0 <= self.min <= 1 <= self.max,
            f"WeightClip needs 0 <= min <= 1 <= max, got {self.min} and {self.max}; the bounds "
            "are ratios, not epsilons",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMask(TrustRegion):
    """The detached ratio weighs the gradient inside a band, nothing outside (IcePop)."""

    low: float = 0.5
    high: float = 2.0

    def __post_init__(self) -> None:
        check_that(
            0 <= self.low <= 1 <= self.high,
            f"WeightMask needs 0 <= low <= 1 <= high, got {self.low} and {self.high}; the bounds "
            "are ratios, not epsilons",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftGate(TrustRegion):
    """A sigmoid instead of a clip, sharper for negative advantages (SAPO, arXiv:2511.20347)."""

    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def __post_init__(self) -> None:
        check_that(
            self.tau_pos > 0 and self.tau_neg > 0,
            f"SoftGate temperatures must be positive, got {self.tau_pos} and {self.tau_neg}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceMask(TrustRegion):
    """Tokens moving away from the sampler beyond a divergence are masked (DPPO)."""

    measure: Divergence = "tv"
    """Of the sampled token against the rest, or over the sampler's K most likely tokens."""

    low: float = 0.15
    """Largest divergence where the advantage is negative."""

    high: float = 0.15
    """Largest divergence where the advantage is positive."""

    cap: float | None = None
    """Detached ratio capped here weighs the log-probability; None = the ratio itself, with its
    gradient."""

    def __post_init__(self) -> None:
        check_choice("DivergenceMask", "measure", self.measure, Divergence)
        check_that(
            self.low > 0 and self.high > 0,
            f"DivergenceMask bounds must be positive, got {self.low} and {self.high}",
        )
        check_that(
            self.cap is None or self.cap >= 1,
            f"DivergenceMask.cap is a ratio of at least 1, got {self.cap}",
        )

    @property
    def needs_topk(self) -> bool:
        """The sampler's most likely tokens must be in the batch."""
        return self.measure in ("topk_tv", "topk_kl")


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometricClip(TrustRegion):
    """Geometric mean of clipped token ratios per sequence (GMPO, arXiv:2507.20673)."""

    needs_rows: ClassVar[bool] = True

    low: float = 0.4
    """Log-ratio below which a token of a negative row has no gradient."""

    high: float = 0.4
    """Log-ratio above which a token of a positive row has no gradient."""

    def __post_init__(self) -> None:
        check_that(
            0 < self.low < math.inf and 0 < self.high < math.inf,
            f"GeometricClip bounds are positive log-ratios, got {self.low} and {self.high}",
        )
