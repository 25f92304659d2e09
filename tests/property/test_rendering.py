from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngym.agents.renderer import Renderer
from turngym.agents.tiny import tiny_tokenizer
from turngym.types import Message, TokenRole

CONTROL = ["<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
PIECES = [*CONTROL, "<|im_", "end|>", "\n", " ", '"', "\\", "{", "é", "漢", "🙂", "47", "What is "]
outside = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=8).map("".join)
clean = st.text("abc 123.,é漢🙂", max_size=12).map(str.strip)
json_texts = st.dictionaries(outside, st.one_of(outside, st.integers()), max_size=2)
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(tiny_tokenizer())


@st.composite
def actions(draw: st.DrawFn) -> Message:
    message: Message = {"role": "assistant", "content": draw(clean)}
    if thought := draw(clean):
        message["reasoning_content"] = thought
    for index, arguments in enumerate(draw(st.lists(json_texts, max_size=2))):
        message.setdefault("tool_calls", []).append(
            {
                "id": f"call{index:05d}",
                "type": "function",
                "function": {"name": "f", "arguments": arguments},
            }
        )
    return message


@st.composite
def answers(draw: st.DrawFn) -> list[Message]:
    if draw(st.booleans()):
        return [{"role": "user", "content": draw(outside)}]
    texts = draw(st.lists(outside, min_size=1, max_size=3))
    return [{"role": "tool", "content": text} for text in texts]


@settings(deadline=None, max_examples=60)
@given(action=actions())
def test_an_action_is_read_back_from_its_own_ids(renderer: Renderer, action: Message) -> None:
    ids = renderer.encode_action(action)
    assert renderer.parse(ids) == action
    assert int(ids[-1]) in renderer.stop_ids


@settings(deadline=None, max_examples=60)
@given(question=outside, turns=st.lists(st.tuples(actions(), answers()), max_size=3))
def test_pieces_joined_are_the_whole_dialogue_rendered(
    renderer: Renderer, question: str, turns: list[tuple[Message, list[Message]]]
) -> None:
    history: list[Message] = [{"role": "user", "content": question}]
    ids = renderer.start(history, TOOLS).ids.tolist()
    for action, answer in turns:
        sampled = renderer.encode_action(action).tolist()
        history.append(action)
        suffix = renderer.extend(history, answer, TOOLS, last_id=sampled[-1])
        history.extend(answer)
        ids += [*sampled, *suffix.ids.tolist()]
    assert ids == renderer.start(history, TOOLS).ids.tolist()


@settings(deadline=None, max_examples=60)
@given(answer=answers())
def test_observations_decode_to_their_text_and_hold_no_control_token(
    renderer: Renderer, answer: list[Message]
) -> None:
    said: Message = {"role": "assistant", "content": ""}
    piece = renderer.extend([said], answer, TOOLS, last_id=renderer.stop_ids[0])
    outside_ids = piece.ids[piece.role == TokenRole.OBSERVATION].tolist()
    assert not any(map(renderer.codec.is_control, outside_ids))
    assert renderer.codec.decode(outside_ids) == "".join(m["content"] for m in answer)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_roles_are_a_function_of_the_prefix(renderer: Renderer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, renderer.vocab_size - 1), max_size=40))
    cut = data.draw(st.integers(0, len(ids)))
    np.testing.assert_array_equal(renderer.roles(ids)[:cut], renderer.roles(ids[:cut]))
    tracker = renderer.role_tracker()
    for token_id, role in zip(ids, renderer.roles(ids), strict=True):
        assert tracker.role == role
        tracker.push(renderer.codec.piece(token_id))
