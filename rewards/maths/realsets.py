r"""Subsets of the real line: intervals, unions, differences, and inequalities in one variable."""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

from turngym.rewards.maths.nodes import (
    Group,
    Items,
    Node,
    Op,
    Relation,
    Symbol,
    UndefinedError,
    UnreadableError,
    symbols,
)
from turngym.rewards.maths.numeric import context_of, evaluate

__all__ = ["real_set", "same_set"]

MAX_PIECES = 200


class Piece(NamedTuple):
    """An interval; `low` and `high` are (value, side): side -1 just below, +1 just above it."""

    low: tuple[Any, int]
    high: tuple[Any, int]


Pieces = list[Piece]


def same_set(left: Node, right: Node) -> bool:
    """Tell whether two nodes describe the same subset of the real line.

    Raises:
        UnreadableError: a node describes no such set.
        UndefinedError: a bound has no value.
    """
    a, b = real_set(left), real_set(right)
    return len(a) == len(b) and all(
        _same_edge(x.low, y.low) and _same_edge(x.high, y.high) for x, y in zip(a, b, strict=True)
    )


def real_set(node: Node) -> Pieces:
    """Read a node as disjoint intervals in ascending order.

    Raises:
        UnreadableError: the node describes no subset of the real line, or one of too many pieces.
        UndefinedError: a bound has no value.
    """
    match node:
        case Op("set R"):
            return [Piece(_edge(_infinity(-1), 1), _edge(_infinity(1), -1))]
        case Op("cup", parts):
            return _union(piece for part in parts for piece in real_set(part))
        case Op("cap", parts):
            return functools.reduce(_intersection, map(real_set, parts))
        case Op("setminus", (left, right)):
            return _intersection(real_set(left), _complement(real_set(right)))
        case Group("{", items, "}"):
            return _union(_point(item) for item in items)
        case Group("(" | "[" as opening, (low, high), ")" | "]" as closing):
            return _interval(low, opening == "[", high, closing == "]")
        case Relation((Symbol(), inner), ("in",)):
            return real_set(inner)
        case Relation():
            return _from_relation(node)
        case Items(items, word):
            _same_variable(items)
            # "x < 1, x > 3" is a union, but "x != 1, x != 3" excludes both.
            both = word == "and" or all(getattr(item, "ops", ()) == ("!=",) for item in items)
            return real_set(Op("cap" if both else "cup", items))
    raise UnreadableError("no subset of the real line")


def _same_variable(items: Iterable[Node]) -> None:
    names: set[str] = set()
    for item in items:
        if not isinstance(item, Relation):
            raise UnreadableError("a list of values is no inequality")
        names |= symbols(item)
    if len(names) > 1:
        raise UnreadableError("inequalities in several variables")


def _infinity(sign: int) -> Any:
    return context_of(40).inf * sign


def _edge(value: Any, side: int) -> tuple[Any, int]:
    return (value, side)


def _value(node: Node) -> Any:
    if node == Op("infinity"):
        return _infinity(1)
    if node == Op("neg", (Op("infinity"),)):
        return _infinity(-1)
    value = evaluate(node, {}, context_of(40))
    if getattr(value, "imag", 0):
        raise UndefinedError("a bound is not real")
    return value.real


def _point(node: Node) -> Piece:
    value = _value(node)
    return Piece(_edge(value, -1), _edge(value, 1))


def _interval(low: Node, low_closed: bool, high: Node, high_closed: bool) -> Pieces:
    a, b = _value(low), _value(high)
    piece = Piece(_edge(a, -1 if low_closed else 1), _edge(b, 1 if high_closed else -1))
    if not _before(piece.low, piece.high):
        raise UnreadableError("an interval whose bounds are not ascending")
    return [piece]


def _from_relation(node: Relation) -> Pieces:
    """Read `a < x <= b`, `x > a`, `x != a` with constant bounds."""
    whole = real_set(Op("set R"))
    if not any(isinstance(term, Symbol) for term in node.terms):
        raise UnreadableError("no bare variable in the inequality")
    for left, op, right in zip(node.terms, node.ops, node.terms[1:], strict=False):
        if isinstance(right, Symbol):
            left, right, op = right, left, _FLIPPED.get(op, op)
        if not isinstance(left, Symbol):
            raise UnreadableError("no bare variable in the inequality")
        whole = _intersection(whole, _half_line(op, right))
    return whole


_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


def _half_line(op: str, bound: Node) -> Pieces:
    value = _value(bound)
    low, high = _edge(_infinity(-1), 1), _edge(_infinity(1), -1)
    match op:
        case "<" | "<=":
            return [Piece(low, _edge(value, 1 if op == "<=" else -1))]
        case ">" | ">=":
            return [Piece(_edge(value, -1 if op == ">=" else 1), high)]
        case "=":
            return [Piece(_edge(value, -1), _edge(value, 1))]
        case "!=":
            return [Piece(low, _edge(value, -1)), Piece(_edge(value, 1), high)]
    raise UnreadableError(f"{op!r} is no inequality")


def _close(a: Any, b: Any) -> bool:
    return bool(a == b or abs(a - b) < 1e-30 * max(abs(a), abs(b), 1e-30))


def _same_edge(a: tuple[Any, int], b: tuple[Any, int]) -> bool:
    return a[1] == b[1] and _close(a[0], b[0])


def _before(a: tuple[Any, int], b: tuple[Any, int]) -> bool:
    return a[1] < b[1] if _close(a[0], b[0]) else bool(a[0] < b[0])


def _union(pieces: Iterable[Piece]) -> Pieces:
    merged: Pieces = []
    for piece in sorted(pieces):
        if len(merged) > MAX_PIECES:
            raise UnreadableError(f"more than {MAX_PIECES} intervals")
        if merged and not _before(merged[-1].high, piece.low):
            if _before(merged[-1].high, piece.high):
                merged[-1] = Piece(merged[-1].low, piece.high)
        else:
            merged.append(piece)
    return merged


def _complement(pieces: Pieces) -> Pieces:
    edges = [_edge(_infinity(-1), 1)]
    for piece in pieces:
        edges += [piece.low, piece.high]
    edges.append(_edge(_infinity(1), -1))
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [Piece(low, high) for low, high in pairs if _before(low, high)]


def _intersection(left: Pieces, right: Pieces) -> Pieces:
    return _complement(_union([*_complement(left), *_complement(right)]))
