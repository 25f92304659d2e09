import json
from pathlib import Path
from typing import Any

import pytest

from turngym.agents.renderer import Renderer
from turngym.errors import TemplateError
from turngym.types import Message, TokenRole

WANT_BOS = "tmpl-18"


@pytest.fixture(scope="module")
def cases(shared: Path) -> list[dict[str, Any]]:
    lines = (shared / "cases/tokenization/shared.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def tokenizer_of(case: dict[str, Any], shared: Path, *, special: bool = True) -> Any:
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    state = json.loads((shared / "cases/tokenization/tokenizer.json").read_text(encoding="utf-8"))
    for token in state["added_tokens"]:
        token["special"] = special or "|" in token["content"]
    backend = Tokenizer.from_str(json.dumps(state))
    if case["id"] == WANT_BOS:
        backend.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", 386)]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    tokenizer.chat_template = case["template"]
    return tokenizer


def roll_out(renderer: Renderer, case: dict[str, Any]) -> tuple[list[int], list[int]]:
    history: list[Message] = list(case["initial_messages"])
    start = renderer.start(history, case["tools"])
    assert renderer.codec.decode(start.ids.tolist()) == case["prompt_text"]
    assert set(start.role.tolist()) == {TokenRole.PROMPT}
    ids, mask = start.ids.tolist(), [0] * len(start.ids)
    for turn in case["turns"]:
        sampled = turn["sampled_ids"]
        ids += sampled
        mask += [1] * len(sampled)
        history.append(renderer.parse(sampled))
        if turn["env_messages"]:
            piece = renderer.extend(
                history, turn["env_messages"], case["tools"], last_id=sampled[-1]
            )
            assert set(piece.role.tolist()) <= {TokenRole.OBSERVATION, TokenRole.GLUE}
            assert renderer.codec.decode(piece.ids.tolist()) == turn["delta_text"]
            history += turn["env_messages"]
            ids += piece.ids.tolist()
            mask += [0] * len(piece.ids)
    return ids, mask


@pytest.mark.parametrize("special", [True, False], ids=["special", "ordinary"])
def test_every_shared_trajectory_has_its_ids_and_mask(
    cases: list[dict[str, Any]], shared: Path, special: bool
) -> None:
    assert len(cases) >= 11
    for case in cases:
        renderer = Renderer(
            tokenizer_of(case, shared, special=special),
            template_kwargs=case.get("template_kwargs_first"),
            on_rewrite="append",
        )
        expected = case["expected"]
        assert roll_out(renderer, case) == (expected["ids"], expected["action_mask"]), case["id"]
        if later := case.get("second_segment"):
            piece = renderer.start(later["prompt_messages"])
            assert piece.ids.tolist() + later["sampled_ids"] == later["expected_ids"]


def test_only_the_template_that_drops_reasoning_is_refused(
    cases: list[dict[str, Any]], shared: Path
) -> None:
    refused = []
    for case in cases:
        try:
            Renderer(tokenizer_of(case, shared), template_kwargs=case.get("template_kwargs_first"))
        except TemplateError:
            refused.append(case["id"])
    assert refused == ["tmpl-01"]
