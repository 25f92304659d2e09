"""Divergences between sampler and policy from the few log-probabilities that are known (DPPO)."""

import torch
from torch import Tensor

__all__ = ["binary_kl", "topk_divergence"]

GUARD = 1e-8


def binary_kl(logp_old: Tensor, logp_new: Tensor) -> Tensor:
    """KL between the two-point distributions (sampled token, everything else), (n,).

    Args:
        logp_old: sampler's log-probability of the sampled token, (n,).
        logp_new: current policy's, (n,).
    """
    old, new = logp_old.exp(), logp_new.exp()
    rest = (1 - old) * (torch.log(1 - old + GUARD) - torch.log(1 - new + GUARD))
    return old * (logp_old - logp_new) + rest


def topk_divergence(
    topk_old: Tensor, topk_new: Tensor, logp_old: Tensor, logp_new: Tensor, hit: Tensor
) -> tuple[Tensor, Tensor]:
    """Total variation and KL over the K likeliest tokens, the sampled one and one bin for the rest.

    Args:
        topk_old: sampler's log-probabilities of its K most likely tokens, (n, K).
        topk_new: current policy's log-probabilities of the same tokens, (n, K).
        logp_old: sampler's log-probability of the sampled token, (n,).
        logp_new: current policy's, (n,).
        hit: the sampled token is one of the K, (n,) bool.

    Returns:
        TV and KL(sampler || policy), (n,) each.
    """
    old, new = topk_old.exp(), topk_new.exp()
    own_old = torch.where(hit, 0.0, logp_old.exp())
    own_new = torch.where(hit, 0.0, logp_new.exp())
    rest_old = (1 - old.sum(-1) - own_old).clamp(min=0)
    rest_new = (1 - new.sum(-1) - own_new).clamp(min=0)
    tv = (old - new).abs().sum(-1) + (own_old - own_new).abs() + (rest_old - rest_new).abs()
    kl = (old * (topk_old - topk_new)).sum(-1)
    kl = kl + torch.where(hit, 0.0, own_old * (logp_old - logp_new))
    kl = kl + rest_old * (torch.log(rest_old + GUARD) - torch.log(rest_new + GUARD))
    return tv / 2, kl
