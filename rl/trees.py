"""Credit on given trees of rollouts, and when to grow a branch."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from turngym.errors import TrajectoryError
from turngym.rl.credit import Case, Estimate, estimate, paint, whiten_tokens
from turngym.rl.estimators import TreeCredit
from turngym.rl.turn_credit import normalize_pool

__all__ = ["branch_score", "should_branch", "treepo_advantages", "treerl_rewards"]

ARPO_EPS = 1e-6


def _leaves_below(parents: Sequence[int], leaf_rewards: dict[int, float]) -> list[list[int]]:
    """Leaves under every node, itself included; parents come before their children."""
    below: list[list[int]] = [[] for _ in parents]
    for node in reversed(range(len(parents))):
        if node in leaf_rewards:
            below[node].append(node)
        if parents[node] >= 0:
            if parents[node] >= node:
                raise TrajectoryError(f"node {node} comes before its parent {parents[node]}")
            below[parents[node]] += below[node]
    return below


def treerl_rewards(parents: Sequence[int], leaf_rewards: dict[int, float]) -> list[float]:
    """Reward of every node (TreeRL, arXiv:2506.11902).

    Leaf rewards lose the leave-one-out mean of the tree's leaves; V is the mean over the leaves
    below a node; its reward is ((V - V_root) + (V - V_parent)) / sqrt(number of leaves below).

    Args:
        parents: parent of each node, -1 for roots; parents before children.
        leaf_rewards: by node.
    """
    below = _leaves_below(parents, leaf_rewards)
    root: list[int] = []
    for node, parent in enumerate(parents):
        root.append(node if parent < 0 else root[parent])
    centred: dict[int, float] = {}
    for leaf, reward in leaf_rewards.items():
        others = [leaf_rewards[other] for other in below[root[leaf]] if other != leaf]
        centred[leaf] = reward - math.fsum(others) / len(others) if others else 0.0
    value = [math.fsum(centred[leaf] for leaf in ls) / len(ls) if ls else 0.0 for ls in below]
    rewards = []
    for node, parent in enumerate(parents):
        if parent < 0 or not below[node]:
            rewards.append(0.0)
            continue
        gain = (value[node] - value[root[node]]) + (value[node] - value[parent])
        rewards.append(gain / math.sqrt(len(below[node])))
    return rewards


def treepo_advantages(
    parents: Sequence[int], leaf_rewards: dict[int, float], *, by_size: bool = False
) -> dict[int, float]:
    """Advantage of every leaf before whitening (TreePO, arXiv:2508.17445).

    Mean over the leaf's ancestors of its reward minus the mean over the leaves below the ancestor.

    Args:
        parents: parent of each node, -1 for roots; parents before children.
        leaf_rewards: by node.
        by_size: weigh an ancestor by its number of leaves instead of equally.
    """
    below = _leaves_below(parents, leaf_rewards)
    advantages = {}
    for leaf, reward in leaf_rewards.items():
        gains, weights = [], []
        node = parents[leaf]
        while node >= 0:
            mean = math.fsum(leaf_rewards[other] for other in below[node]) / len(below[node])
            gains.append(reward - mean)
            weights.append(len(below[node]) if by_size else 1)
            node = parents[node]
        total = sum(weights)
        advantages[leaf] = (
            math.fsum(g * w for g, w in zip(gains, weights, strict=True)) / total if total else 0.0
        )
    return advantages


@estimate.register
def _(estimator: TreeCredit, case: Case) -> Estimate:
    batch, live = case.batch, case.returns.live
    if batch.tree is None:
        raise TrajectoryError("tree credit reads Batch.tree; add it to the batch")
    total = case.returns.filled(batch.group, batch.num_groups).sum(-1)
    leaves = batch.tree.leaf.tolist()
    rewards = {leaves[row]: float(total[row]) for row in live.nonzero().squeeze(-1).tolist()}
    parents = batch.tree.parent.tolist()
    if estimator.method == "treerl":
        node_rewards = torch.tensor(treerl_rewards(parents, rewards), dtype=torch.float64)
        return Estimate(node_rewards[batch.tree.node])
    if estimator.method == "arpo":
        return Estimate(_shared_prefixes(case, total)[batch.tree.node])
    found = treepo_advantages(parents, rewards, by_size=estimator.by_size)
    values = torch.tensor([found.get(leaf, 0.0) for leaf in leaves], dtype=torch.float64)
    painted = paint(values.unsqueeze(-1), batch)
    mask = batch.trainable & live[batch.row]
    return Estimate(whiten_tokens(painted, mask))


def _shared_prefixes(case: Case, total: Tensor) -> Tensor:
    """Mean group advantage of the leaves below every node, (nodes,)."""
    batch, live = case.batch, case.returns.live
    assert batch.tree is not None
    advantage = normalize_pool(
        total, batch.group, batch.num_groups, live, scale=True, eps=ARPO_EPS
    ).tolist()
    leaves = batch.tree.leaf.tolist()
    rows = live.nonzero().squeeze(-1).tolist()
    earned = {leaves[row]: float(advantage[row]) for row in rows}
    below = _leaves_below(batch.tree.parent.tolist(), earned)
    means = [math.fsum(earned[leaf] for leaf in ls) / len(ls) if ls else 0.0 for ls in below]
    return torch.tensor(means, dtype=torch.float64)


def branch_score(entropy_change: float, *, alpha: float = 0.5, beta: float = 0.2) -> float:
    """Return alpha + beta * entropy_change (ARPO, arXiv:2507.19849)."""
    return alpha + beta * entropy_change


def should_branch(
    entropy_change: float, *, alpha: float = 0.5, beta: float = 0.2, tau: float = 0.5
) -> bool:
    """Tell whether to fork a rollout after a tool result (ARPO, arXiv:2507.19849).

    Args:
        entropy_change: normalised entropy of the next tokens minus that at the start.
        alpha: base score.
        beta: sensitivity to the change.
        tau: threshold the score must exceed.
    """
    return branch_score(entropy_change, alpha=alpha, beta=beta) > tau
