import json
from typing import Any

import pytest

from turngym.envs.spaces import DialogueSpace, MessageSpace, TextSpace

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
UNREAD = {"text": "{", "error": "malformed_json", "span": (0, 1)}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "naïve 你好 🙂 <|im_end|>"},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "so"},
        {"role": "assistant", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": "", "invalid_tool_calls": [UNREAD]},
    ],
)
def test_messages_are_contained_and_survive_json(message: Any) -> None:
    space = MessageSpace("assistant")
    assert message in space
    assert message in MessageSpace()
    assert message not in MessageSpace("user")
    copied = space.from_jsonable(json.loads(json.dumps(space.to_jsonable([message]))))
    assert copied == [message]
    dialogues = DialogueSpace()
    line = json.dumps(dialogues.to_jsonable([(message, message)]))
    assert dialogues.from_jsonable(json.loads(line)) == [(message, message)]


@pytest.mark.parametrize(
    "value",
    [
        None,
        "text",
        {"role": "robot", "content": ""},
        {"role": "assistant"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": ["text"]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "assistant", "content": "", "tool_calls": None},
        {"role": "assistant", "content": "", "invalid_tool_calls": [{"text": "{"}]},
        {"role": "assistant", "content": "", "reasoning_content": 3},
    ],
)
def test_other_values_are_not(value: Any) -> None:
    assert value not in MessageSpace()
    assert (value,) not in DialogueSpace()


@pytest.mark.parametrize("space", [MessageSpace("assistant"), DialogueSpace(), TextSpace()])
def test_samples_are_contained_and_repeat_with_the_seed(space: Any) -> None:
    space.seed(3)
    first = [space.sample() for _ in range(10)]
    space.seed(3)
    assert [space.sample() for _ in range(10)] == first
    assert all(sample in space for sample in first)
    with pytest.raises(ValueError, match="mask"):
        space.sample(mask=1)


def test_spaces_are_equal_by_what_they_hold() -> None:
    assert MessageSpace("user") == MessageSpace("user")
    assert MessageSpace("user") != MessageSpace()
    assert DialogueSpace() == DialogueSpace()
    assert TextSpace() != DialogueSpace()


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(ValueError, match="'robot'"):
        MessageSpace("robot")
