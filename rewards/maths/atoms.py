"""The smallest parts of an expression: numbers, names, functions, brackets, matrices."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, cast

from turngym.rewards.maths.nodes import (
    Group,
    Items,
    Matrix,
    Node,
    Number,
    Op,
    Symbol,
    Text,
    UnreadableError,
    walk,
)
from turngym.rewards.maths.notation import Token

__all__ = ["END", "MAX_DEPTH", "AtomReader", "is_proper_fraction", "subscripted"]

MAX_DEPTH = 100
END = Token("end", "")
_FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh",
    "ln", "exp",
}  # fmt: skip
_CONSTANTS = {"pi": "pi", "infty": "infinity"}
_LETTERS = {"e": "e", "i": "i"}
_GREEK = {
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "kappa", "lambda", "mu",
    "nu", "xi", "rho", "sigma", "tau", "phi", "chi", "psi", "omega", "Delta", "Gamma", "Lambda",
    "Omega", "Phi", "Psi", "Sigma", "Theta", "ell", "hbar", "triangle", "angle",
}  # fmt: skip
_DECORATIONS = {"vec", "hat", "overline", "bar", "tilde", "overrightarrow", "widehat", "mathcal"}
_MATRICES = {"matrix", "pmatrix", "bmatrix", "array", "smallmatrix", "cases"}
_LEFT = {"(": "(", "[": "[", r"\{": "{", "langle": "("}
_RIGHT = {")": ")", "]": "]", r"\}": "}", "rangle": ")"}
_SPANS = {"lfloor": ("rfloor", "floor"), "lceil": ("rceil", "ceil"), "|": ("|", "abs")}
_BOUND = {"sum": "sum", "prod": "product"}


class AtomReader(ABC):
    """A cursor over tokens that reads atoms; the rules above them are a subclass's."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens = list(tokens)
        self.at = 0
        self.depth = 0
        self.bars = 0

    @abstractmethod
    def statement(self) -> Node:
        """Read items joined by commas or words."""

    @abstractmethod
    def factor(self) -> Node:
        """Read a power."""

    @abstractmethod
    def product(self) -> Node:
        """Read a product."""

    @abstractmethod
    def starts_factor(self, last: Node) -> bool:
        """Tell whether another factor of an implied product follows `last`."""

    @property
    def token(self) -> Token:
        """The next token, `END` after the last."""
        return self.tokens[self.at] if self.at < len(self.tokens) else END

    def take(self, text: str) -> bool:
        """Skip an operator or macro if it comes next."""
        if self.token.text == text and self.token.kind in ("operator", "macro"):
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        """Skip an operator or macro that must come next."""
        if not self.take(text):
            raise UnreadableError(f"expected {text!r}, got {self.token.text[:40] or 'the end'!r}")

    def nested(self, rule: Callable[[], Node]) -> Node:
        """Apply a rule one level deeper."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise UnreadableError(f"nested deeper than {MAX_DEPTH}")
        node = rule()
        self.depth -= 1
        return node

    def atom(self) -> Node:
        """Read one atom."""
        token = self.token
        self.at += 1
        if token.kind == "number" and token.node is not None:
            return token.node
        if token.kind == "symbol":
            return Op(_LETTERS[token.text]) if token.text in _LETTERS else Symbol(token.text)
        if token.text in _SPANS and token.kind != "text":
            return self._span(*_SPANS[token.text])
        if token.kind in ("operator", "macro") and token.text in _LEFT:
            return self._bracket(_LEFT[token.text])
        if token.text == "{" and token.kind == "operator":
            node = self.nested(self.statement)
            if self.take("choose"):
                node = Op("binom", (node, self.nested(self.statement)))
            self.expect("}")
            return node
        if token.kind == "macro":
            return self._macro(token.text)
        raise UnreadableError(f"unexpected {token.text[:40] or 'end'!r}")

    def _span(self, right: str, name: str) -> Node:
        outer, self.bars = self.bars, int(name == "abs")
        node = self.nested(self.statement)
        self.expect(right)
        self.bars = outer
        return Op(name, (node,))

    def _bracket(self, left: str) -> Node:
        outer, self.bars = self.bars, 0
        empty = self.token.text in _RIGHT
        condition = left == "{" and self._skip_builder()
        inside = None if empty else self.nested(self.statement)
        right = _RIGHT.get(self.token.text) if self.token.kind in ("operator", "macro") else None
        if right is None or (left == "{") != (right == "}"):
            raise UnreadableError(f"bracket {left!r} is not closed")
        self.at += 1
        self.bars = outer
        if condition and inside is not None:
            return inside
        if inside is None:
            items: tuple[Node, ...] = ()
        elif isinstance(inside, Items):
            items = inside.items
        elif left == "{":
            items = (inside,)
        else:
            return inside
        return Group(cast(Any, left), items, cast(Any, right))

    def _skip_builder(self) -> bool:
        r"""Skip `x \mid` or `x :` of a set that is given by a condition on x."""
        head = self.tokens[self.at : self.at + 4]
        texts = [token.text for token in head]
        for size in (2, 4):
            if len(head) >= size and head[0].kind == "symbol" and texts[size - 1] in ("|", ":"):
                if size == 4 and texts[1:3] != ["in", "set R"]:
                    continue
                self.at += size
                return True
        return False

    def _macro(self, name: str) -> Node:
        if name in _CONSTANTS:
            return Op(_CONSTANTS[name])
        if name in _GREEK:
            return Symbol(name)
        if name.startswith("set "):
            return Op(name)
        if name == "emptyset":
            return Group("{", (), "}")
        if name in ("frac", "binom"):
            arguments = (self._argument(split=True), self._argument(split=True))
            return Op("binom", arguments) if name == "binom" else _quotient(*arguments)
        if name == "sqrt":
            return self._root()
        if name in _FUNCTIONS or name in ("log", "lg"):
            return self._function(name)
        if name in _BOUND or name == "int":
            return self._bounded(name)
        if name in _DECORATIONS:
            return Symbol(f"{name} {self.raw()}")
        if name.startswith("begin ") and name[6:] in _MATRICES:
            return self._matrix(name[6:])
        raise UnreadableError(f"macro {name[:40]!r} is not known")

    def _argument(self, *, split: bool = False) -> Node:
        r"""Read a macro's argument; without braces, `\frac12` takes one digit at a time."""
        token = self.token
        node = token.node
        if split and isinstance(node, Number) and node.whole and len(node.whole) > 1:
            rest = node.whole[1:]
            tail = Token("number", rest, Number(Fraction(rest), whole=rest))
            self.tokens[self.at] = tail
            return Number(Fraction(node.whole[0]), whole=node.whole[0])
        return self.nested(self.atom)

    def _root(self) -> Node:
        index: Node = Number(Fraction(2))
        if self.take("["):
            index = self.nested(self.product)
            self.expect("]")
        return Op("root", (self._argument(), index))

    def _function(self, name: str) -> Node:
        base: Node | None = None
        power: Node | None = None
        if name in ("log", "lg"):
            base = self._argument() if self.take("_") else Number(Fraction(10))
        if self.take("^"):
            power = self._argument()
        if self.token.text in ("(", "["):
            argument = self.nested(self.atom)
        else:
            factors = [self.nested(self.factor)]
            while self.starts_factor(factors[-1]) and self.token.text not in {*_FUNCTIONS, "log"}:
                factors.append(self.nested(self.factor))
            argument = factors[0] if len(factors) == 1 else Op("*", tuple(factors))
        if power == Op("neg", (Number(Fraction(1), whole="1"),)) and name in ("sin", "cos", "tan"):
            return Op(f"a{name}", (argument,))
        value = Op("log", (argument, base)) if base is not None else Op(name, (argument,))
        return value if power is None else Op("^", (value, power))

    def _bounded(self, name: str) -> Node:
        bounds: dict[str, Node] = {}
        while self.token.text in ("_", "^") and self.token.text not in bounds:
            mark = self.token.text
            self.at += 1
            bounds[mark] = self._index() if mark == "_" and name != "int" else self._argument()
        if len(bounds) < 2:
            raise UnreadableError(f"{name} without both bounds")
        low, high = bounds["_"], bounds["^"]
        if name != "int":
            if Op("infinity") in walk(high):
                raise UnreadableError(f"{name} of infinitely many terms")
            if not isinstance(low, Group) or not isinstance(low.items[0], Symbol):
                raise UnreadableError(f"{name} without an index")
            body = self.nested(self.product)
            return Op(_BOUND[name], (low.items[0], low.items[1], high, body))
        return self._integral(low, high)

    def _index(self) -> Node:
        """Read `{k = 1}` under a sum."""
        self.expect("{")
        index = self.nested(self.product)
        self.expect("=")
        low = self.nested(self.product)
        self.expect("}")
        return Group("(", (index, low), ")")

    def _integral(self, low: Node, high: Node) -> Node:
        start = self.at
        for at in range(start, len(self.tokens) - 1):
            pair = self.tokens[at : at + 2]
            if pair[0].text == "d" and pair[1].kind == "symbol":
                inner = type(self)(self.tokens[start:at])
                inner.depth = self.depth + 1
                body = inner.statement() if at > start else Number(Fraction(1))
                if inner.token is not END:
                    raise UnreadableError("the integrand cannot be read")
                self.at = at + 2
                return Op("integral", (Symbol(pair[1].text), low, high, body))
        raise UnreadableError("integral without a variable")

    def raw(self) -> str:
        """Text of the next token or braced tokens."""
        if not self.take("{"):
            self.at += 1
            return self.tokens[self.at - 1].text if self.at <= len(self.tokens) else ""
        start = self.at
        while self.token is not END and not self.take("}"):
            self.at += 1
        return "".join(token.text for token in self.tokens[start : self.at - 1])

    def _matrix(self, name: str) -> Node:
        rows: list[tuple[Node, ...]] = []
        row: list[Node] = []
        while not self.take(f"end {name}"):
            if self.take("hline") or self.take("&"):
                continue
            if self.take("\\\\"):
                if row:
                    rows.append(tuple(row))
                row = []
                continue
            row.append(self.nested(self.statement))
        if row:
            rows.append(tuple(row))
        if name == "cases" and all(len(cells) == 1 for cells in rows):
            return Items(tuple(cells[0] for cells in rows))
        if name == "cases" or not rows or len({len(cells) for cells in rows}) > 1:
            raise UnreadableError("the rows differ in length")
        return Matrix(tuple(rows))


def _quotient(top: Node, bottom: Node) -> Node:
    return Op("*", (top, Op("inverse", (bottom,))))


def is_proper_fraction(node: Node) -> bool:
    r"""Tell whether a node is `\frac{a}{b}` of whole numbers with a < b.

    Such a fraction after a whole number makes a mixed number.
    """
    match node:
        case Op("*", (Number(top, _, _, str()), Op("inverse", (Number(bottom, _, _, str()),)))):
            return 0 < top < bottom
    return False


def subscripted(node: Node, subscript: str) -> Node:
    """Attach a subscript: part of a variable's name, or the base of a numeral.

    Raises:
        UnreadableError: on anything else.
    """
    if isinstance(node, Symbol):
        return replace(node, name=f"{node.name}_{subscript}")
    if isinstance(node, Number) and node.whole and subscript.isdigit():
        if int(subscript[:4]) == 10:
            return node
        return Op("numeral", (Text(node.whole.lstrip("0") or "0"), Text(subscript)))
    raise UnreadableError(f"a subscript on {type(node).__name__.lower()}")
