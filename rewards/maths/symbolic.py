"""What the grammar does not know (limits, infinite sums, derivatives), left to computer algebra."""

from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

__all__ = ["MAX_LENGTH", "same_symbolically"]

MAX_LENGTH = 1_000
"""Longer formulas are not handed over."""


def same_symbolically(answer: str, gold: str) -> bool:
    """Compare two formulas with math-verify, without its timeouts, which need signals.

    Only its LaTeX reader is used: the other one evaluates text. Constants must agree to twenty
    digits, not to its six decimals.
    """
    if max(len(answer), len(gold)) > MAX_LENGTH:
        return False
    read = [
        parse(
            f"${text}$",
            [LatexExtractionConfig()],
            fallback_mode="no_fallback",
            parsing_timeout=None,
        )
        for text in (gold, answer)
    ]
    if not read[0] or not read[1]:
        return False
    numbers = [_number(expressions[0]) for expressions in read]
    if None not in numbers:
        return bool(abs(numbers[0] - numbers[1]) <= 1e-20 * max(abs(numbers[0]), abs(numbers[1])))
    return bool(verify(read[0], read[1], timeout_seconds=None))


def _number(expression: Any) -> Any:
    if getattr(expression, "free_symbols", True):
        return None
    value = expression.doit().evalf(30)
    return value if value.is_number and value.is_finite else None
