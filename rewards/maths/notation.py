r"""From text to tokens: one spelling for everything that looks different and means the same.

`\dfrac12`, `\frac{1}{2}` and `½` give the same tokens, as do `70,000`, `70{,}000` and `70\,000`.
Linear in the length of the text.
"""
# ruff: noqa: RUF001 - the table's keys are the characters that look like others

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from turngym.rewards.maths.nodes import Node, Number, Op, Text, UnreadableError
from turngym.rewards.maths.units import CLOCK_HALVES, SHORT_WORDS, UNIT_LETTERS

__all__ = ["MAX_TOKENS", "Grouping", "Token", "canonical", "clean", "tokenize"]

MAX_TOKENS = 50_000
MAX_DIGITS = 4_000

_UNICODE = {
    **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d", "-"),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad", ""),
    **dict.fromkeys("×✕⨯", r"\times "),
    **dict.fromkeys("·⋅∙•", r"\cdot "),
    "÷": r"\div ", "∕": "/", "⁄": "/", "√": r"\sqrt ", "π": r"\pi ", "∞": r"\infty ",
    "°": r"^{\circ}", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ",
    "∓": r"\mp ", "∪": r"\cup ", "∩": r"\cap ", "∖": r"\setminus ", "∈": r"\in ",
    "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℚ": r"\mathbb{Q}",
    "ℕ": r"\mathbb{N}", "ℂ": r"\mathbb{C}", "⟨": r"\langle ", "⟩": r"\rangle ", "⌊": r"\lfloor ",
    "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "…": r"\ldots ", "‰": r"\permil ",
    "∫": r"\int ", "∑": r"\sum ", "∏": r"\prod ", "θ": r"\theta ", "α": r"\alpha ",
    "β": r"\beta ", "γ": r"\gamma ", "φ": r"\phi ", "λ": r"\lambda ", "μ": r"\mu ",
    "′": "'", "’": "'", "“": '"', "”": '"', "，": ",", "：": ":", "；": ";", "。": ".",
}  # fmt: skip
_TABLE = str.maketrans(_UNICODE)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-")
_VULGAR = re.compile("[¼-¾⅐-⅞]")

_SPACE = re.compile(
    r"\s+|~|\\[,;:!> ]|\\(?:q?quad|left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits"
    r"|boxed|fbox|framebox|underline|bf|rm|it|thinspace|mathstrut|notag|hfill"
    r"|(?:phantom|hspace|color|textcolor)\s?\{[^{}]*\})(?![A-Za-z])"
)
_LETTER_TIMES = re.compile(r"(?<=\d)\s{0,3}[xX]\s{0,3}(?=10\s{0,3}\^)")
_SEP = r"(?:\{,\}|,\\!|\\!,|\\,|\\;|\\:|\\ |~|[ \u00a0\u2009\u202f])\s{0,4}"
_TAIL = r"(?:\.(?P<fraction>\d+))?"
_GROUPED = re.compile(rf"(?P<whole>\d{{1,3}}(?:{_SEP}\d{{3}}){{1,100}})(?!\d|,\d|\s*/){_TAIL}")
_COMMAS = re.compile(
    rf"(?P<whole>[1-9]\d{{0,2}}(?:(?:,|{_SEP})\d{{3}}){{1,100}})(?!\d|,\d|\s*/){_TAIL}"
)
_COMMA_POINT = re.compile(r"(?P<whole>\d+)\{,\}(?P<fraction>\d+)")
_PLAIN = re.compile(rf"(?P<whole>\d+){_TAIL}|\.(?P<bare>\d+)")
_REPEATING = re.compile(
    r"(?P<whole>\d{0,400})\.(?P<start>\d{0,400})"
    r"(?:\\(?:overline|bar|dot)\s*\{?(?P<bar>\d{1,400})\}?|\((?P<paren>\d{1,40})\)(?=\s*$))"
)
_ENDLESS = re.compile(
    r"(?P<whole>\d{0,400})\.(?P<start>\d{0,60}?)(?P<bar>(?P<cycle>\d{1,20})(?P=cycle)(?P=cycle)?)"
    r"(?:\.\.\.|\\(?:l|c)?dots(?![A-Za-z]))"
)
_MIXED = re.compile(r"(?P<whole>\d{1,9})\s+(?P<top>\d{1,9})\s*/\s*(?P<bottom>\d{1,9})(?![\d/.])")
_SCIENTIFIC = re.compile(
    r"(?P<number>\d{1,400}(?:\.\d{1,400})?)[eE](?P<power>[+-]?\d{1,9})(?!\w|\.\d)"
)

