"""Drawing tokens: one uniform number per (seed, index), turned into a token by the inverse CDF."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["draw", "likeliest", "uniforms"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: NDArray[np.uint64], index: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, index), whatever else is drawn beside it.

    SplitMix64 (Steele, Lea, Flood 2014) used as a counter-based generator.
    """
    state = _mix(seeds + _GOLDEN) + (index.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    # 52 bits, not 53: u * total must stay below total after rounding.
    return (_mix(state) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def draw(
    logits: Tensor,
    uniform: NDArray[np.float64],
    temperature: NDArray[np.float32],
    top_p: NDArray[np.float32],
    top_k: NDArray[np.int64],
) -> tuple[Tensor, Tensor]:
    """Draw one token a row.

    Args:
        logits: fp32, (B, V).
        uniform: numbers in [0, 1), (B,).
        temperature: divides the logits; 0 takes the likeliest token, whose log-probability is
            then given at temperature 1, (B,).
        top_p: keeps the smallest set of likeliest tokens with this much probability, (B,).
        top_k: keeps so many of the likeliest tokens, 0 = all, (B,).

    Returns:
        Tokens and their log-probabilities, renormalised over what top_p and top_k keep, (B,) each.
    """
    if logits.device.type == "mps":  # which has no fp64
        logits = logits.cpu()
    device = logits.device
    is_greedy = temperature == 0
    if not (temperature == 1).all():
        divisor = np.where(is_greedy, np.float32(1), temperature)
        logits = logits / torch.from_numpy(divisor).to(device)[:, None]
    p = logits.softmax(-1)
    if (top_p < 1).any() or (top_k > 0).any():
        p = _truncate(p, torch.from_numpy(top_p).to(device), torch.from_numpy(top_k).to(device))
    # In fp64: an fp32 running sum loses every token rarer than 1e-7.
    total = p.cumsum(-1, dtype=torch.float64)
    threshold = torch.from_numpy(uniform).to(device)[:, None] * total[:, -1:]
    token = torch.searchsorted(total, threshold, right=True)
    if is_greedy.any():
        greedy = torch.from_numpy(is_greedy).to(device)[:, None]
        token = torch.where(greedy, logits.argmax(-1, keepdim=True), token)
    # Only rows that are not finite run past the end; their log-probability tells.
    token.clamp_(max=logits.shape[-1] - 1)
    return token.squeeze(-1), p.gather(-1, token).squeeze(-1).log()


def likeliest(
    logits: Tensor, temperature: NDArray[np.float32], count: int
) -> tuple[Tensor, Tensor]:
    """Return the ids of the likeliest tokens of each row and their log-probabilities, (B, count).

    Args:
        logits: fp32, (B, V).
        temperature: divides the logits; 0 counts as 1, (B,).
        count: how many, most likely first; at most V.
    """
    divisor = np.where(temperature == 0, np.float32(1), temperature)
    tempered = logits / torch.from_numpy(divisor).to(logits.device)[:, None]
    logp, ids = tempered.log_softmax(-1).topk(count, dim=-1)
    return ids, logp


def _truncate(p: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Set to 0 what top_p and top_k drop, and renormalise the rest."""
    ordered, order = p.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    rank = torch.arange(p.shape[-1], device=p.device)
    limit = top_k.where(top_k > 0, p.shape[-1])[:, None]
    # A row with top_p = 1 keeps all, even where rounding takes the running sum past 1.
    is_past = (before >= top_p[:, None]) & (top_p < 1)[:, None]
    dropped = (rank >= limit) | (is_past & (rank > 0))
    kept = ordered.masked_fill(dropped, 0)
    kept = kept / kept.sum(-1, keepdim=True)
    # Rows that lose nothing stay as they are, to the bit.
    kept = torch.where(dropped.any(-1, keepdim=True), kept, ordered)
    return torch.empty_like(p).scatter_(-1, order, kept)
