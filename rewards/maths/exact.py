"""Exact values: rational arithmetic that refuses to write out very large numbers."""

import math
from collections.abc import Callable
from fractions import Fraction

from turngym.rewards.maths.nodes import Node, Number, Op, TooLargeError, UndefinedError

__all__ = ["MAX_BITS", "rational"]

MAX_BITS = 200_000
"""Largest numerator or denominator; about 60,000 digits."""

_MAX_COUNT = 5_000


def rational(node: Node) -> Fraction | None:
    """Return the value of an expression when rational arithmetic alone gives it, else None.

    Raises:
        UndefinedError: a division by zero.
        TooLargeError: a number of the calculation has more than `MAX_BITS` bits.
    """
    if isinstance(node, Number):
        return node.value
    if not isinstance(node, Op) or not node.args or node.name not in _RULES:
        if isinstance(node, Op) and node.name == "huge":
            raise TooLargeError("a number with too many digits")
        return None
    if node.name == "^":
        return _power(*map(rational, node.args))
    values = [rational(part) for part in node.args]
    known = [value for value in values if value is not None]
    return _RULES[node.name](known) if len(known) == len(values) else None


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _check(bits: int) -> None:
    if bits > MAX_BITS:
        raise TooLargeError(f"a number of more than {MAX_BITS} bits")


def _add(values: list[Fraction]) -> Fraction:
    total = Fraction(0)
    for value in values:
        _check(_bits(total) + _bits(value))
        total += value
    return total


def _multiply(values: list[Fraction]) -> Fraction:
    _check(sum(_bits(value) for value in values if abs(value) != 1))
    return math.prod(values, start=Fraction(1))


def _inverse(values: list[Fraction]) -> Fraction:
    if not values[0]:
        raise UndefinedError("division by zero")
    return 1 / values[0]


def _power(base: Fraction | None, exponent: Fraction | None) -> Fraction | None:
    if base is None or exponent is None:
        return None
    if exponent.denominator != 1:
        return _rooted(base, exponent)
    if base in (0, 1, -1):
        if not base and exponent <= 0:
            raise UndefinedError("zero to a power that is not positive")
        return base if base >= 0 or exponent % 2 else -base
    _check(abs(exponent.numerator) * (_bits(base) - 1))
    return Fraction(base) ** int(exponent)


def _rooted(base: Fraction, exponent: Fraction) -> Fraction | None:
    degree = exponent.denominator
    if base < 0 or degree > 64:
        return None
    top, bottom = _whole_root(base.numerator, degree), _whole_root(base.denominator, degree)
    if top is None or bottom is None:
        return None
    return _power(Fraction(top, bottom), Fraction(exponent.numerator))


def _whole_root(value: int, degree: int) -> int | None:
    if value < 2:
        return value
    if degree == 2:
        root = math.isqrt(value)
    else:
        root = 1 << -(-value.bit_length() // degree)
        while (step := ((degree - 1) * root + value // root ** (degree - 1)) // degree) < root:
            root = step
    return root if root**degree == value else None


def _root(values: list[Fraction]) -> Fraction | None:
    radicand, index = values
    if index.denominator != 1 or index < 2:
        return None
    if radicand < 0 and index % 2:
        positive = _rooted(-radicand, 1 / index)
        return None if positive is None else -positive
    return _rooted(radicand, 1 / index)


def _count(value: Fraction) -> int:
    if value > _MAX_COUNT:
        raise TooLargeError(f"counting beyond {_MAX_COUNT}")
    return int(value)


def _factorial(values: list[Fraction]) -> Fraction | None:
    if values[0].denominator != 1:
        return None
    if values[0] < 0:
        raise UndefinedError("factorial of a negative number")
    return Fraction(math.factorial(_count(values[0])))


def _binomial(values: list[Fraction]) -> Fraction | None:
    if any(value.denominator != 1 or value < 0 for value in values):
        return None
    return Fraction(math.comb(_count(values[0]), int(values[1])))


_RULES: dict[str, Callable[[list[Fraction]], Fraction | None]] = {
    "+": _add,
    "*": _multiply,
    "neg": lambda values: -values[0],
    "inverse": _inverse,
    "^": lambda values: _power(values[0], values[1]),
    "root": _root,
    "factorial": _factorial,
    "binom": _binomial,
    "percent": lambda values: values[0] / 100,
    "abs": lambda values: abs(values[0]),
    "floor": lambda values: Fraction(math.floor(values[0])),
    "ceil": lambda values: Fraction(math.ceil(values[0])),
}
