"""Rewards without labels and reflective rewards, as pure functions of plain numbers."""

import math
from collections import Counter
from collections.abc import Sequence

__all__ = [
    "majority_label",
    "majority_rewards",
    "proposer_reward",
    "reflection_reward",
    "role_reward",
    "self_certainty",
]


def majority_label(answers: Sequence[str | None]) -> tuple[str | None, float]:
    """Return the most common answer and its share of all votes (TTRL, arXiv:2504.16084).

    None is no vote but counts as one of the answers given; a tie goes to the answer seen first.

    >>> majority_label(["7", "3", "7", None])
    ('7', 0.5)
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return None, 0.0
    label, count = votes.most_common(1)[0]
    return label, count / len(answers)


def majority_rewards(answers: Sequence[str | None]) -> list[float]:
    """Return 1.0 for each answer that is the majority's, else 0.0."""
    label, _ = majority_label(answers)
    return [float(label is not None and answer == label) for answer in answers]


def self_certainty(logits: Sequence[float]) -> float:
    """Return KL(uniform || softmax(logits)) in nats (Intuitor, arXiv:2505.19590).

    >>> round(self_certainty([2.0, 0.5, -1.0, 0.0]), 3)
    0.581
    """
    top = max(logits)
    logsumexp = top + math.log(sum(math.exp(z - top) for z in logits))
    return logsumexp - math.fsum(logits) / len(logits) - math.log(len(logits))


def proposer_reward(solve_rate: float) -> float:
    """Return a proposer's learnability reward (Absolute Zero, arXiv:2505.03335, equation 4).

    Hard but solvable tasks pay most; tasks that are never or always solved pay nothing.
    """
    if not 0 <= solve_rate <= 1:
        raise ValueError(f"solve_rate must lie in [0, 1], got {solve_rate}")
    return 1 - solve_rate if 0 < solve_rate < 1 else 0.0


def role_reward(reward: float, *, well_formed: bool) -> float:
    """Return the composite reward of either role (Absolute Zero, arXiv:2505.03335, equation 6)."""
    if not well_formed:
        return -1.0
    return reward if reward > 0 else -0.5


def reflection_reward(*, first_ok: bool, second_ok: bool | None) -> float | None:
    """Return the reward of a reflection (Reflect-Retry-Reward, arXiv:2505.24726).

    None (not trained) when the first attempt succeeded; `OnlySpan(span="reflection")` confines the
    loss to the reflection.
    """
    if first_ok:
        return None
    return float(bool(second_ok))
