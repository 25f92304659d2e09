"""Rewards for the length of a response, in tokens."""

import math

from turngym.errors import ConfigError

__all__ = ["cosine_length", "soft_overlong"]


def soft_overlong(num_tokens: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """Return the soft overlong punishment: 0, then a ramp down to -1 over the last tokens.

    DAPO, arXiv:2503.14476, equation 13.

    Args:
        num_tokens: length of the response.
        max_tokens: length from which the punishment is full (L_max).
        buffer_tokens: length of the ramp that ends there (L_cache).

    Raises:
        ConfigError: a buffer outside 1..max_tokens.

    >>> [soft_overlong(n, max_tokens=100, buffer_tokens=20) for n in (80, 90, 100, 101)]
    [0.0, -0.5, -1.0, -1.0]
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise ConfigError(
            f"buffer_tokens must lie in 1..max_tokens ({max_tokens}), got {buffer_tokens}"
        )
    return max(-1.0, min(0.0, (max_tokens - buffer_tokens - num_tokens) / buffer_tokens))


def cosine_length(
    num_tokens: int,
    *,
    max_tokens: int,
    correct: bool,
    right: tuple[float, float] = (1.0, 0.5),
    wrong: tuple[float, float] = (-1.0, -0.5),
    exceeded: float = -1.0,
) -> float:
    """Return a reward that follows half a cosine from length 0 to the limit.

    arXiv:2502.03373 (cosine reward): right answers earn more when short, wrong ones lose less
    when long.

    Args:
        num_tokens: length of the response.
        max_tokens: the limit.
        correct: whether the answer is right.
        right: reward of a right answer at length 0 and at the limit.
        wrong: reward of a wrong answer at length 0 and at the limit.
        exceeded: reward at the limit and beyond.

    Raises:
        ConfigError: a limit that is not positive.

    >>> cosine_length(50, max_tokens=100, correct=True)
    0.75
    """
    if max_tokens < 1:
        raise ConfigError(f"max_tokens must be at least 1, got {max_tokens}")
    if num_tokens >= max_tokens:
        return exceeded
    at_zero, at_limit = right if correct else wrong
    return at_limit + (at_zero - at_limit) * (1 + math.cos(math.pi * num_tokens / max_tokens)) / 2
