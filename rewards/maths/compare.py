"""Whether two trees say the same thing: structure first, then values."""

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

from turngym.rewards.maths.exact import rational
from turngym.rewards.maths.identity import proportional
from turngym.rewards.maths.nodes import (
    Group,
    Items,
    Matrix,
    Node,
    Number,
    Op,
    Quantity,
    Relation,
    Symbol,
    Text,
    TooLargeError,
    UndefinedError,
    UnreadableError,
    symbols,
)
from turngym.rewards.maths.realsets import same_set
from turngym.rewards.maths.shapes import is_name, normal, turned
from turngym.rewards.maths.units import read_unit, share_a_word
from turngym.rewards.maths.values import MIN_DIGITS, equal, nearly

__all__ = ["same"]

MAX_PAIRS = 10_000
"""Comparisons between members that are not plain rational numbers."""

_SET_OPS = ("cup", "cap", "setminus")


def same(answer: Node, gold: Node) -> bool:
    """Tell whether an answer equals the gold answer.

    Sets ignore order and repetition, lists without brackets ignore order, tuples and intervals
    ignore nothing. What gold leaves open (a unit, a name before `=`) the answer may add, and what
    gold spells out the answer may leave out; it must not contradict it.

    Raises:
        UnreadableError, UndefinedError, TooLargeError: the comparison cannot be made.
    """
    answer, gold = normal(answer), normal(gold)
    if answer == gold:
        return True
    for rule in (_relations, _matrices, _collections, _words, _quantities):
        if (verdict := rule(answer, gold)) is not None:
            return verdict
    return equal(answer, gold)


def _relations(answer: Node, gold: Node) -> bool | None:
    if isinstance(answer, Relation) and isinstance(gold, Relation):
        return _two_relations(answer, gold)
    if isinstance(answer, Relation):
        return _relation_for(answer, gold, lambda value: same(value, gold))
    if isinstance(gold, Relation):
        return _relation_for(gold, answer, lambda value: same(answer, value))
    return None


def _relation_for(relation: Relation, other: Node, compare: Any) -> bool:
    if set(relation.ops) <= {"=", "~"}:
        value = _stated(relation)
        return value is not None and bool(compare(value))
    return _is_set(other) and same_set(relation, other)


def _stated(relation: Relation) -> Node | None:
    """Value that a chain of equalities states: the last exact term of a chain that is true."""
    terms = relation.terms
    if "~" in relation.ops:
        exact = relation.ops.index("~") + 1
        exact += is_name(terms[exact - 1])
        if not all(nearly(terms[exact - 1], term) for term in terms[exact:]):
            return None
        terms = terms[:exact]
    plain = (Symbol, Number, Op)
    constants = [term for term in terms if isinstance(term, plain) and not symbols(term)]
    if any(not equal(a, b) for a, b in pairwise(constants)):
        return None
    first, last = terms[0], terms[-1]
    if isinstance(last, Symbol) and not symbols(first):
        return first
    return last if is_name(first) or not symbols(last) else None


def _two_relations(answer: Relation, gold: Relation) -> bool:
    for candidate in (answer, turned(answer)):
        if candidate.ops == gold.ops and _pairwise(candidate.terms, gold.terms):
            return True
    if answer.ops == ("=",) and gold.ops == ("=",):
        return _equations(answer, gold)
    if symbols(answer) != symbols(gold) or len(symbols(gold)) != 1:
        return False
    return same_set(answer, gold)


def _equations(answer: Relation, gold: Relation) -> bool:
    names = (answer.terms[0], gold.terms[0])
    values = (answer.terms[1], gold.terms[1])
    if all(map(is_name, names)):
        free = symbols(values[0]) or any(isinstance(name, Text) for name in names)
        if free and same(*values):
            return True
    if not all(isinstance(term, Number | Symbol | Op) for term in (*answer.terms, *gold.terms)):
        return False
    sides = [
        Op("+", (left, Op("neg", (right,)))) for left, right in zip(names, values, strict=True)
    ]
    return proportional(sides[0], sides[1])


def _matrices(answer: Node, gold: Node) -> bool | None:
    if isinstance(answer, Matrix) and isinstance(gold, Matrix):
        return len(answer.rows) == len(gold.rows) and all(
            _pairwise(a, b) for a, b in zip(answer.rows, gold.rows, strict=True)
        )
    return False if isinstance(answer, Matrix) or isinstance(gold, Matrix) else None


def _pairwise(left: Sequence[Node], right: Sequence[Node]) -> bool:
    return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))


