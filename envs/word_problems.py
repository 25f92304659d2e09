"""Word problems made by our own code: a few templates, many numbers, a worked solution each."""

import random
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["WordProblem", "draw"]

_NAMES = ("Ada", "Ben", "Chloe", "Daniel", "Elif", "Femi", "Grace", "Hugo", "Ines", "Jun")
_THINGS = ("apples", "books", "stamps", "marbles", "stickers", "shells", "pencils", "cards")


class WordProblem(NamedTuple):
    """A question, a worked solution and its result."""

    question: str
    solution: str
    answer: int


def draw(rng: random.Random) -> WordProblem:
    """Make one problem."""
    return rng.choice(_TEMPLATES)(rng)


def _shopping(rng: random.Random) -> WordProblem:
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    count, price, extra = rng.randint(3, 12), rng.randint(2, 15), rng.randint(5, 60)
    return WordProblem(
        f"{name} buys {count} {thing} for ${price} each and pays ${extra} for delivery. "
        "How many dollars does it cost altogether?",
        f"The {thing} cost {count}*{price}={count * price} dollars.\n"
        f"With delivery that is {count * price}+{extra}={count * price + extra}.",
        count * price + extra,
    )


def _sharing(rng: random.Random) -> WordProblem:
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    friends, each, left = rng.randint(2, 9), rng.randint(3, 20), rng.randint(1, 15)
    total = friends * each + left
    return WordProblem(
        f"{name} has {total} {thing} and gives {each} of them to each of {friends} friends. "
        f"How many {thing} are left?",
        f"{name} gives away {friends}*{each}={friends * each} {thing}.\n"
        f"That leaves {total}-{friends * each}={left}.",
        left,
    )


def _walking(rng: random.Random) -> WordProblem:
    name = rng.choice(_NAMES)
    laps, metres, days = rng.randint(2, 9), 50 * rng.randint(2, 16), rng.randint(2, 7)
    return WordProblem(
        f"{name} runs {laps} laps of {metres} metres a day, {days} days a week. "
        "How many metres is that in a week?",
        f"A day is {laps}*{metres}={laps * metres} metres.\n"
        f"A week is {laps * metres}*{days}={laps * metres * days} metres.",
        laps * metres * days,
    )


def _saving(rng: random.Random) -> WordProblem:
    name = rng.choice(_NAMES)
    weeks, weekly, spent = rng.randint(4, 20), rng.randint(5, 30), rng.randint(3, 19)
    return WordProblem(
        f"{name} saves ${weekly} a week for {weeks} weeks and then spends ${spent}. "
        "How many dollars remain?",
        f"Saved: {weeks}*{weekly}={weeks * weekly} dollars.\n"
        f"After spending: {weeks * weekly}-{spent}={weeks * weekly - spent}.",
        weeks * weekly - spent,
    )


def _seats(rng: random.Random) -> WordProblem:
    rows, seats, taken = rng.randint(5, 30), rng.randint(8, 40), rng.randint(10, 39)
    return WordProblem(
        f"A hall has {rows} rows of {seats} seats, and {taken} seats are taken. "
        "How many seats are free?",
        f"There are {rows}*{seats}={rows * seats} seats.\n"
        f"Free are {rows * seats}-{taken}={rows * seats - taken}.",
        rows * seats - taken,
    )


def _ages(rng: random.Random) -> WordProblem:
    older, younger = rng.sample(_NAMES, 2)
    age, factor, years = rng.randint(4, 15), rng.randint(2, 4), rng.randint(2, 12)
    return WordProblem(
        f"{younger} is {age} years old and {older} is {factor} times as old. "
        f"How old will {older} be in {years} years?",
        f"{older} is {factor}*{age}={factor * age} now.\n"
        f"In {years} years: {factor * age}+{years}={factor * age + years}.",
        factor * age + years,
    )


def _discount(rng: random.Random) -> WordProblem:
    name = rng.choice(_NAMES)
    price, percent = 20 * rng.randint(2, 30), 5 * rng.randint(1, 15)
    off = price * percent // 100
    return WordProblem(
        f"A coat costs ${price}. {name} gets {percent} percent off. "
        "How many dollars does the coat cost now?",
        f"The discount is {price}*{percent}/100={off} dollars.\n"
        f"The price is {price}-{off}={price - off}.",
        price - off,
    )


def _boxes(rng: random.Random) -> WordProblem:
    thing = rng.choice(_THINGS)
    boxes, per_box, broken = rng.randint(3, 15), rng.randint(6, 24), rng.randint(1, 17)
    bags = rng.randint(2, 9)
    total = boxes * per_box + bags * 5 - broken
    return WordProblem(
        f"A shop receives {boxes} boxes with {per_box} {thing} each and {bags} bags with 5 {thing} "
        f"each. {broken} {thing} are damaged. How many {thing} can be sold?",
        f"Boxes: {boxes}*{per_box}={boxes * per_box}. Bags: {bags}*5={bags * 5}.\n"
        f"Together {boxes * per_box}+{bags * 5}={boxes * per_box + bags * 5}, "
        f"without the damaged ones {total}.",
        total,
    )


_TEMPLATES: tuple[Callable[[random.Random], WordProblem], ...] = (
    _shopping,
    _sharing,
    _walking,
    _saving,
    _seats,
    _ages,
    _discount,
    _boxes,
)
