r"""From tokens to a tree: a precedence parser for short written answers.

    statement   items joined by `,` `;` `and` `or`
    item        a chain of relations, or words
    quantity    an expression and its unit
    expression  ratios, unions, sums, products (written or implied), powers, postfixes, atoms

Nesting is bounded, so that no input can exhaust the stack.
"""

from fractions import Fraction
from typing import Literal, cast

from turngym.rewards.maths.atoms import (
    END,
    AtomReader,
    is_proper_fraction,
    subscripted,
)
from turngym.rewards.maths.nodes import (
    Items,
    Node,
    Number,
    Op,
    Quantity,
    Relation,
    Text,
    UnreadableError,
)
from turngym.rewards.maths.notation import Token
from turngym.rewards.maths.units import MULTIPLES

__all__ = ["parse"]

MAX_MARKS = 8
"""Signs in front of a product, marks behind a power."""

_RELATIONS = {
    "=": "=", "<": "<", ">": ">", "le": "<=", "ge": ">=", "ne": "!=", "in": "in", "equiv": "=",
    "approx": "~",
}  # fmt: skip
_SET_OPS = ("cup", "cap", "setminus")
_SUM_OPS = ("+", "-", "pm", "mp")
_NO_FACTOR = {*_RELATIONS, *_SET_OPS, *_SUM_OPS, "circ", "rangle", "rfloor", "rceil"} | {
    "ldots",
    "choose",
}
_CURRENCY = {r"\$": "$", "€": "€", "£": "£"}
_LABEL_MARKS = ("^", "/", "-", "{", "}")
_WORDLIKE = {"-", "'", ".", ":", "(", ")", "!", "?"}


def parse(tokens: list[Token]) -> Node:
    """Read a whole answer.

    Raises:
        UnreadableError: the tokens are no answer this grammar knows.
    """
    parser = _Parser(tokens)
    node = parser.statement()
    if parser.token is not END:
        raise UnreadableError(f"unexpected {parser.token.text[:40]!r}")
    return node


