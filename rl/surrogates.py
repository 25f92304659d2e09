"""The surrogates of all trust regions.

Every surrogate has the gradient d loss / d logp_new = -weight * A * gate. Gates, with rho the
ratio and s = sigmoid(tau * (rho - 1)):

    no region, no anchor    1
    no region               rho
    Clip                    rho; 0 where A > 0 and rho > 1 + high, A < 0 and rho < 1 - low,
                            or A < 0 and rho > dual
    WeightClip              clamp(rho, min, max)
    WeightMask              rho inside the band, else 0
    SoftGate                4 s (1 - s) rho
    DivergenceMask          rho (or min(rho, cap)) where kept, else 0
    GeometricClip           geometric mean of the clipped ratios, 0 on clipped tokens

On the anchor policy every gate is 1.
"""

from dataclasses import dataclass
from functools import singledispatch
from typing import NamedTuple

import torch
from torch import Tensor

from turngym.errors import ConfigError, TrajectoryError
from turngym.rl.divergence import binary_kl, topk_divergence
from turngym.rl.segments import segment_mean
from turngym.rl.trust_region import (
    Clip,
    DivergenceMask,
    GeometricClip,
    SoftGate,
    TrustRegion,
    WeightClip,
    WeightMask,
)

__all__ = ["Surrogate", "Tokens", "surrogate"]


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of one micro-batch as a surrogate sees them, all (n,)."""

    logp: Tensor
    """Current policy, differentiable, 0 outside the mask."""

    anchor: Tensor
    """What the ratio compares with, 0 outside the mask."""

    log_ratio: Tensor
    """At the level of the algorithm's ratio, differentiable, clamped to +-20."""

    advantage: Tensor
    mask: Tensor
    row: Tensor
    num_rows: int
    topk_old: Tensor | None = None
    """The sampler's K most likely tokens, (n, K)."""

    topk_new: Tensor | None = None
    """The same tokens under the current policy, detached, (n, K)."""

    topk_hit: Tensor | None = None
    """The sampled token is one of them, (n,) bool."""

    @property
    def ratio(self) -> Tensor:
        """exp(log_ratio)."""
        return self.log_ratio.exp()


class Surrogate(NamedTuple):
    """Loss of every token, and where the region binds."""

    loss: Tensor
    bound: Tensor | None = None


@singledispatch
def surrogate(region: TrustRegion | None, tokens: Tokens) -> Surrogate:
    """Per-token loss of a trust region; register the function of a new region for its type."""
    raise ConfigError(
        f"no surrogate is registered for {type(region).__name__}; use surrogate.register"
    )


def _by_sign(advantage: Tensor, positive: float, negative: float) -> Tensor:
    """One number where the advantage is positive, another elsewhere, in its dtype."""
    return torch.where(
        advantage > 0, advantage.new_tensor(positive), advantage.new_tensor(negative)
    )


@surrogate.register
def _(region: None, tokens: Tokens) -> Surrogate:
    return Surrogate(-tokens.ratio * tokens.advantage)


@surrogate.register
def _(region: Clip, tokens: Tokens) -> Surrogate:
    ratio, advantage = tokens.ratio, tokens.advantage
    gain = torch.minimum(
        ratio * advantage, ratio.clamp(1 - region.low, 1 + region.high) * advantage
    )
    positive, negative = advantage > 0, advantage < 0
    stopped = (positive & (ratio > 1 + region.high)) | (negative & (ratio < 1 - region.low))
    if region.dual is not None:
        gain = torch.where(negative, torch.maximum(gain, region.dual * advantage), gain)
        stopped = stopped | (negative & (ratio > region.dual))
    return Surrogate(-gain, stopped)


@surrogate.register
def _(region: WeightClip, tokens: Tokens) -> Surrogate:
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(region.min, region.max)
    return Surrogate(-weight * tokens.advantage * tokens.logp, weight != ratio)


@surrogate.register
def _(region: WeightMask, tokens: Tokens) -> Surrogate:
    ratio = tokens.ratio.detach()
    inside = (ratio >= region.low) & (ratio <= region.high)
    weight = torch.where(inside, ratio, 0.0)
    return Surrogate(-weight * tokens.advantage * tokens.logp, ~inside)


@surrogate.register
def _(region: SoftGate, tokens: Tokens) -> Surrogate:
    tau = _by_sign(tokens.advantage, region.tau_pos, region.tau_neg)
    gate = (4 / tau) * torch.sigmoid(tau * (tokens.ratio - 1))
    return Surrogate(-gate * tokens.advantage)


@surrogate.register
def _(region: DivergenceMask, tokens: Tokens) -> Surrogate:
    logp, advantage = tokens.logp.detach(), tokens.advantage
    up = logp > tokens.anchor
    away = torch.where(advantage > 0, up, (logp < tokens.anchor) & (advantage < 0))
    limit = _by_sign(advantage, region.high, region.low)
    far = _divergence(region, tokens, logp) > limit
    kept = ~(away & far)
    ratio = tokens.ratio
    if region.cap is None:
        return Surrogate(-torch.where(kept, ratio * advantage, 0.0), ~kept)
    weight = torch.where(kept, ratio.detach().clamp(max=region.cap), 0.0)
    return Surrogate(-weight * advantage * tokens.logp, ~kept)


def _divergence(region: DivergenceMask, tokens: Tokens, logp: Tensor) -> Tensor:
    if region.measure == "tv":
        return (logp.exp() - tokens.anchor.exp()).abs()
    if region.measure == "kl":
        return binary_kl(tokens.anchor, logp)
    if tokens.topk_old is None or tokens.topk_new is None or tokens.topk_hit is None:
        raise TrajectoryError(
            f"DivergenceMask({region.measure!r}) reads Batch.topk_logp and topk_ids, and the "
            "current policy's topk_logp"
        )
    tv, kl = topk_divergence(tokens.topk_old, tokens.topk_new, tokens.anchor, logp, tokens.topk_hit)
    return tv if region.measure == "topk_tv" else kl


@surrogate.register
def _(region: GeometricClip, tokens: Tokens) -> Surrogate:
    d = tokens.log_ratio
    clipped = torch.where(tokens.advantage > 0, d.clamp(max=region.high), d.clamp(min=-region.low))
    mean = segment_mean(clipped.detach(), tokens.row, tokens.num_rows, tokens.mask)[tokens.row]
    # The mean's gradient reaches each token as its own share, which the weight 1/|y| holds.
    through = (mean + clipped - clipped.detach()).exp()
    return Surrogate(-through * tokens.advantage, clipped != d)
