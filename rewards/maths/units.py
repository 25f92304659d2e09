"""Units and labels after a number."""

import re
from fractions import Fraction
from typing import NamedTuple

from turngym.rewards.maths.nodes import UnreadableError

__all__ = [
    "CLOCK_HALVES",
    "MULTIPLES",
    "SHORT_WORDS",
    "UNIT_LETTERS",
    "Unit",
    "read_unit",
    "share_a_word",
]


class Unit(NamedTuple):
    """Dimension as sorted (base, power) pairs, and the size in base units."""

    dimension: tuple[tuple[str, int], ...]
    factor: Fraction


_NAMES: dict[str, dict[str, str]] = {
    "length": {
        "m meter metre": "1", "cm centimeter centimetre": "1/100", "mm millimeter": "1/1000",
        "km kilometer kilometre": "1000", "in inch inche": "127/5000", "ft foot feet": "381/1250",
        "yd yard": "1143/1250", "mi mile": "201168/125",
    },
    "time": {
        "s sec second": "1", "min minute": "60", "h hr hour": "3600", "day": "86400",
        "week wk": "604800", "ms millisecond": "1/1000",
    },
    "mass": {
        "g gm gram": "1", "kg kilogram": "1000", "mg milligram": "1/1000",
        "lb pound": "45359237/100000", "oz ounce": "45359237/1600000",
    },
    "volume": {"l liter litre": "1", "ml milliliter millilitre": "1/1000"},
    "dollar": {"$ dollar usd": "1", "¢ cent": "1/100"},
    "euro": {"€ euro eur": "1"},
    "sterling": {"£ gbp": "1"},
    "degree": {"° deg degree": "1"},
    "radian": {"rad radian": "1"},
    "unit": {"unit": "1"},
    "before noon": {"am": "1"},
    "after noon": {"pm": "1"},
}  # fmt: skip
_UNITS = {
    alias: (base, Fraction(size))
    for base, names in _NAMES.items()
    for aliases, size in names.items()
    for alias in aliases.split()
}
MULTIPLES = {
    "dozen": 12,
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
UNIT_LETTERS = frozenset("mgshlLJNWVAKCF")
SHORT_WORDS = frozenset(
    name for name in [*_UNITS, "mph", "kph", "sq", "cu", "per"] if 1 < len(name) < 4
) - {"in"}

_NO_LABEL = frozenset(
    {
        "not", "no", "nor", "none", "is", "isn", "was", "are", "be", "or", "and", "to", "if", "but",
        "except", "without", "wrong", "either", "than", "between", "about", "around", "less",
        "approximately", "more", "least", "most", "nearly", "almost", "false", "true",
    }
)  # fmt: skip
CLOCK_HALVES = ("a.m.", "p.m.", "a.m", "p.m")
_COMPOUND = {"mph": "mi/h", "kph": "km/h"} | {half: half.replace(".", "") for half in CLOCK_HALVES}
_STRAY_DIGIT = re.compile(r"(?<![\^{\-A-Za-z])\d|\d\d")
_PART = re.compile(r"(?P<name>[A-Za-z$€£¢°]+)\.?(?:\^?\{?(?P<power>-?\d)\}?)?")


def read_unit(label: str) -> Unit | None:
    """Read a unit such as `cm^2`, `square feet`, `miles per hour`, or None for a counted noun.

    >>> read_unit("cm^2") == read_unit("square centimeters")
    True
    >>> read_unit("apples") is None
    True

    Raises:
        UnreadableError: the words are more than a label ("or more", "is wrong", a sentence).
    """
    words = re.findall(r"[A-Za-z]+", label.lower())
    if len(words) > 4 or not _NO_LABEL.isdisjoint(words) or _STRAY_DIGIT.search(label):
        raise UnreadableError(f"{label!r} is no unit or label")
    powers: dict[str, int] = {}
    factor = Fraction(1)
    above, _, below = re.sub(r"\bper\b", "/", _spell(label)).partition("/")
    for part, sign in ((above, 1), (below, -1)):
        raised = 1
        for found in _PART.finditer(part):
            name = found["name"]
            if name in ("square", "sq", "cubic", "cu"):
                raised = 2 if name.startswith("s") else 3
                continue
            known = _UNITS.get(name) or _UNITS.get(name.lower()) or _UNITS.get(_single(name))
            if known is None:
                return None
            power = sign * int(found["power"] or raised)
            powers[known[0]] = powers.get(known[0], 0) + power
            factor *= known[1] ** power
            raised = 1
    return Unit(tuple(sorted((base, n) for base, n in powers.items() if n)), factor)


def share_a_word(left: str, right: str) -> bool:
    """Tell whether two labels name the same thing, as "red apples" and "apple" do."""
    a, b = ({_single(word) for word in re.findall(r"[A-Za-z]+", text)} for text in (left, right))
    return not a.isdisjoint(b)


def _spell(label: str) -> str:
    label = label.strip()
    return _COMPOUND.get(label.lower(), label)


def _single(name: str) -> str:
    return name.lower().removesuffix("s")