_TEXT = re.compile(
    r"\\(?P<font>text|textbf|textit|textrm|textsf|texttt|textnormal|mbox|hbox|mathrm|mathbf|mathit"
    r"|mathsf|mathtt|boldsymbol|bm|operatorname\*?)(?![A-Za-z])\s*(?:\{(?P<body>[^{}\\]{0,200})\})?"
)
_LEADING_NUMBER = re.compile(r"\s*-?\d[\d.,:/]*(?=\s*[A-Za-z])")
_BLACKBOARD = re.compile(r"\\(?:mathbb|Bbb|mathbf|bold)\s*\{?\s*(?P<set>[NZQRC])\s*\}?(?![A-Za-z])")
_ENVIRONMENT = re.compile(
    r"\\(?P<edge>begin|end)\s*\{(?P<name>[A-Za-z]+\*?)\}(?:\s*\{[lcr|\s]*\})?"
)
_MACRO = re.compile(r"\\(?:[A-Za-z]+|.)", re.DOTALL)
_WORD = re.compile(r"[A-Za-z]+")
_OPERATOR = re.compile(r"\*\*|<=|>=|!=|->|\.\.\.|.", re.DOTALL)

_SAME_MACRO = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom",
    "leq": "le", "leqslant": "le", "geq": "ge", "geqslant": "ge", "neq": "ne", "lt": "<",
    "gt": ">", "to": "->", "rightarrow": "->", "ast": "*", "times": "*", "cdot": "*", "div": "/",
    "colon": ":", "lbrace": r"\{", "rbrace": r"\}", "lbrack": "[", "rbrack": "]", "{": r"\{",
    "}": r"\}", "varnothing": "emptyset", "dots": "ldots", "cdots": "ldots", "dotsc": "ldots",
    "dotsb": "ldots", "backslash": "setminus", "lvert": "|", "rvert": "|", "vert": "|",
    "mid": "|", "%": "%", "$": r"\$", "degree": "circ", "land": "and", "wedge": "and",
    "lor": "or", "vee": "or", "varphi": "phi", "varepsilon": "epsilon", "arcsin": "asin",
    "arccos": "acos", "arctan": "atan", "sim": "approx", "simeq": "approx", "&": "&",
    "newline": r"\\", "cr": r"\\",
}  # fmt: skip
_PLAIN_WORDS = {
    "sqrt", "pi", "sin", "cos", "tan", "cot", "csc", "log", "ln", "exp", "asin", "acos",
    "atan", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "theta", "alpha", "beta",
    "gamma", "lambda", "infty", "infinity", "oo",
}  # fmt: skip


Grouping = Literal["outside", "always", "never"]


@dataclass(frozen=True, slots=True)
class Token:
    """One token; `kind` is `number`, `symbol`, `macro`, `text`, `joiner` or `operator`."""

    kind: str
    text: str
    node: Node | None = None
    """Value of a number."""


