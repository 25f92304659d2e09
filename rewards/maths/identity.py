"""Whether two expressions are the same number, the same function, or proportional.

Two constants are equal when their difference keeps shrinking as the precision grows. Two
expressions with variables are equal when they agree at fixed, irregular points (Schwartz-Zippel),
wherever both are real.
"""

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from turngym.rewards.maths.nodes import Node, Op, UndefinedError, symbols, walk
from turngym.rewards.maths.numeric import context_of, evaluate

__all__ = ["proportional", "same_value"]

_DIGITS = (40, 80, 160)
_MAX_NAMES = 24
_SIGNS: tuple[Callable[[int], int], ...] = (
    lambda k: 1,
    lambda k: 1,
    lambda k: 1,
    lambda k: 1 if k % 2 else -1,
    lambda k: -1 if k % 2 else 1,
    lambda k: -1,
)


def _points(names: list[str]) -> list[dict[str, Fraction]]:
    """Values between 0.5 and 2.2 of either sign, with no relation among them."""
    if len(names) > _MAX_NAMES:
        raise UndefinedError(f"more than {_MAX_NAMES} variables")
    return [
        {
            name: Fraction(sign(k) * ((k * 7919 + row * 104729 + 31) % 1009 + 311), 613)
            for k, name in enumerate(names)
        }
        for row, sign in enumerate(_SIGNS)
    ]


def same_value(left: Node, right: Node) -> bool:
    """Tell whether two expressions have the same value, or the same wherever both are real.

    Raises:
        UndefinedError: too few points at which both have a value.
        TooLargeError: a size guard stopped the evaluation.
    """
    names = sorted(symbols(left) | symbols(right))
    if _contains("integral", left, right):
        return _close(left, right)
    if not names:
        return _vanishes(left, right, {}, real_only=False)
    points = _points(names)
    for real_only in (not _contains("i", left, right), False):
        agreed = 0
        for point in points:
            verdict = _agree_at(left, right, point, real_only=real_only)
            if verdict is False:
                return False
            agreed += verdict is True
        if agreed >= 2:
            return True
    raise UndefinedError("no points at which both expressions have a value")


def _contains(name: str, *nodes: Node) -> bool:
    return any(isinstance(part, Op) and part.name == name for node in nodes for part in walk(node))


def _agree_at(
    left: Node, right: Node, point: Mapping[str, Fraction], *, real_only: bool
) -> bool | None:
    try:
        return _vanishes(left, right, point, real_only=real_only)
    except UndefinedError:
        return None


def _pair(
    left: Node, right: Node, point: Mapping[str, Fraction], digits: int, *, real_only: bool
) -> tuple[Any, Any]:
    context = context_of(digits, real_only=real_only)
    values = {
        name: context.mpf(value.numerator) / value.denominator for name, value in point.items()
    }
    return evaluate(left, values, context), evaluate(right, values, context)


def _vanishes(left: Node, right: Node, point: Mapping[str, Fraction], *, real_only: bool) -> bool:
    """A true difference stays as the precision grows; a rounding error shrinks with it."""
    previous: Any = None
    for digits in _DIGITS:
        a, b = _pair(left, right, point, digits, real_only=real_only)
        gap = abs(a - b)
        if previous is not None:
            if gap <= previous * 1e-25:
                return True
            if previous:
                return False
        previous = gap
    return False


def _close(left: Node, right: Node) -> bool:
    """Compare numeric integrals, which have no more than a dozen reliable digits."""
    a, b = _pair(left, right, {}, 20, real_only=False)
    return bool(abs(a - b) <= 1e-12 * max(1, abs(a), abs(b)))


def proportional(left: Node, right: Node) -> bool:
    """Tell whether one expression is a constant, non-zero multiple of the other.

    Raises:
        UndefinedError: too few points at which both have a value.
        TooLargeError: a size guard stopped the evaluation.
    """
    if symbols(left) != symbols(right):
        return False
    ratios: list[Any] = []
    for point in _points(sorted(symbols(left))):
        try:
            a, b = _pair(left, right, point, _DIGITS[0], real_only=False)
        except UndefinedError:
            continue
        if not a or not b:
            return False
        ratios.append(a / b)
    if len(ratios) < 3:
        raise UndefinedError("too few points at which both expressions have a value")
    return all(abs(ratio - ratios[0]) < 1e-25 * abs(ratios[0]) for ratio in ratios)