def _kind(node: Node) -> str:
    if isinstance(node, Items):
        return "points" if _is_set(node) else "list"
    if isinstance(node, Group):
        return "set" if node.left == "{" else "tuple"
    return "points" if _is_set(node) else ""


def _is_set(node: Node) -> bool:
    if isinstance(node, Items):
        bounds = [item for item in node.items if isinstance(item, Relation) and item.ops != ("=",)]
        return len(bounds) == len(node.items) and len(symbols(node)) == 1
    if isinstance(node, Op):
        return node.name in _SET_OPS or node.name.startswith("set ")
    return isinstance(node, Group)


def _members(node: Node) -> Sequence[Node]:
    return node.items if isinstance(node, Items | Group) else (node,)


def _collections(answer: Node, gold: Node) -> bool | None:
    kinds = {_kind(answer), _kind(gold)}
    if kinds == {""}:
        return None
    a, b = _members(answer), _members(gold)
    if kinds <= {"list", "tuple"} and "tuple" in kinds:
        # "1, 2" may stand for (1, 2) but not for an interval that has an end.
        fences = {node.left + node.right for node in (answer, gold) if isinstance(node, Group)}
        return (fences == {"()"} or (kinds == {"tuple"} and len(fences) == 1)) and _pairwise(a, b)
    if kinds & {"tuple", "points"}:
        return _is_set(answer) and _is_set(gold) and same_set(answer, gold)
    return _unordered(a, b, repeat="set" not in kinds)


def _unordered(left: Sequence[Node], right: Sequence[Node], *, repeat: bool) -> bool:
    """Match members whatever their order; with `repeat`, each as often as it is written."""
    a, b = ([_key(node) for node in side] for side in (left, right))
    if None not in a and None not in b:
        return Counter(a) == Counter(b) if repeat else set(a) == set(b)
    if repeat and len(left) != len(right):
        return False
    if len(left) * len(right) > MAX_PAIRS:
        raise TooLargeError(f"more than {MAX_PAIRS} pairs of members")
    matches = [[_is_same(x, y) for y in right] for x in left]
    if not repeat:
        return all(map(any, matches)) and all(map(any, zip(*matches, strict=True)))
    free = list(range(len(right)))
    for row in matches:
        column = next((k for k in free if row[k]), None)
        if column is None:
            return False
        free.remove(column)
    return True


def _is_same(answer: Node, gold: Node) -> bool:
    try:
        return same(answer, gold)
    except (UnreadableError, UndefinedError, TooLargeError):
        return False


def _key(node: Node) -> Any:
    """Hashable value of a node made of rational numbers only, else None."""
    if isinstance(node, Group) and node.left != "{":
        keys = tuple(_key(item) for item in node.items)
        return None if None in keys else (node.left, node.right, *keys)
    if not isinstance(node, Number | Op) or getattr(node, "digits", 0) >= MIN_DIGITS:
        return None
    try:
        return rational(node)
    except (UndefinedError, TooLargeError):
        return None


def _words(answer: Node, gold: Node) -> bool | None:
    if isinstance(answer, Text) and isinstance(gold, Text):
        return plain(answer.text) == plain(gold.text)
    return False if isinstance(answer, Text) or isinstance(gold, Text) else None


def plain(text: str) -> str:
    """Lower-case words without punctuation."""
    return " ".join(re.sub(r"[^\w\s]", " ", text).casefold().split())


def _quantities(answer: Node, gold: Node) -> bool | None:
    (a, label), (b, gold_label) = _measured(answer), _measured(gold)
    if not label and not gold_label:
        return None
    unit, gold_unit = read_unit(label), read_unit(gold_label)
    if not label or not gold_label:
        return same(a, b)
    if unit is None or gold_unit is None:
        return share_a_word(label, gold_label) and same(a, b)
    if unit == gold_unit:
        return same(a, b)
    return unit.dimension == gold_unit.dimension and same(
        _scaled(a, unit.factor), _scaled(b, gold_unit.factor)
    )


def _measured(node: Node) -> tuple[Node, str]:
    """Value and label; an angle in degrees is a quantity."""
    match node:
        case Quantity(value, unit):
            return value, unit
        case Op("degree", (value,)):
            return value, "°"
        case Op("neg", (Op("degree", (value,)),)):
            return Op("neg", (value,)), "°"
    return node, ""


def _scaled(node: Node, factor: Fraction) -> Node:
    return Op("*", (node, Number(factor)))
