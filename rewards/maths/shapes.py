"""Spelling trees out: plus-minus, `x = 1, 2`, nested lists, relations read from either end."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product

from turngym.rewards.maths.nodes import (
    Group,
    Items,
    Node,
    Op,
    Quantity,
    Relation,
    Symbol,
    Text,
    walk,
)

__all__ = ["FLIPPED", "is_name", "normal", "turned"]

FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_SIGNS = ("pm", "mp")
_MAX_SIGNS = 4


def normal(node: Node) -> Node:
    r"""Spell out plus-minus, `x = 1, 2`, `x \in \{1, 2\}` and nested lists."""
    node = _spread(node)
    if isinstance(node, Items):
        head, *rest = node.items
        if (
            isinstance(head, Relation)
            and head.ops in (("=",), ("in",))
            and not any(isinstance(item, Relation) for item in rest)
        ):
            node = replace(node, items=(head.terms[1], *rest))
        node = replace(node, items=tuple(_flat(map(_spread, node.items))))
    if isinstance(node, Relation) and node.ops == ("in",) and isinstance(node.terms[0], Symbol):
        return normal(node.terms[1])
    return node


def _flat(items: Iterable[Node]) -> Iterable[Node]:
    for item in items:
        if isinstance(item, Items):
            yield from item.items
        else:
            yield item


def _spread(node: Node) -> Node:
    r"""Turn `a \pm b` into two items; `\mp` takes the other sign, several `\pm` are independent."""
    marks = [part.name for part in walk(node) if isinstance(part, Op) and part.name in _SIGNS]
    if not marks or len(marks) > _MAX_SIGNS or isinstance(node, Items):
        return node
    linked = "mp" in marks
    choices = product((1, -1), repeat=1 if linked else len(marks))
    return Items(
        tuple(_signed(node, list(signs) * (len(marks) if linked else 1)) for signs in choices)
    )


def _signed(node: Node, signs: list[int]) -> Node:
    return _map(node, lambda part: _choose(part, signs))


def _choose(part: Op, signs: list[int]) -> Node:
    positive = (signs.pop(0) > 0) == (part.name == "pm")
    return part.args[0] if positive else Op("neg", part.args)


def _map(node: Node, choose: Callable[[Op], Node]) -> Node:
    if isinstance(node, Op):
        node = replace(node, args=tuple(_map(part, choose) for part in node.args))
        return choose(node) if node.name in _SIGNS else node
    if isinstance(node, Group):
        return replace(node, items=tuple(_map(part, choose) for part in node.items))
    if isinstance(node, Relation):
        return replace(node, terms=tuple(_map(part, choose) for part in node.terms))
    if isinstance(node, Quantity):
        return replace(node, value=_map(node.value, choose))
    return node


def is_name(node: Node) -> bool:
    """Tell whether a node can be what an answer is called: `x`, `AB`, `f(x)`, words."""
    if isinstance(node, Text | Symbol):
        return True
    if isinstance(node, Op) and node.name in ("*", "inverse", "prime"):
        return all(map(is_name, node.args))
    return isinstance(node, Group) and all(isinstance(item, Symbol) for item in node.items)


def turned(relation: Relation) -> Relation:
    """Read a chain of relations from its other end."""
    ops = tuple(FLIPPED.get(op, op) for op in reversed(relation.ops))
    return Relation(tuple(reversed(relation.terms)), ops)
