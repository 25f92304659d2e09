"""A response, or an answer, against the gold answer."""

import re
from typing import Literal, NamedTuple

from turngym.rewards.extract import final_answer, unwrap
from turngym.rewards.maths.compare import plain, same
from turngym.rewards.maths.grammar import parse
from turngym.rewards.maths.nodes import (
    Group,
    Items,
    Node,
    TooLargeError,
    UndefinedError,
    UnreadableError,
)
from turngym.rewards.maths.notation import Grouping, canonical, clean, tokenize

__all__ = ["Grade", "grade", "same_answer"]


class Grade(NamedTuple):
    """Outcome of a comparison and the reason for it."""

    verdict: Literal["right", "wrong", "no_answer", "error"]
    detail: str = ""


_PLACEHOLDER = re.compile(r"\[[A-Za-z ]*\]")
_CHOICE = re.compile(r"\(?(?P<letter>[A-Z])\)?")
_CHOSEN = re.compile(
    r"(?:(?i:option|choice|answer)\s+)?\(?(?P<letter>[A-Za-z])(?:\)|[.:](?=\s|$)|\)[.:])?(?P<rest>\s.*)?",
    re.DOTALL,
)
_OTHER_CHOICE = re.compile(r"(?<![A-Za-z])\(?[A-Z][).:](?:\s|$)")
_IN_WORDS = re.compile(r"[A-Za-z]{4}|^(?:yes|no)$", re.IGNORECASE)
_MACROS = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|left|right)(?![A-Za-z])")
_SPACING = re.compile(r"\\[ ,;:]|\\q?quad(?![A-Za-z])|~")
_DELIMITERS = str.maketrans("", "", "{}$")
_BEYOND = re.compile(
    r"\\(?:lim|int|iint|sum|prod|frac\{d\}|partial|nabla|operatorname)(?![A-Za-z])"
)


def grade(
    prediction: str | None, gold: str, *, extract: bool = True, fallback: bool = False
) -> Grade:
    r"""Compare what a response answers with the gold answer.

    Args:
        prediction: the response, or just the answer when `extract` is false.
        gold: the gold answer, bare, boxed or after `####`.
        extract: look for the answer's mark (see `turngym.rewards.extract`).
        fallback: without a mark, accept "the answer is …".

    >>> grade(r"First \boxed{14}. No: \boxed{15}", "15").verdict
    'right'
    """
    target = final_answer(gold) or gold
    if not target.strip():
        return Grade("error", "the gold answer is empty")
    if _PLACEHOLDER.fullmatch(_words(target)):
        return Grade("error", f"the gold answer {target[:80]!r} is a placeholder")
    answer = prediction or ""
    answer = (final_answer(answer, fallback=fallback) or "") if extract else unwrap(answer)
    if not answer:
        return Grade("no_answer", "no complete answer outside the reasoning")
    return same_answer(answer, unwrap(target))


def same_answer(answer: str, gold: str) -> Grade:
    r"""Compare two short answers.

    >>> same_answer("0.5", r"\frac{1}{2}").verdict, same_answer("3.14", r"\pi").verdict
    ('right', 'wrong')
    """
    if answer.split() == gold.split():
        return Grade("right", "same text")
    answer, gold = clean(answer), clean(gold)
    if _same_words(answer, gold) or _same_choice(answer, gold):
        return Grade("right", "same words")
    try:
        tokens = tokenize(answer), tokenize(gold)
        if canonical(tokens[0]) == canonical(tokens[1]):
            return Grade("right", "same notation")
        trees = parse(tokens[0]), parse(tokens[1])
    except UnreadableError as error:
        if _BEYOND.search(answer) or _BEYOND.search(gold):
            return _symbolic(answer, gold)
        return Grade("wrong", str(error))
    try:
        if _compare(answer, gold, *trees):
            return Grade("right", "equal")
    except (UnreadableError, UndefinedError) as error:
        return Grade("wrong", str(error))
    except RecursionError:
        return Grade("wrong", "nested too deeply")
    except TooLargeError as error:
        return Grade("wrong", f"{error}; such a number equals only itself, written the same way")
    return Grade("wrong", "different values")


def _compare(answer: str, gold: str, answer_tree: Node, gold_tree: Node) -> bool:
    if same(answer_tree, gold_tree):
        return True
    if not isinstance(gold_tree, Items | Group) or "," not in answer + gold:
        return False
    # In a list a comma before three digits may group or separate: read both sides either way.
    readings: tuple[Grouping, ...] = ("always", "never")
    for group in readings:
        tree = parse(tokenize(gold, group=group))
        if isinstance(tree, Items | Group) and same(parse(tokenize(answer, group=group)), tree):
            return True
    return False


def _words(text: str) -> str:
    text = _SPACING.sub(" ", _MACROS.sub("", text))
    return text.translate(_DELIMITERS).strip()


def _same_words(answer: str, gold: str) -> bool:
    """Compare answers in words: gold has a word of four letters or more, and no formula."""
    target = _words(gold)
    if "\\" in target or not _IN_WORDS.search(target) or re.search(r"[=^_<>*/+]", target):
        return False
    return plain(_words(answer)) == plain(target)


def _same_choice(answer: str, gold: str) -> bool:
    """Compare a multiple-choice letter, which the text of the option may follow."""
    target = _words(gold)
    letter = _CHOICE.fullmatch(target)
    chosen = _CHOSEN.fullmatch(_words(answer))
    if letter is None or chosen is None:
        return False
    rest = chosen["rest"] or ""
    marked = len(target) > 1 or "\\" in gold
    found = chosen["letter"].upper() if marked else chosen["letter"]
    if rest and _words(answer)[chosen.start("rest") - 1].isalpha():
        return False
    return found == letter["letter"] and not _OTHER_CHOICE.search(rest)


def _symbolic(answer: str, gold: str) -> Grade:
    from turngym.rewards.maths.symbolic import same_symbolically

    if same_symbolically(answer, gold):
        return Grade("right", "equal by computer algebra")
    return Grade("wrong", "not equal by computer algebra")
