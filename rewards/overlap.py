"""Agreement of two texts: exact match, token F1, patterns."""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

__all__ = ["exact_match", "normalize", "pattern_match", "token_f1"]

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalize(
    text: str, *, case: bool = False, punctuation: bool = False, articles: bool = False
) -> str:
    """Bring a text into the form in which it is compared; white space is always collapsed.

    Args:
        text: what to normalise.
        case: keep the case.
        punctuation: keep punctuation.
        articles: keep English articles.

    >>> normalize("  The  Eiffel Tower! ")
    'eiffel tower'
    """
    text = unicodedata.normalize("NFKC", text)
    if not case:
        text = text.casefold()
    if not punctuation:
        text = "".join(" " if unicodedata.category(char)[0] == "P" else char for char in text)
    if not articles:
        text = _ARTICLES.sub(" ", text)
    return " ".join(text.split())


def exact_match(
    answer: str | None,
    gold: str | Sequence[str],
    *,
    case: bool = False,
    punctuation: bool = False,
    articles: bool = False,
) -> float:
    """Return 1.0 when the answer equals one of the gold answers after `normalize`, else 0.0.

    No answer scores 0.0, and so does one of which nothing is left: an empty string equals nothing.

    >>> exact_match("The Eiffel Tower.", ["Eiffel Tower", "La tour Eiffel"])
    1.0
    >>> exact_match("", ""), exact_match(None, "2")
    (0.0, 0.0)
    """

    def form(text: str) -> str:
        return normalize(text, case=case, punctuation=punctuation, articles=articles)

    found = form(answer or "")
    return float(bool(found) and any(found == form(one) for one in _golds(gold)))


def token_f1(answer: str | None, gold: str | Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall of words, best over the gold answers.

    SQuAD, arXiv:1606.05250, section 6.1.

    >>> round(token_f1("in Paris, France", "Paris"), 3)
    0.5
    """
    words = normalize(answer or "").split()
    return max((_f1(words, normalize(one).split()) for one in _golds(gold)), default=0.0)


def _f1(answer: list[str], gold: list[str]) -> float:
    common = sum((Counter(answer) & Counter(gold)).values())
    return 2 * common / (len(answer) + len(gold)) if common else 0.0


def pattern_match(answer: str | None, pattern: str | re.Pattern[str]) -> float:
    """Return 1.0 when the whole answer, stripped, matches a regular expression, else 0.0.

    Use a pattern without nested repetition: the answer is the model's, and matching has no limit.

    >>> pattern_match("42 km", r"[0-9]+ km"), pattern_match("about 42 km", r"[0-9]+ km")
    (1.0, 0.0)
    """
    return float(answer is not None and re.fullmatch(pattern, answer.strip()) is not None)


def _golds(gold: str | Sequence[str]) -> Sequence[str]:
    return [gold] if isinstance(gold, str) else gold