def clean(text: str) -> str:
    r"""Spell Unicode mathematics in LaTeX and strip delimiters and closing punctuation.

    >>> clean("$x² + ½$.")
    'x^{2} + \\frac{1}{2}'
    """
    if not text.isascii():
        text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ]+", lambda m: f"^{{{m[0].translate(_RAISED)}}}", text)
        text = re.sub("[₀₁₂₃₄₅₆₇₈₉₊₋]+", lambda m: f"_{{{m[0].translate(_LOWERED)}}}", text)
        text = _VULGAR.sub(_vulgar, text).translate(_TABLE)
        text = unicodedata.normalize("NFKC", text).translate(_TABLE)
    text = _LETTER_TIMES.sub(r"\\times ", _without_full_stop(text.strip()))
    for left, right in ((r"\(", r"\)"), (r"\[", r"\]"), ("$$", "$$"), ("$", "$")):
        if len(text) > len(left) + len(right) and text.startswith(left) and text.endswith(right):
            text = text[len(left) : -len(right)].strip()
    return _without_full_stop(text)


def _without_full_stop(text: str) -> str:
    if text.endswith("..."):
        return text
    stop = len(text)
    while stop and text[stop - 1] in ".,;: \t\n":
        stop -= 1
    if 0 < stop < len(text) and text[stop - 1] == "\\" and not text[:stop].endswith("\\\\"):
        stop += 1  # the second half of a spacing macro
    return text[:stop].removesuffix("\\\\").rstrip()


