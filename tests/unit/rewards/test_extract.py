import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngym.rewards.extract import boxes, final_answer, stated_answer, visible


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"First I get \boxed{14}. No: \boxed{15}", "15"),
        (r"\boxed{312}. Again: \boxed{312}", "312"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {5}", "5"),
        (r"\boxed 5 is it", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{5} as asked, in \boxed{} form", "5"),
        (r"use \boxed notation: \boxed{5}", "5"),
        (r"set {a, \boxed{5}", "5"),
        (r"a } then \boxed{5}", "5"),
        ("<answer> 12 </answer>", "12"),
        (r"<answer>it is \boxed{12}</answer>", "12"),
        (r"\boxed{1} <answer>2</answer>", "2"),
        (r"<answer>2</answer> \boxed{1}", "1"),
        ("8 + 8 = 16\n#### 16", "16"),
        ("#### 16\nwait\n#### 17", "17"),
        (r"<think>\boxed{4}</think>\boxed{5}", "5"),
        (r"so 4</think>\boxed{5}", "5"),
        (r"<think>a <think> b</think> \boxed{4}</think>\boxed{5}", "5"),
        (r"[THINK]\boxed{4}[/THINK]\boxed{5}", "5"),
        (r"\boxed{5}<|im_end|>\boxed{6}", "5"),
    ],
)
def test_the_last_mark_outside_the_reasoning_is_the_answer(response: str, answer: str) -> None:
    assert final_answer(response) == answer


@pytest.mark.parametrize(
    "response",
    [
        "",
        " \n\t",
        "it is 5",
        r"\boxed{}",
        r"\boxed{5",
        r"\boxed{4}. No: \boxed{5",
        r"<think>\boxed{42}</think> I can't tell.",
        r"<think>So far \boxed{42}",
        r"\boxed{42}</think>",
        "<answer></answer>",
        "<answer>5",
        "##### 5",
        "####",
    ],
)
def test_a_response_without_a_complete_mark_states_no_answer(response: str) -> None:
    assert final_answer(response) is None


def test_boxes_far_apart_are_no_more_merged_than_boxes_side_by_side() -> None:
    for gap in (5, 500):
        response = r"\boxed{14}" + "x" * gap + r"\boxed{15}"
        assert final_answer(response) == "15"


def test_an_answer_in_prose_counts_only_on_request() -> None:
    prose = "The answer is 3. Wait, I forgot one. The answer is 4."
    assert final_answer(prose) is None
    assert final_answer(prose, fallback=True) == "4"
    assert stated_answer("All counts agree.\n\nFinal Answer: **73**") == "73"
    assert stated_answer("no such statement") is None


PIECES = [
    "\\boxed{", "\\boxed", "\\fbox{", "{", "}", "\\{", "\\}", "\\\\", "\\", "<think>", "</think>",
    "<answer>", "</answer>", "#### ", "\n", "answer is ", "5", "x", " ", "<|im_end|>", "é",
    "\ud800",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES)).map("".join) | st.text())
@settings(deadline=None)
def test_extraction_never_raises_and_only_ever_quotes_the_response(response: str) -> None:
    answer = final_answer(response, fallback=True)
    assert answer is None or (answer == answer.strip() != "" and answer in response)
    assert len(visible(response)) <= len(response)


@given(st.text(alphabet="ab{}\\ "))
@settings(deadline=None)
def test_the_content_of_every_box_is_balanced(text: str) -> None:
    source = rf"\boxed{{{text}}}"
    for box in boxes(source)[0]:
        depth = 0
        content = box.content(source)
        skip = False
        for char in content:
            if not skip:
                depth += (char == "{") - (char == "}")
            skip = char == "\\" and not skip
            assert depth >= 0
        assert depth == 0


@pytest.mark.parametrize(
    "unit",
    [
        "\\boxed{",
        "{",
        "}",
        "\\",
        "<think>",
        "</think>",
        "<answer>",
        "#### ",
        "#",
        "answer is ",
        " ",
    ],
)
def test_time_grows_in_step_with_the_length(unit: str) -> None:
    def seconds(times: int) -> float:
        text = unit * times
        start = time.process_time()
        final_answer(text, fallback=True)
        return time.process_time() - start

    # 10 times the text in at most 40 times the time: a quadratic scan takes 100 times.
    small = min(seconds(10_000) for _ in range(3))
    assert seconds(100_000) < 40 * small + 0.2


def test_a_hundred_thousand_nested_boxes_are_read_at_once() -> None:
    assert final_answer("\\boxed{" * 100_000 + "5" + "}" * 100_000) is not None
    assert final_answer("\\boxed{" * 100_000 + "5") is None