class _Parser(AtomReader):
    def statement(self) -> Node:
        items = [self.item()]
        word = ""
        while self._joins():
            while self._joins():
                word = self.token.text if self.token.kind == "joiner" else word
                self.at += 1
            if self.token is END:
                break
            items.append(self.item())
        if len(items) == 1:
            return items[0]
        return Items(tuple(items), cast(Literal["", "and", "or"], word))

    def _joins(self) -> bool:
        return self.token.kind == "joiner" or self._operator() in (",", ";")

    def _operator(self) -> str:
        """Text of the next token unless it is a number, a variable or words."""
        return self.token.text if self.token.kind in ("operator", "macro") else ""

    def item(self) -> Node:
        terms = [self.quantity()]
        ops: list[str] = []
        while op := _RELATIONS.get(self._operator()):
            self.at += 1
            ops.append(op)
            terms.append(self.quantity())
        return Relation(tuple(terms), tuple(ops)) if ops else terms[0]

    def quantity(self) -> Node:
        if self.token.kind == "text":
            return self._words()
        following = self.tokens[self.at + 1].text if self.at + 1 < len(self.tokens) else ""
        negative = following in _CURRENCY and self.take("-")
        unit = _CURRENCY.get(self.token.text, "")
        self.at += bool(unit)
        value = self._ratio()
        if negative:
            value = Op("neg", (value,))
        if self.token.kind == "text":
            label = self._label()
            first, _, rest = label.partition(" ")
            if multiple := MULTIPLES.get(first.lower()):
                value = Op("*", (value, Number(Fraction(multiple))))
                label = rest
            if label.lower() in ("percent", "percentage", "pct"):
                return Op("percent", (value,))
            unit = unit or label
        return Quantity(value, unit) if unit else value

    def _words(self) -> Node:
        words: list[str] = []
        while self.token.kind in ("text", "number", "symbol") or self.token.text in _WORDLIKE:
            words.append(self.token.text)
            self.at += 1
        return Text(" ".join(words))

    def _label(self) -> str:
        r"""Read words and their powers, as in `\text{cm}^2` or `\text{m}/\text{s}`."""
        parts: list[str] = []
        while self.token.kind in ("text", "number") or self._operator() in _LABEL_MARKS:
            if self._operator() == "}" and parts.count("{") == parts.count("}"):
                break
            parts.append(f" {self.token.text}" if self.token.kind == "text" else self.token.text)
            self.at += 1
        return "".join(parts).strip()

    def _ratio(self) -> Node:
        start = self.at
        parts = [self._union()]
        while self.take(":"):
            parts.append(self._union())
        if len(parts) == 1:
            return parts[0]
        spelled = "".join(map(_as_written, self.tokens[start : self.at]))
        return Op("ratio", (Text(spelled), *parts))

    def _union(self) -> Node:
        left = self.nested(self._sum)
        changes = 0
        while (op := self._operator()) in _SET_OPS:
            self.at += 1
            right = self.nested(self._sum)
            if isinstance(left, Op) and left.name == op != "setminus":
                left = Op(op, (*left.args, right))
            else:
                left = Op(op, (left, right))
                changes += 1
            if changes > MAX_MARKS:
                raise UnreadableError(f"more than {MAX_MARKS} kinds of set operation in a row")
        return left

    def _sum(self) -> Node:
        terms = [self.product()]
        while (op := self._operator()) in _SUM_OPS:
            self.at += 1
            term = self.product()
            terms.append(term if op == "+" else Op("neg" if op == "-" else op, (term,)))
        return terms[0] if len(terms) == 1 else Op("+", tuple(terms))

    def product(self) -> Node:
        signs: list[str] = []
        while (op := self._operator()) in _SUM_OPS:
            self.at += 1
            if op == "-" and signs[-1:] == ["neg"]:
                signs.pop()
            elif op != "+":
                signs.append("neg" if op == "-" else op)
            if len(signs) > MAX_MARKS:
                raise UnreadableError(f"more than {MAX_MARKS} signs")
        factors = [self.factor()]
        while True:
            if self.take("*"):
                factors.append(self._signed())
            elif self.take("/"):
                factors.append(Op("inverse", (self._signed(),)))
            elif self.starts_factor(factors[-1]):
                factors.append(self._implied(factors))
            else:
                break
        node: Node = factors[0] if len(factors) == 1 else Op("*", tuple(factors))
        for sign in reversed(signs):
            node = Op(sign, (node,))
        return node

    def _implied(self, factors: list[Node]) -> Node:
        """Next factor of an implied product; a whole number and a proper fraction are one."""
        last = factors[-1]
        node = self.factor()
        if isinstance(last, Number) and last.whole and is_proper_fraction(node):
            factors.pop()
            return Op("+", (last, node))
        return node

    def starts_factor(self, last: Node) -> bool:
        token = self.token
        if token.kind == "number":
            return not isinstance(last, Number)
        if token.kind == "symbol":
            return True
        if token.text == "|":
            return self.bars == 0
        if token.kind == "macro":
            return token.text not in _NO_FACTOR and not token.text.startswith("end ")
        return token.kind == "operator" and token.text in ("(", "[", "{", r"\{")

    def _signed(self) -> Node:
        """Read a factor that may carry a sign, as after `*`, `/` and `^`."""
        negative = False
        while self._operator() in ("+", "-"):
            negative ^= self._operator() == "-"
            self.at += 1
        node = self.factor()
        return Op("neg", (node,)) if negative else node

    def factor(self) -> Node:
        return self.nested(self._power)

    def _power(self) -> Node:
        node = self._postfix(self.atom())
        if not self.take("^"):
            return node
        for mark, name in (("circ", "degree"), ("prime", "prime")):
            if self.take(mark) or self._braced(mark):
                return self._postfix(Op(name, (node,)))
        return self._postfix(Op("^", (node, self._signed())))

    def _braced(self, macro: str) -> bool:
        found = [token.text for token in self.tokens[self.at : self.at + 3]] == ["{", macro, "}"]
        self.at += 3 * found
        return found

    def _postfix(self, node: Node) -> Node:
        for _ in range(MAX_MARKS):
            if self.take("!"):
                node = Op("factorial", (node,))
            elif self.take("%"):
                node = Op("percent", (node,))
            elif self.take("'"):
                node = Op("prime", (node,))
            elif self.take("_"):
                node = subscripted(node, self.raw())
            else:
                break
        return node


def _as_written(token: Token) -> str:
    """Keep leading zeros, which tell a time from a ratio."""
    return getattr(token.node, "whole", None) or token.text
