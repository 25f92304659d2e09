import pytest

from turngym.agents.parsing import Parsed, parse, parse_action, to_message


def read(text: str, **options: str) -> Parsed:
    return parse(text, "hermes", finish_reason="length" if "length" in options else "stop")


def kinds(text: str) -> list[str]:
    return [error.kind for error in parse(text, "hermes").errors]


def call(arguments: str, name: str = "echo") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_a_closing_tag_inside_a_string_is_data() -> None:
    parsed = read('<tool_call>{"name":"echo","arguments":{"t":"a </tool_call> b"}}</tool_call>')
    assert [c.arguments for c in parsed.calls] == [{"t": "a </tool_call> b"}]
    assert parsed.content == ""


def test_a_call_only_inside_reasoning_is_no_call() -> None:
    parsed = read(f"<think>maybe {call('{}')}</think>no")
    assert (parsed.calls, parsed.errors, parsed.content) == ((), (), "no")
    assert parsed.reasoning.startswith("maybe <tool_call>")


def test_a_call_without_arguments_has_none() -> None:
    assert read('<tool_call>{"name":"now"}</tool_call>').calls[0].arguments == {}


def test_arguments_encoded_twice_are_refused_or_repaired_with_a_flag() -> None:
    text = '<tool_call>{"name":"f","arguments":"{\\"e\\":\\"1\\"}"}</tool_call>'
    assert kinds(text) == ["arguments_not_object"]
    repaired = parse(text, "hermes", lenient=True)
    assert repaired.calls[0].arguments == {"e": "1"}
    assert "double_encoded" in repaired.flags


def test_a_raw_line_break_in_a_string_is_repaired_with_a_flag() -> None:
    text = '<tool_call>{"name":"f","arguments":{"e":"1\n2"}}</tool_call>'
    assert kinds(text) == ["malformed_json"]
    repaired = parse(text, "hermes", lenient=True)
    assert repaired.calls[0].arguments == {"e": "1\n2"}
    assert repaired.flags == {"repaired"}


def test_a_call_that_breaks_off_is_truncated() -> None:
    parsed = read('<tool_call>{"name":"f","arguments":{"e":"1+')
    assert [e.kind for e in parsed.errors] == ["truncated"]
    assert parsed.calls == ()


def test_a_whole_call_without_its_tag_counts_only_if_the_model_stopped() -> None:
    text = '<tool_call>{"name":"f","arguments":{}}'
    assert len(read(text).calls) == 1
    assert [e.kind for e in read(text, length="yes").errors] == ["truncated"]


def test_a_result_the_model_makes_up_is_dropped_and_flagged() -> None:
    parsed = read(f"{call('{}')}<tool_response>9</tool_response> so 9 {call('{}')}")
    assert len(parsed.calls) == 1
    assert parsed.flags == {"fabricated_result"}
    assert parsed.content == ""


def test_a_response_tag_before_any_call_is_only_text() -> None:
    parsed = read("tools answer in <tool_response> tags")
    assert (parsed.content, parsed.flags) == ("tools answer in <tool_response> tags", frozenset())


def test_a_bad_call_and_a_good_one_keep_their_order() -> None:
    message = to_message(read(f"<tool_call>oops</tool_call>{call('{}')}"))
    assert message["invalid_tool_calls"][0]["index"] == 0
    assert message["invalid_tool_calls"][0]["text"] == "<tool_call>oops</tool_call>"
    assert message["tool_calls"][0]["id"] == "call00001"


@pytest.mark.parametrize(
    "bad",
    [
        '<tool_call>{"name": "a}</tool_call>',
        '<tool_call>{"name": "a", "arguments": {"x": "y}}</tool_call>',
        '<tool_call>{"name": "a"\n',
        "<tool_call>",
        '<tool_call>{"name": "a", "arguments": {"x": "1\n</tool_call>',
    ],
)
def test_a_broken_call_does_not_swallow_the_next_one(bad: str) -> None:
    parsed = read(bad + call("{}", "good"))
    assert [c.name for c in parsed.calls] == ["good"]
    assert len(parsed.errors) == 1


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ('{"name": "f", "arguments": {}} x', "extra_data"),
        ("[]", "not_an_object"),
        ("7", "not_an_object"),
        ('{"arguments": {}}', "missing_name"),
        ('{"name": "", "arguments": {}}', "missing_name"),
        ('{"name": "f", "args": {}}', "missing_arguments"),
        ('{"name": "f", "arguments": 3}', "arguments_not_object"),
        ('{"name": "f", "name": "g", "arguments": {}}', "duplicate_key"),
        ('{"name": "f", "arguments": {"a": {"b": 1, "b": 2}}}', "duplicate_key"),
        ('{"name": "f", "arguments": {"a": -Infinity}}', "malformed_json"),
        ('{"name": "f", "arguments": {"a": [1e999]}}', "non_finite_number"),
        ('{"name": "f", "arguments": {"a": 01}}', "malformed_json"),
        ('{"name": "f", "arguments": {"a": .5}}', "malformed_json"),
        ('{"name": "f", "arguments": {"a": "\\x"}}', "malformed_json"),
        ('{"name": "f", "arguments": {"\\udc00": 1}}', "invalid_unicode"),
        ('{"name": "f", "arguments": {"a": True}}', "malformed_json"),
        ("", "malformed_json"),
    ],
)
def test_every_fault_of_a_call_has_its_kind(body: str, kind: str) -> None:
    assert kinds(f"<tool_call>{body}</tool_call>") == [kind]


def test_an_escaped_pair_of_surrogates_is_one_character() -> None:
    assert read(call('{"a": "\\ud83d\\ude00"}')).calls[0].arguments == {"a": "😀"}


def test_a_number_of_five_thousand_digits_is_refused_not_raised() -> None:
    assert kinds(call('{"a": ' + "1" * 5000 + "}")) == ["non_finite_number"]


def test_spans_are_where_the_text_says() -> None:
    text = f"first {call('{}')} then <tool_call>x</tool_call>"
    parsed = read(text)
    start, end = parsed.calls[0].span
    assert text[start:end] == call("{}")
    start, end = parsed.errors[0].span
    assert text[start:end] == "<tool_call>x</tool_call>"


def test_reasoning_opened_by_the_prompt_hides_its_drafts() -> None:
    text = f"use <tool_call> here {call('{}', 'draft')}</think>{call('{}', 'real')}"
    for in_reasoning in (True, False):
        parsed = parse(text, "hermes", in_reasoning=in_reasoning)
        assert [c.name for c in parsed.calls] == ["real"]


def test_a_second_closing_tag_takes_no_call_away() -> None:
    parsed = read(f"<think>hm</think>{call('{}')}</think>")
    assert (len(parsed.calls), parsed.reasoning, parsed.content) == (1, "hm", "")


def test_reasoning_that_never_ends_hides_everything_behind_it() -> None:
    parsed = read(f"<think>hm {call('{}')}")
    assert (parsed.calls, parsed.errors) == ((), ())
    assert parsed.flags == {"unclosed_reasoning"}
    assert [e.kind for e in read(f"<think>hm {call('{}')}", length="yes").errors] == ["truncated"]


def test_plain_text_becomes_an_action() -> None:
    action = parse_action(f"Let me see. {call('{}', 'now')}")
    assert action["content"] == "Let me see."
    assert action["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}
