"""Between flat tokens and padded (B, T) arrays, for data that comes padded."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from turngym.errors import TrajectoryError
from turngym.rl.batch import Batch
from turngym.types import TokenRole

__all__ = ["batch_from_padded", "flatten", "unflatten"]


def flatten(values: Tensor, mask: Tensor) -> Tensor:
    """Entries of (B, T) on policy tokens, row after row, (N,)."""
    return values[mask]


def unflatten(values: Tensor, mask: Tensor) -> Tensor:
    """Inverse of `flatten`, 0 outside the mask, (B, T)."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(
        mask, values
    )


def batch_from_padded(
    *,
    mask: Tensor,
    group: Tensor,
    logp_rollout: Tensor,
    rewards: Mapping[str, Tensor],
    turn_rewards: Mapping[str, Tensor] | None = None,
    turn: Tensor | None = None,
    role: Tensor | None = None,
    truncated: Tensor | None = None,
    demo: Tensor | None = None,
    columns: Mapping[str, Tensor] | None = None,
) -> Batch:
    """Build a batch from padded arrays; padding and observations are where `mask` is False.

    Args:
        mask: tokens sampled from the policy, (B, T) bool.
        group: group of each row, (B,) int64.
        logp_rollout: (B, T), read on the mask.
        rewards: outcome components by name, (B,).
        turn_rewards: turn components by name, (B, K).
        turn: turn of each policy token, (B, T) int64; None = one turn.
        role: `TokenRole` of each policy token, (B, T); None = REASONING.
        truncated: (B,) bool; None = no row.
        demo: (B,) bool; None = no row.
        columns: any of `logp_old`, `logp_ref`, `logp_current`, `entropy`, `values`, (B, T).

    Raises:
        TrajectoryError: `mask` is not a boolean (B, T).
    """
    if mask.dtype != torch.bool or mask.ndim != 2:
        raise TrajectoryError(f"mask must be (B, T) bool, got {tuple(mask.shape)} {mask.dtype}")
    num_rows = len(mask)
    turn = torch.zeros(mask.shape, dtype=torch.int64) if turn is None else turn
    if turn_rewards:
        width = next(iter(turn_rewards.values())).shape[-1]
        exists = torch.stack([~v.isnan() for v in turn_rewards.values()]).any(0)
        last = torch.where(exists, torch.arange(width), -1).amax(-1) + 1
        num_turns = torch.maximum(last, _turns(turn, mask))
    else:
        num_turns = _turns(turn, mask)
    extra: dict[str, Any] = {n: flatten(values, mask) for n, values in (columns or {}).items()}
    no = torch.zeros(num_rows, dtype=torch.bool)
    return Batch(
        row=mask.nonzero()[:, 0],
        turn=flatten(turn, mask),
        role=(
            torch.full((int(mask.sum()),), int(TokenRole.REASONING), dtype=torch.int8)
            if role is None
            else flatten(role, mask).to(torch.int8)
        ),
        logp_rollout=flatten(logp_rollout, mask),
        version=torch.zeros(int(mask.sum()), dtype=torch.int64),
        group=group,
        num_turns=num_turns,
        truncated=no if truncated is None else truncated,
        demo=no if demo is None else demo,
        rewards=rewards,
        turn_rewards=turn_rewards or {},
        **extra,
    )


def _turns(turn: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, turn, -1).amax(-1) + 1
