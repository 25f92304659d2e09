"""Numeric values of expressions at any precision, with size guards."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import mpmath

from turngym.rewards.maths.nodes import (
    Node,
    Number,
    Op,
    Symbol,
    TooLargeError,
    UndefinedError,
)

__all__ = ["Values", "context_of", "evaluate"]

_MAX_POWER_BITS = 1 << 20
_MAX_TERMS = 20_000

Values = Mapping[str, Any]


def evaluate(node: Node, values: Values, context: Any) -> Any:
    """Evaluate an expression in an mpmath context.

    Args:
        node: expression; constants, variables and operators only.
        values: value of each variable.
        context: an mpmath context, which holds the precision.

    Raises:
        UndefinedError: no finite value, or a variable without one.
        TooLargeError: a power, factorial or sum beyond the size guards.
    """
    if isinstance(node, Number):
        return context.mpf(node.value.numerator) / node.value.denominator
    if isinstance(node, Symbol):
        if node.name not in values:
            raise UndefinedError(f"{node.name!r} has no value")
        return values[node.name]
    if not isinstance(node, Op):
        raise UndefinedError(f"a {type(node).__name__.lower()} has no value")
    if node.name in _BINDERS:
        return _BINDERS[node.name](node, values, context)
    if node.name not in _RULES:
        raise UndefinedError(f"{node.name!r} has no value")
    arguments = [evaluate(part, values, context) for part in node.args]
    try:
        value = _RULES[node.name](context, *arguments)
    except (ZeroDivisionError, ValueError, OverflowError) as error:
        if isinstance(error, (UndefinedError, TooLargeError)):
            raise
        raise UndefinedError(f"{node.name} has no value here") from error
    if not context.isfinite(value):
        raise UndefinedError(f"{node.name} has no finite value here")
    if context.real_only and value.imag and not any(argument.imag for argument in arguments):
        raise UndefinedError(f"{node.name} has no real value here")
    return value


@functools.cache
def context_of(digits: int, *, real_only: bool = False) -> Any:
    """Return the mpmath context of a precision.

    Args:
        digits: decimal digits it works with.
        real_only: roots and logarithms that leave the real line have no value.
    """
    context = mpmath.mp.clone()
    context.dps = digits
    context.real_only = real_only
    return context


def _power(context: Any, base: Any, exponent: Any) -> Any:
    if not base:
        if context.re(exponent) <= 0:
            raise UndefinedError("zero to a power that is not positive")
        return context.mpf(0)
    growth = abs(context.log(abs(base), 2)) + (2 if context.im(base) else 0)
    if context.mag(exponent) > 64 or abs(exponent) * growth > _MAX_POWER_BITS:
        if abs(base) == 1 and not context.im(base) and context.isint(exponent):
            return context.mpf(1 if base > 0 or not exponent % 2 else -1)
        raise TooLargeError("a power too large to evaluate")
    return context.power(base, exponent)


def _exp(context: Any, exponent: Any) -> Any:
    return _power(context, context.e, exponent)


def _root(context: Any, radicand: Any, index: Any) -> Any:
    real = not context.im(radicand) and context.isint(index)
    if real and radicand < 0 and index % 2 == 1:
        return -context.root(-radicand, int(index))
    return _power(context, radicand, 1 / index)


def _bounded(function: str) -> Callable[..., Any]:
    def call(context: Any, *arguments: Any) -> Any:
        if any(context.mag(argument) > 14 for argument in arguments):
            raise TooLargeError(f"{function} of a large number")
        return getattr(context, function)(*arguments)

    return call


def _function(name: str) -> Callable[..., Any]:
    def call(context: Any, argument: Any) -> Any:
        if context.mag(argument) > 4096:
            raise TooLargeError(f"{name} of a large number")
        return getattr(context, name)(argument)

    return call


def _log(context: Any, argument: Any, base: Any) -> Any:
    return context.log(argument) / context.log(base)


def _whole(name: str) -> Callable[..., Any]:
    def call(context: Any, argument: Any) -> Any:
        nearest = context.nint(context.re(argument))
        close = abs(argument - nearest) < context.mpf(10) ** (8 - context.dps)
        return nearest if close else getattr(context, name)(argument)

    return call


_FUNCTIONS = (
    "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh",
)  # fmt: skip
_RULES: dict[str, Callable[..., Any]] = {
    "+": lambda context, *terms: context.fsum(terms),
    "*": lambda context, *factors: context.fprod(factors),
    "neg": lambda _, value: -value,
    "inverse": lambda _, value: 1 / value,
    "^": _power,
    "root": _root,
    "exp": _exp,
    "ln": lambda context, value: context.log(value),
    "log": _log,
    "lg": _log,
    "abs": lambda _, value: abs(value),
    "floor": _whole("floor"),
    "ceil": _whole("ceil"),
    "percent": lambda _, value: value / 100,
    "degree": lambda context, value: value * context.pi / 180,
    "factorial": _bounded("factorial"),
    "binom": _bounded("binomial"),
    "pi": lambda context: +context.pi,
    "e": lambda context: +context.e,
    "i": lambda context: context.mpc(0, 1),
    **{name: _function(name) for name in _FUNCTIONS},
}


def _series(node: Op, values: Values, context: Any) -> Any:
    index, low, high, body = node.args
    first, last = (evaluate(bound, values, context) for bound in (low, high))
    if not (context.isint(first) and context.isint(last)):
        raise UndefinedError("the bounds are not whole numbers")
    if last - first > _MAX_TERMS:
        raise TooLargeError(f"more than {_MAX_TERMS} terms")
    name = index.name if isinstance(index, Symbol) else ""
    terms = [
        evaluate(body, {**values, name: context.mpf(k)}, context)
        for k in range(int(first), int(last) + 1)
    ]
    return context.fsum(terms) if node.name == "sum" else context.fprod(terms)


def _integral(node: Op, values: Values, context: Any) -> Any:
    variable, low, high, body = node.args
    bounds = [
        context.mpf(sign) * context.inf if sign else evaluate(bound, values, context)
        for bound in (low, high)
        for sign in (_infinite(bound),)
    ]
    name = variable.name if isinstance(variable, Symbol) else ""
    value, error = context.quad(
        lambda x: evaluate(body, {**values, name: x}, context), bounds, error=True, maxdegree=7
    )
    if error > context.mpf(10) ** -12 * max(1, abs(value)):
        raise UndefinedError("the integral does not converge")
    return value


def _infinite(node: Node) -> int:
    if node == Op("infinity"):
        return 1
    return -1 if node == Op("neg", (Op("infinity"),)) else 0


_BINDERS: dict[str, Callable[[Op, Values, Any], Any]] = {
    "sum": _series,
    "product": _series,
    "integral": _integral,
}