def _vulgar(match: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", match[0]).partition("⁄")
    return rf"\frac{{{top}}}{{{bottom}}}"


def canonical(tokens: list[Token]) -> str:
    """Join tokens into the spelling that equal notation shares."""
    return "\x1f".join(token.text for token in tokens)


def tokenize(text: str, *, group: Grouping = "outside") -> list[Token]:
    r"""Split cleaned text into tokens.

    Args:
        text: output of `clean`.
        group: where `1,234` is one number: outside brackets, always or never. `1{,}234` always is.

    Raises:
        UnreadableError: more than `MAX_TOKENS` tokens.

    >>> [token.text for token in tokenize(r"70{,}000 \text{ cm}")]
    ['70000', 'cm']
    """
    return _Lexer(text, group).run()


class _Lexer:
    def __init__(self, text: str, group: Grouping) -> None:
        self.text = text
        self.group = group
        self.tokens: list[Token] = []
        self.depth = 0

    def run(self) -> list[Token]:
        at = 0
        while at < len(self.text):
            if space := _SPACE.match(self.text, at):
                at = space.end()
                continue
            at = self._one(at)
            if len(self.tokens) > MAX_TOKENS:
                raise UnreadableError(f"more than {MAX_TOKENS} tokens")
        return self.tokens

    def _add(self, kind: str, text: str, node: Node | None = None) -> None:
        self.tokens.append(Token(kind, text, node))

    def _one(self, at: int) -> int:
        char = self.text[at]
        if char.isdigit() or (char == "." and self.text[at + 1 : at + 2].isdigit()):
            return self._number(at)
        if char == "\\":
            return self._macro(at)
        if char.isalpha():
            return self._word(at)
        found = _OPERATOR.match(self.text, at)
        assert found is not None
        symbol = found.group()
        if symbol == "$":
            symbol = r"\$"
        self._operator(
            {"**": "^", "<=": "le", ">=": "ge", "!=": "ne", "...": "ldots"}.get(symbol, symbol)
        )
        return found.end()

    def _operator(self, symbol: str) -> None:
        if symbol in ("(", "[", r"\{"):
            self.depth += 1
        elif symbol in (")", "]", r"\}"):
            self.depth -= 1
        self._add("operator", symbol)

    def _number(self, at: int) -> int:
        text = self.text
        if (found := _REPEATING.match(text, at)) or (found := _ENDLESS.match(text, at)):
            self._add("number", found.group(), _repeating(found))
        elif (found := _MIXED.match(text, at)) and int(found["top"]) < int(found["bottom"]):
            value = int(found["whole"]) + Fraction(int(found["top"]), int(found["bottom"]))
            self._add("number", f"{found['whole']} {found['top']}/{found['bottom']}", Number(value))
        elif found := _SCIENTIFIC.match(text, at):
            power = Op("^", (Number(Fraction(10)), Number(Fraction(int(found["power"])))))
            mantissa = Number(Fraction(found["number"]))
            self._add("number", found.group(), Op("*", (mantissa, power)))
        else:
            found = (
                (self._groups_commas() and _COMMAS.match(text, at))
                or _GROUPED.match(text, at)
                or _COMMA_POINT.match(text, at)
                or _PLAIN.match(text, at)
            )
            if not found:  # a digit of another script
                raise UnreadableError(f"{text[at]!r} is no digit this grammar knows")
            self._literal(found)
        return found.end()

    def _groups_commas(self) -> bool:
        return self.group == "always" or (self.group == "outside" and self.depth == 0)

    def _literal(self, found: re.Match[str]) -> None:
        parts = found.groupdict()
        fraction = parts.get("fraction") or parts.get("bare") or ""
        whole = re.sub(r"\D", "", parts["whole"] or "0").lstrip("0") or "0"
        text = f"{whole}.{fraction}" if fraction else whole
        if len(text) > MAX_DIGITS:
            self._add("number", text, Op("huge", (Text(text),)))
            return
        digits = len((whole + fraction).lstrip("0")) if fraction else 0
        plain = found.group() if found.group().isdigit() else None
        self._add("number", text, Number(Fraction(text), digits, len(fraction), plain))

    def _macro(self, at: int) -> int:
        text = self.text
        if found := _BLACKBOARD.match(text, at):
            self._add("macro", f"set {found['set']}")
        elif found := _ENVIRONMENT.match(text, at):
            self._add("macro", f"{found['edge']} {found['name'].rstrip('*')}")
        elif found := _TEXT.match(text, at):
            self._text(found)
        elif found := _MACRO.match(text, at):
            name = found.group()[1:]
            name = _SAME_MACRO.get(name, "\\\\" if name == "\\" else name)
            if name in ("and", "or"):
                self._add("joiner", name)
            elif name.isalpha():
                self._add("macro", name)
            else:
                self._operator(name)
        else:
            self._add("operator", "\\")
            return at + 1
        return found.end()

    def _text(self, found: re.Match[str]) -> None:
        body = found["body"]
        if body is None or body.strip() in (".", "?", "!"):
            return
        if body.count("$") % 2 == 0:
            body = body.replace("$", "")
        words = _WORD.findall(body)
        if words and (number := _LEADING_NUMBER.match(body)):
            self.tokens.extend(_Lexer(number.group(), self.group).run())
            body = body[number.end() :]
        if found["font"].startswith("operatorname"):
            self._add("macro", _SAME_MACRO.get(body.strip(), body.strip()))
        elif any(len(word) > 1 and word.lower() not in ("and", "or") for word in words) or (
            words
            and self._after_a_value()
            and (UNIT_LETTERS.issuperset(words) or body.strip().lower() in CLOCK_HALVES)
        ):
            self._add("text", " ".join(body.split()))
        else:
            inner = _Lexer(body, self.group)
            inner.depth = self.depth
            self.tokens.extend(inner.run())

    def _word(self, at: int) -> int:
        found = _WORD.match(self.text, at)
        if found is None:
            self._add("symbol", self.text[at])
            return at + 1
        word = found.group()
        lower = word.lower()
        if len(word) > 1 and lower in ("and", "or"):
            self._add("joiner", lower)
        elif word in _PLAIN_WORDS:
            self._add(
                "macro", {"infinity": "infty", "oo": "infty"}.get(word, _SAME_MACRO.get(word, word))
            )
        elif len(word) > 3 or (lower in SHORT_WORDS and self._after_a_value()):
            self._add("text", word)
        else:
            for letter in word:
                self._add("symbol", letter)
        return found.end()

    def _after_a_value(self) -> bool:
        if not self.tokens:
            return False
        last = self.tokens[-1]
        return last.kind in ("number", "text") or last.text in ("}", ")", "pi", "circ")


def _repeating(found: re.Match[str]) -> Number:
    start, cycle = found["start"], found["bar"] or found.groupdict().get("paren", "")
    value = Fraction(int((found["whole"] or "0") + start))
    value += Fraction(int(cycle), 10 ** len(cycle) - 1)
    return Number(value / 10 ** len(start))
