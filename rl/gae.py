"""Generalised advantage estimation on the subsequence of policy tokens."""

import torch
from torch import Tensor

from turngym.errors import TrajectoryError
from turngym.rl.advantages import token_rewards
from turngym.rl.credit import Case, Estimate, estimate, whiten_tokens
from turngym.rl.estimators import GAE
from turngym.rl.segments import Rows, discounted_to_go

__all__ = ["adaptive_lambda", "gae"]


def gae(
    rewards: Tensor,
    values: Tensor,
    rows: Rows,
    *,
    gamma: float,
    lam: Tensor | float,
    bootstrap: Tensor | None = None,
) -> Tensor:
    """A_t = delta_t + gamma * lam * A_{t+1}, delta_t = r_t + gamma * V_{t+1} - V_t.

    t + 1 is the next policy token of the row: observations are skipped, and carry nothing
    (arXiv:1506.02438, equations 11 to 16).

    Args:
        rewards: of each token, (N,).
        values: of the critic before each token, (N,).
        rows: layout of the tokens.
        gamma: discount per policy token.
        lam: one number, or one per row, (B, 1).
        bootstrap: value after the last token of each row, (B,); None = 0.
    """
    dense = rows.dense(values)
    following = torch.nn.functional.pad(dense[:, 1:], (0, 1))
    if bootstrap is not None:
        has_tokens = rows.lengths > 0
        at_end = (rows.lengths - 1).clamp(min=0)
        end = torch.where(has_tokens, bootstrap.to(dense), 0.0)
        following = following.scatter(-1, at_end.unsqueeze(-1), end.unsqueeze(-1))
    delta = rows.dense(rewards + gamma * rows.flat(following) - values)
    return rows.flat(discounted_to_go(delta, gamma * lam))


def adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """1 - 1 / (alpha * |y|), clamped to [0, 1] (VAPO, arXiv:2504.05118)."""
    return (1 - 1 / (alpha * lengths.double().clamp(min=1))).clamp(0, 1)


@estimate.register
def _(estimator: GAE, case: Case) -> Estimate:
    batch, returns = case.batch, case.returns
    if batch.values is None:
        raise TrajectoryError("GAE reads Batch.values; add the critic's values to the batch")
    values = batch.values.double()
    rewards = token_rewards(batch, returns)
    bootstrap = None
    if estimator.bootstrap_truncated:
        if batch.bootstrap is None:
            raise TrajectoryError("bootstrap_truncated reads Batch.bootstrap; add it to the batch")
        bootstrap = torch.where(batch.truncated, batch.bootstrap.double(), 0.0)

    def run(lam: Tensor | float) -> Tensor:
        return gae(rewards, values, batch.rows, gamma=estimator.gamma, lam=lam, bootstrap=bootstrap)

    lam: Tensor | float = estimator.lam
    if estimator.length_alpha is not None:
        lam = adaptive_lambda(batch.rows.lengths, estimator.length_alpha).unsqueeze(-1)
    advantage = run(lam)
    critic = advantage if estimator.lam_critic is None else run(estimator.lam_critic)
    live = batch.trainable & returns.live[batch.row]
    if estimator.whiten == "token":
        whitened = whiten_tokens(advantage, live, ddof=estimator.ddof)
    else:
        whitened = torch.where(live, advantage, 0.0)
    return Estimate(whitened, value_targets=critic + values)
