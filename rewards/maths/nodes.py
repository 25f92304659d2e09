"""The tree that an answer is read into."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

__all__ = [
    "Group",
    "Items",
    "Matrix",
    "Node",
    "Number",
    "Op",
    "Quantity",
    "Relation",
    "Symbol",
    "Text",
    "TooLargeError",
    "UndefinedError",
    "UnreadableError",
    "children",
    "symbols",
    "walk",
]


class UnreadableError(ValueError):
    """The text is no answer this grammar knows."""


class UndefinedError(ValueError):
    """The expression has no value: division by zero, a pole, an unfinished bound."""


class TooLargeError(ValueError):
    """The value exists, but writing it out would cost too much."""


@dataclass(frozen=True, slots=True)
class Number:
    """A literal number."""

    value: Fraction
    digits: int = field(default=0, compare=False)
    """Significant digits when written as a decimal, 0 for integers and repeating decimals."""

    places: int = field(default=0, compare=False)
    """Digits after the point."""

    whole: str | None = field(default=None, compare=False)
    """The digits of a plain integer as written; a TeX macro may take only the first of them."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable, subscript included."""

    name: str


@dataclass(frozen=True, slots=True)
class Op:
    """An operator, function or constant applied to its arguments."""

    name: str
    args: tuple["Node", ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """Bracketed items: a tuple, an interval or (with `{`) a set."""

    left: Literal["(", "[", "{"]
    items: tuple["Node", ...]
    right: Literal[")", "]", "}"]


@dataclass(frozen=True, slots=True)
class Items:
    """Several answers without brackets, joined by commas, `and` or `or`."""

    items: tuple["Node", ...]
    word: Literal["", "and", "or"] = ""


@dataclass(frozen=True, slots=True)
class Relation:
    """A chain of terms, `ops[i]` between `terms[i]` and `terms[i + 1]`."""

    terms: tuple["Node", ...]
    ops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of a matrix."""

    rows: tuple[tuple["Node", ...], ...]


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value with what it counts or measures."""

    value: "Node"
    unit: str


@dataclass(frozen=True, slots=True)
class Text:
    """Words."""

    text: str


Node = Number | Symbol | Op | Group | Items | Relation | Matrix | Quantity | Text


def children(node: Node) -> tuple[Node, ...]:
    """Return the direct parts of a node."""
    match node:
        case Op(_, parts) | Group(_, parts, _) | Items(parts, _) | Relation(parts, _):
            return parts
        case Matrix(rows):
            return tuple(cell for row in rows for cell in row)
        case Quantity(value, _):
            return (value,)
    return ()


def walk(node: Node) -> Iterator[Node]:
    """Yield a node and everything below it."""
    stack = [node]
    while stack:
        top = stack.pop()
        yield top
        stack.extend(children(top))


def symbols(node: Node) -> set[str]:
    """Names of the free variables in a node."""
    names: set[str] = set()
    bound: set[str] = set()
    for part in walk(node):
        if isinstance(part, Symbol):
            names.add(part.name)
        elif isinstance(part, Op) and part.name in ("sum", "product", "integral"):
            bound.update(index.name for index in part.args[:1] if isinstance(index, Symbol))
    return names - bound
