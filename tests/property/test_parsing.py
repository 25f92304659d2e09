import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngym.agents.parsing import DIALECTS, Style, get_dialect, parse, to_message
from turngym.agents.parsing.jsonscan import scan_value
from turngym.types import Message

BAR = "\uff5c"
MARKUP = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<function=f>", "</function>",
    "<parameter=x>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "; ", "```python\n", "\n```\n", "```", "'''", '"""',
    "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "commentary to=functions.f",
    f"<{BAR}tool▁call▁begin{BAR}>", f"<{BAR}tool▁sep{BAR}>", f"<{BAR}tool▁call▁end{BAR}>",
    "[f(", "x=", ")]", '{"name": "f", "arguments": {', '{"name": "f", "parameters": {', '"x": 1',
    "}}", "{", "}", "[", "]", '"', "'", "\\", ",", ":", "\n", " ", "1", "-", "\ud800", "é", "🙂",
    "<tool_response>",
]  # fmt: skip
noise = st.lists(st.one_of(st.sampled_from(MARKUP), st.text(max_size=6)), max_size=30).map("".join)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
words = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=8)
prose = st.text("abc XYZ.,é漢🙂\n", max_size=20).map(str.strip)


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(deadline=None, max_examples=60)
@given(text=noise, lenient=st.booleans(), length=st.booleans(), in_reasoning=st.booleans())
def test_parsers_never_raise_and_their_spans_are_in_order(
    dialect: str, text: str, lenient: bool, length: bool, in_reasoning: bool
) -> None:
    parsed = parse(
        text,
        dialect,
        finish_reason="length" if length else "stop",
        lenient=lenient,
        in_reasoning=in_reasoning,
    )
    position = 0
    for attempt in parsed.attempts:
        start, end = attempt.span
        assert 0 <= start <= end <= len(text)
        assert start >= position or lenient
        position = start
    json.dumps(to_message(parsed))


@settings(deadline=None, max_examples=200)
@given(value=json_values, indent=st.sampled_from([None, 1]), tail=st.sampled_from(["", " ", "x"]))
def test_the_scanner_reads_what_the_standard_library_writes(
    value: Any, indent: int | None, tail: str
) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    scan = scan_value(f" {text}{tail}")
    if tail == "x" and text[-1].isalnum():
        return
    assert scan.error is None
    assert scan.value == value
    assert scan.end == len(text) + 1


@settings(deadline=None, max_examples=200)
@given(text=st.text('{}[]":,\\ntrue1-e.\n ', max_size=12))
def test_the_scanner_accepts_what_strict_json_accepts(text: str) -> None:
    def refuse(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError
        return dict(pairs)

    try:
        expected = json.loads(text, object_pairs_hook=refuse)
    except ValueError:
        scan = scan_value(text)
        assert scan.error is not None or text[scan.end :].strip()
    else:
        assert scan_value(text).value == expected


def action(dialect: str, draw: st.DataObject) -> Message:
    """Draw an action that the dialect can write without loss."""
    message: Message = {"role": "assistant", "content": ""}
    is_code = dialect == "python_code_block"
    if dialect == "qwen3_xml" or dialect == "glm45":
        # Values are read without their types here; the texts of JSON values would come back typed.
        values: st.SearchStrategy[Any] = st.integers() | st.just(["a", {"b": None}]) | words
        arguments = st.dictionaries(words, values.filter(is_stable), max_size=3)
    elif is_code:
        arguments = st.lists(words, min_size=1, max_size=3).map(
            lambda lines: {"code": "\n".join(f"{line} = 1" for line in lines) + "\n"}
        )
    elif dialect == "pythonic":
        arguments = st.dictionaries(words.filter(str.isidentifier), pythonic, max_size=3)
    else:
        arguments = st.dictionaries(st.text(), json_values, max_size=3)
    calls = draw.draw(st.lists(st.tuples(words, arguments), max_size=3))
    if not (calls and dialect == "pythonic"):
        message["content"] = draw.draw(prose)
    if thought := draw.draw(prose):
        message["reasoning_content"] = thought
    for index, (name, value) in enumerate(calls):
        function: Any = {"name": "python" if is_code else name, "arguments": value}
        message.setdefault("tool_calls", []).append(
            {"id": f"call{index:05d}", "type": "function", "function": function}
        )
    return message


pythonic = st.none() | st.booleans() | st.integers() | st.text("ab'\"\\\n,)]", max_size=5)


def is_stable(value: Any) -> bool:
    return not isinstance(value, str) or value not in ("true", "false", "null")


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(deadline=None, max_examples=50)
@given(data=st.data(), gap=st.sampled_from(["", "\n"]), in_reasoning=st.booleans())
def test_what_is_written_in_a_dialect_is_read_back(
    dialect: str, data: st.DataObject, gap: str, in_reasoning: bool
) -> None:
    wanted = action(dialect, data)
    style = Style(think_gap=gap, think_tail=gap, call_lead=gap, call_gap=gap)
    in_reasoning = in_reasoning and dialect != "harmony"
    segments = get_dialect(dialect).format(wanted, style, in_reasoning)
    text = "".join(segment for segment, _ in segments)
    assert to_message(parse(text, dialect, in_reasoning=in_reasoning)) == wanted
