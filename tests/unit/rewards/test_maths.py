import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngym.rewards.maths.grade import grade, same_answer
from turngym.rewards.maths.grammar import parse
from turngym.rewards.maths.nodes import UnreadableError
from turngym.rewards.maths.notation import clean, tokenize

PAIRS = [
    line.split("\t")
    for line in (Path(__file__).parent / "answer_pairs.tsv").read_text("utf-8").splitlines()[1:]
]


@pytest.mark.parametrize(("verdict", "gold", "answer"), PAIRS)
def test_answers_are_told_apart(verdict: str, gold: str, answer: str) -> None:
    found = grade(rf"The final answer is $\boxed{{{answer}}}$.", gold)
    assert (found.verdict == "right") == (verdict == "right"), found.detail


def test_discarded_boxes_do_not_count() -> None:
    response = r"First I get \boxed{14}. No: \boxed{15}"
    assert grade(response, "15").verdict == "right"
    assert grade(response, "14").verdict == "wrong"
    assert grade(response, r"\{14,15\}").verdict == "wrong"
    assert grade(r"\boxed{312}. Again: \boxed{312}", "312").verdict == "right"


def test_finding_all_means_all_and_no_more() -> None:
    gold = "27 and 64"
    for answer, verdict in (
        ("64", "wrong"),
        ("64, 27", "right"),
        ("27, 64, 125", "wrong"),
        ("", "no_answer"),
    ):
        assert grade(answer, gold, extract=False).verdict == verdict
    assert grade("", "B", extract=False).verdict == "no_answer"


@pytest.mark.parametrize("gold", ["", "  ", r"\text{[image]}", "[figure]"])
def test_gold_that_cannot_be_checked_is_an_error_for_every_answer(gold: str) -> None:
    for prediction in ("", r"\boxed{7}", rf"\boxed{{{gold}}}"):
        assert grade(prediction, gold).verdict == "error"


def test_gold_may_be_boxed_or_follow_hashes() -> None:
    assert grade(r"\boxed{5}", r"\boxed{5}").verdict == "right"
    assert grade(r"\boxed{70000}", "So 80,000 - 10,000\n#### 70,000").verdict == "right"


RATIONALS = st.fractions(min_value=-1000, max_value=1000, max_denominator=1000)


@given(RATIONALS, RATIONALS)
@settings(deadline=None)
def test_fractions_are_equal_exactly_when_their_values_are(a: object, b: object) -> None:
    def spelled(value: object) -> str:
        top, _, bottom = str(value).partition("/")
        return rf"\frac{{{top}}}{{{bottom or 1}}}"

    assert same_answer(spelled(a), str(a)).verdict == "right"
    assert (same_answer(spelled(a), spelled(b)).verdict == "right") == (a == b)


@given(st.integers(min_value=-(10**30), max_value=10**30), st.integers(min_value=1, max_value=9))
@settings(deadline=None)
def test_integers_of_any_size_compare_exactly(number: int, change: int) -> None:
    assert same_answer(f"{number:,}", str(number)).verdict == "right"
    assert same_answer(f"{number + change:,}", str(number)).verdict == "wrong"


NOTATION = [
    "1", "23", ".", ",", "\\frac", "{", "}", "(", ")", "[", "]", "\\{", "\\}", "^", "_", "+", "-",
    "\\pm", "=", "<", "\\cup", "\\sqrt", "\\text{", "cm", "x", "\\pi", "\\sin", "!", "%", "|",
    "\\\\", "&", "\\begin{pmatrix}", "\\end{pmatrix}", "\\int", "\\sum", ":", "\\infty", "$", "²",
    " and ",
]  # fmt: skip


@given(st.lists(st.sampled_from(NOTATION), max_size=30).map("".join) | st.text(max_size=60))
@settings(deadline=None, max_examples=300)
def test_any_answer_gets_a_verdict_and_equals_itself_as_written(answer: str) -> None:
    assert same_answer(answer, "5").verdict in ("right", "wrong")
    assert same_answer(answer, r"(x, \frac{1}{2})").verdict in ("right", "wrong")
    assert same_answer(f" {answer} ", answer).verdict == "right"


def answers(shared: Path) -> list[str]:
    found: set[str] = set()
    for name in ("math500", "math_test_answers"):
        with open(shared / "data" / name / "shared.jsonl", encoding="utf-8") as lines:
            found.update(json.loads(line)["answer"] for line in lines)
    return sorted(found)


def changed(gold: str) -> str:
    """Gold with its last digit, its last letter or its last word replaced."""
    digits = list(re.finditer(r"\d", gold))
    if digits:
        at = digits[-1].start()
        return gold[:at] + str((int(gold[at]) + 1) % 10) + gold[at + 1 :]
    letters = list(re.finditer(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])", gold))
    if letters:
        at = letters[-1].start()
        other = "B" if gold[at].isupper() and gold[at] != "B" else "C" if gold[at] == "B" else "z"
        return gold[:at] + ("w" if other == gold[at] else other) + gold[at + 1 :]
    words = re.findall(r"[A-Za-z]{2,}", gold)
    return gold.replace(words[-1], "other") if words else gold + "1"


def test_every_gold_answer_of_math_can_be_read_and_equals_itself(shared: Path) -> None:
    unread: list[str] = []
    for gold in answers(shared):
        respelled = (
            gold.replace(r"\frac", r"\dfrac").replace("(", r"\left(").replace(")", r"\right)")
        )
        assert grade(rf"\boxed{{ {respelled} }}", gold).verdict == "right", gold
        try:
            parse(tokenize(clean(gold)))
        except UnreadableError:
            unread.append(gold)
    assert unread == [r"0.0011_{2}"]  # compared as written


def test_a_changed_gold_answer_of_math_is_wrong(shared: Path) -> None:
    golds = answers(shared)
    accepted = [gold for gold in golds if grade(rf"\boxed{{{changed(gold)}}}", gold)[0] == "right"]
    assert len(accepted) <= 0.005 * len(golds), accepted


def test_the_gold_answers_of_gsm8k_equal_themselves_and_not_their_neighbours(shared: Path) -> None:
    with open(shared / "data" / "gsm8k" / "shared.jsonl", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    for row in rows:
        assert grade(row["solution"], row["answer"]).verdict == "right", row["id"]
        assert grade(rf"\boxed{{{changed(row['answer'])}}}", row["answer"]).verdict == "wrong"
