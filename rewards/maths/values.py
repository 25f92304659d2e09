"""Whether two single values are equal: exactly where possible, numerically where not."""

import re
from fractions import Fraction
from typing import TypeGuard

from turngym.rewards.maths.exact import rational
from turngym.rewards.maths.identity import same_value
from turngym.rewards.maths.nodes import Node, Number, Op, Text
from turngym.rewards.maths.numeric import context_of, evaluate

__all__ = ["MIN_DIGITS", "equal", "nearly"]

MIN_DIGITS = 8
"""A decimal of so many significant digits may stand for the repeating decimal it rounds."""

_CLOCK = re.compile(r"(?:[01]?\d|2[0-4]):[0-5]\d(?::[0-5]\d)?")


def equal(answer: Node, gold: Node) -> bool:
    """Compare two expressions, percentages, infinities, ratios or numerals.

    Raises:
        UndefinedError: a side has no value.
        TooLargeError: a side is too large to evaluate.
    """
    if answer == gold:
        return True
    if _infinite(answer) or _infinite(gold):
        return _infinite(answer) == _infinite(gold)
    if _named(answer, "numeral") or _named(gold, "numeral"):
        # The base may be left out, but a numeral is no decimal number.
        return (
            _named(gold, "numeral") and Text(getattr(answer, "whole", None) or "") == gold.args[0]
        )
    if _named(answer, "ratio") or _named(gold, "ratio"):
        return _same_ratio(answer, gold)
    if _named(gold, "percent") and not _named(answer, "percent") and equal(answer, gold.args[0]):
        return True
    left, right = rational(answer), rational(gold)
    if left is not None and right is not None:
        return left == right or _rounds(answer, right) or _rounds(gold, left)
    return same_value(answer, gold)


def nearly(exact: Node, rounded: Node) -> bool:
    """Tell whether a constant may be written as an approximation of another: within 5 %."""
    context = context_of(20)
    a, b = (evaluate(node, {}, context) for node in (exact, rounded))
    return bool(abs(a - b) <= abs(a) / 20)


def _named(node: Node, name: str) -> TypeGuard[Op]:
    return isinstance(node, Op) and node.name == name


def _infinite(node: Node) -> int:
    """Sign of an infinity, 0 for anything else."""
    if _named(node, "infinity"):
        return 1
    return -_infinite(node.args[0]) if _named(node, "neg") else 0


def _rounds(node: Node, value: Fraction) -> bool:
    """Tell whether a long decimal literal is a repeating decimal, rounded or cut off."""
    if _named(node, "neg"):
        return _rounds(node.args[0], -value)
    if not isinstance(node, Number) or node.digits < MIN_DIGITS:
        return False
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest > 1 and abs(node.value - value) < Fraction(1, 10**node.places)


def _same_ratio(answer: Node, gold: Node) -> bool:
    if not (_named(answer, "ratio") and _named(gold, "ratio")):
        ratio, other = (answer, gold) if _named(answer, "ratio") else (gold, answer)
        assert isinstance(ratio, Op)
        if len(ratio.args) != 3 or _is_clock(ratio):
            return False
        return equal(Op("*", (ratio.args[1], Op("inverse", (ratio.args[2],)))), other)
    if _is_clock(answer) or _is_clock(gold) or len(answer.args) != len(gold.args):
        return answer.args[0] == gold.args[0]
    first, second = answer.args[1], gold.args[1]
    return all(
        equal(Op("*", (a, second)), Op("*", (b, first)))
        for a, b in zip(answer.args[2:], gold.args[2:], strict=True)
    )


def _is_clock(ratio: Op) -> bool:
    """`12:30` may be a time, so that only the same digits equal it."""
    spelled = ratio.args[0]
    return isinstance(spelled, Text) and _CLOCK.fullmatch(spelled.text) is not None
