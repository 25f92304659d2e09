"""Puzzles about a list or a text: tedious by head, a few lines of code."""

import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

__all__ = ["PUZZLES", "Puzzle"]

_SYLLABLES = ("ka", "lo", "mi", "ru", "te", "sa", "no", "pi", "du", "re", "an", "ol", "es", "it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Puzzle:
    """A kind of question about one value."""

    name: str
    question: str
    make: Callable[[random.Random], Any]
    """The value in question, a literal."""

    solve: Callable[[Any], int | str]
    """The right answer."""

    cells: Sequence[str]
    """How an expert works it out in an interpreter that holds the value as `data`; a later cell
    uses the variables of an earlier one, and the last one prints the answer."""


def _numbers(rng: random.Random) -> list[int]:
    return [rng.randint(-999, 999) for _ in range(rng.randint(40, 60))]


def _text(rng: random.Random) -> str:
    vocabulary = ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 3))) for _ in range(25)]
    return " ".join(rng.choices(vocabulary, k=rng.randint(60, 80)))


def _even_pairs(data: list[int]) -> int:
    odd = sum(number % 2 for number in data)
    even = len(data) - odd
    return odd * (odd - 1) // 2 + even * (even - 1) // 2


def _digit_sum(data: list[int]) -> int:
    return sum(int(digit) for number in data for digit in str(abs(number)))


def _widest_gap(data: list[int]) -> int:
    ordered = sorted(data)
    return max(b - a for a, b in pairwise(ordered))


def _most_common(data: str) -> str:
    counts = Counter(data.split())
    return min(counts, key=lambda word: (-counts[word], word))


def _distinct_long(data: str) -> int:
    return len({word for word in data.split() if len(word) > 4})


def _vowels_at_odd_places(data: str) -> int:
    return sum(letter in "aeiou" for letter in data[1::2])


PUZZLES: tuple[Puzzle, ...] = (
    Puzzle(
        name="even_pairs",
        question="How many pairs of numbers in the list `data` have an even sum?",
        make=_numbers,
        solve=_even_pairs,
        cells=(
            "odd = sum(n % 2 for n in data)\neven = len(data) - odd\nprint(odd, even)",
            "print(odd * (odd - 1) // 2 + even * (even - 1) // 2)",
        ),
    ),
    Puzzle(
        name="digit_sum",
        question="What is the sum of all decimal digits of the numbers in the list `data`?",
        make=_numbers,
        solve=_digit_sum,
        cells=(
            "digits = ''.join(str(abs(n)) for n in data)\nprint(len(digits))",
            "print(sum(int(d) for d in digits))",
        ),
    ),
    Puzzle(
        name="widest_gap",
        question="Sort the list `data`. What is the largest difference between two neighbours?",
        make=_numbers,
        solve=_widest_gap,
        cells=(
            "ordered = sorted(data)\nprint(ordered[0], ordered[-1])",
            "print(max(b - a for a, b in zip(ordered, ordered[1:])))",
        ),
    ),
    Puzzle(
        name="median",
        question="What is the median of the numbers in the list `data`, rounded down?",
        make=_numbers,
        solve=lambda data: int(statistics.median(data) // 1),
        cells=(
            "import statistics\nmiddle = statistics.median(data)\nprint(middle)",
            "print(int(middle // 1))",
        ),
    ),
    Puzzle(
        name="most_common",
        question=(
            "Which word is the most frequent one in the text `data`? "
            "Of equally frequent words, the first in the alphabet counts."
        ),
        make=_text,
        solve=_most_common,
        cells=(
            "from collections import Counter\ncounts = Counter(data.split())\nprint(len(counts))",
            "print(min(counts, key=lambda w: (-counts[w], w)))",
        ),
    ),
    Puzzle(
        name="distinct_long",
        question="How many different words of the text `data` have more than four letters?",
        make=_text,
        solve=_distinct_long,
        cells=(
            "words = set(data.split())\nprint(len(words))",
            "print(sum(len(w) > 4 for w in words))",
        ),
    ),
    Puzzle(
        name="vowels_at_odd_places",
        question="How many of the characters data[1], data[3], data[5], ... are vowels (aeiou)?",
        make=_text,
        solve=_vowels_at_odd_places,
        cells=(
            "odd = data[1::2]\nprint(len(odd))",
            "print(sum(c in 'aeiou' for c in odd))",
        ),
    ),
)
