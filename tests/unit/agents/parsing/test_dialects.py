from typing import Any

import pytest

from turngym.agents.parsing import DIALECTS, dialect_of, get_dialect, parse
from turngym.errors import ConfigError

BAR = "\uff5c"
TOOLS: list[dict[str, Any]] = [
    {"name": "f", "parameters": {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}}
]

GOOD_AND_BAD = {
    "hermes": (
        '<tool_call>{</tool_call><tool_call>{"name": "f", "arguments": {"s": "1"}}</tool_call>'
    ),
    "qwen3_xml": (
        "<tool_call>\n<function=f>\n<parameter=s>\n</tool_call>"
        "<tool_call>\n<function=f>\n<parameter=s>\n1\n</parameter>\n</function>\n</tool_call>"
    ),
    "glm45": (
        "<tool_call>f\n<arg_key>s</tool_call>"
        "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
    ),
    "mistral": '[TOOL_CALLS]f[ARGS]{"s": }[TOOL_CALLS]f[ARGS]{"s": "1"}',
    "llama3_json": '{"name": "f", "parameters": 3}; {"name": "f", "parameters": {"s": "1"}}',
    "pythonic": "[f(s=open), f(s='1')]",
    "deepseek_v3": (
        f"<{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>f<{BAR}tool▁call▁end{BAR}>"
        f"<{BAR}tool▁call▁begin{BAR}>function<{BAR}tool▁sep{BAR}>f\n"
        f'```json\n{{"s": "1"}}\n```<{BAR}tool▁call▁end{BAR}><{BAR}tool▁calls▁end{BAR}>'
    ),
    "deepseek_v31": (
        f"<{BAR}tool▁call▁begin{BAR}>f<{BAR}tool▁sep{BAR}>{{<{BAR}tool▁call▁end{BAR}>"
        f'<{BAR}tool▁call▁begin{BAR}>f<{BAR}tool▁sep{BAR}>{{"s": "1"}}<{BAR}tool▁call▁end{BAR}>'
    ),
    "harmony": (
        "<|channel|>commentary to=functions.f<|message|>{<|call|>"
        '<|start|>assistant<|channel|>commentary to=functions.f<|message|>{"s": "1"}'
    ),
}


@pytest.mark.parametrize("dialect", GOOD_AND_BAD)
def test_a_bad_call_does_not_void_the_good_one_behind_it(dialect: str) -> None:
    parsed = parse(GOOD_AND_BAD[dialect], dialect, tools=TOOLS)
    assert [(c.name, c.arguments) for c in parsed.calls] == [("f", {"s": "1"})]
    assert len(parsed.errors) == 1
    assert parsed.attempts[0] is parsed.errors[0]


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("mistral", '[TOOL_CALLS]f[ARGS]{}[TOOL_RESULTS]{"content": 9}[/TOOL_RESULTS] 9'),
        ("glm45", "<tool_call>f</tool_call><|observation|>9"),
        ("deepseek_v31", f"<{BAR}tool▁call▁begin{BAR}>f<{BAR}tool▁sep{BAR}>{{}}"
         f"<{BAR}tool▁call▁end{BAR}><{BAR}tool▁output▁begin{BAR}>9"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
         "<|start|>functions.f to=assistant<|channel|>commentary<|message|>9<|end|>"),
        ("python_code_block", "```python\nprint(9)\n```\n```output\n9\n```\nSo 9."),
    ],
)  # fmt: skip
def test_made_up_results_are_dropped_in_every_dialect(dialect: str, text: str) -> None:
    parsed = parse(text, dialect)
    assert len(parsed.calls) == 1
    assert parsed.flags == {"fabricated_result"}
    assert "9" not in parsed.content


def test_xml_values_take_the_type_of_their_parameter() -> None:
    text = (
        "<tool_call><function=f><parameter=s>3</parameter><parameter=n>3</parameter>"
        "</function></tool_call>"
    )
    assert parse(text, "qwen3_xml", tools=TOOLS).calls[0].arguments == {"s": "3", "n": 3}
    assert parse(text, "qwen3_xml").calls[0].arguments == {"s": 3, "n": 3}


def test_a_fence_inside_another_language_is_content() -> None:
    text = "```json\n{}\n```\nthen\n```python\nx = 1\n```"
    parsed = parse(text, "python_code_block")
    assert [c.arguments for c in parsed.calls] == [{"code": "x = 1\n"}]
    assert parsed.content == "```json\n{}\n```\nthen"


@pytest.mark.parametrize("tag", ["py", "python3", "Python", "python title=a.py"])
def test_fences_may_name_python_in_several_ways(tag: str) -> None:
    assert len(parse(f"```{tag}\n1\n```", "python_code_block").calls) == 1


def test_llama_answers_that_are_json_are_answers() -> None:
    parsed = parse('{"answer": 5}', "llama3_json")
    assert (parsed.calls, parsed.errors, parsed.content) == ((), (), '{"answer": 5}')


def test_a_message_of_another_role_is_never_a_call() -> None:
    for dialect, text in GOOD_AND_BAD.items():
        parsed = parse(text, dialect, role="tool")
        assert (parsed.attempts, parsed.content) == ((), text)


@pytest.mark.parametrize(
    ("template", "dialect"),
    [
        ("{{'<tool_call>' + json}}", "hermes"),
        ("<tool_call><function={{name}}>", "qwen3_xml"),
        ("<tool_call>{{name}}<arg_key>", "glm45"),
        ("[AVAILABLE_TOOLS]{{t}}[TOOL_CALLS]", "mistral"),
        ("<|start_header_id|>{{'<|python_tag|>'}}", "llama3_json"),
        ("<|channel|>commentary to=functions", "harmony"),
        (f"<{BAR}tool▁call▁begin{BAR}>function\n```json", "deepseek_v3"),
        (f"<{BAR}tool▁call▁begin{BAR}>{{{{name}}}}", "deepseek_v31"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("answer in a ```python block", "python_code_block"),
        ("{{ messages }}", "hermes"),
    ],
)
def test_the_dialect_is_told_from_the_template(template: str, dialect: str) -> None:
    assert dialect_of(template) == dialect


def test_an_unknown_dialect_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"hermes.*got 'hermse'"):
        get_dialect("hermse")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_adversarial_text_takes_linear_time(dialect: str) -> None:
    import time

    units = [GOOD_AND_BAD.get(dialect, "```python\n'''\n"), "<tool_call>", "<think>", "</think> "]
    units += ['{"', "[", '\\"', "<parameter=x>", "[f(a='", "<|start|><|channel|>", "```\n", "'''"]
    for unit in units:
        text = unit * (200_000 // len(unit))
        started = time.perf_counter()
        parse(text, dialect)
        assert time.perf_counter() - started < 5, unit


def test_details_are_sentences_a_model_can_act_on() -> None:
    error = parse('<tool_call>{"name": "f", "args": 1}</tool_call>', "hermes").errors[0]
    assert error.detail == "the arguments must stand under 'arguments'"
