import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import nn

from turngym.agents.base import Completion, Sampling
from turngym.agents.hf_policy import HFPolicy
from turngym.agents.model import policy_logprobs

VOCAB = 61
FAST = ["llama", "mistral", "qwen2", "qwen3", "qwen3-odd"]
CACHED = [
    "mistral-window",
    "gemma2",
    "gemma3_text",
    "granite",
    "cohere",
    "phi3",
    "gpt_neox",
    "gpt2",
]
RECOMPUTED = ["bloom", "mamba"]


def roll_out(policy: HFPolicy, rows: int, turns: int) -> list[tuple[list[int], Completion]]:
    """Run dialogues of uneven lengths at once; return each context with what followed it."""

    async def dialogue(row: int) -> list[tuple[list[int], Completion]]:
        rng = np.random.default_rng(row % 5)
        ids = rng.integers(0, VOCAB, 3 + row % 5).tolist()
        found = []
        for turn in range(turns):
            completion = await policy.generate(
                ids,
                Sampling(max_tokens=4 + row % 7, stop_ids=(5,)),
                seed=100 * row + turn,
                session=str(row),
            )
            found.append((ids, completion))
            result = rng.integers(0, VOCAB, 1 + (row * 7 + turn) % 13)
            ids = [*ids, *completion.ids.tolist(), *result.tolist()]
        policy.release(str(row))
        return found

    async def everything() -> list[list[tuple[list[int], Completion]]]:
        return await asyncio.gather(*(dialogue(row) for row in range(rows)))

    return [turn for turns_ in asyncio.run(everything()) for turn in turns_]


def worst_difference(model: nn.Module, turns: list[tuple[list[int], Completion]]) -> float:
    rows = [np.array([*ids, *completion.ids], np.int32) for ids, completion in turns]
    where = [np.arange(len(ids), len(row)) for (ids, _), row in zip(turns, rows, strict=True)]
    scored = policy_logprobs(model, rows, where).logp.detach().numpy()
    sampled = np.concatenate([completion.logp for _, completion in turns])
    return float(np.abs(scored - sampled).max())


@pytest.mark.parametrize("family", FAST)
def test_llama_type_models_take_the_functional_decoder(
    family: str, make_model: Callable[..., nn.Module], make_policy: Callable[..., HFPolicy]
) -> None:
    assert make_policy(make_model(family)).decoder_name == "FastDecoder"


@pytest.mark.parametrize("family", CACHED)
def test_models_of_plain_attention_keep_their_cache(
    family: str, make_model: Callable[..., nn.Module], make_policy: Callable[..., HFPolicy]
) -> None:
    assert make_policy(make_model(family)).decoder_name == "GenericDecoder"


@pytest.mark.parametrize("family", RECOMPUTED)
def test_models_with_other_state_are_recomputed_and_say_so(
    family: str,
    make_model: Callable[..., nn.Module],
    make_policy: Callable[..., HFPolicy],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert make_policy(make_model(family)).decoder_name == "RecomputeDecoder"
    assert "recomputes its whole context" in caplog.text


@pytest.mark.parametrize("family", [*FAST, *CACHED, *RECOMPUTED])
def test_sampled_log_probabilities_are_the_learners(
    family: str, make_model: Callable[..., nn.Module], make_policy: Callable[..., HFPolicy]
) -> None:
    model = make_model(family)
    turns = roll_out(make_policy(model, max_rows=8), rows=12, turns=3)
    assert worst_difference(model, turns) < 1e-5


@pytest.mark.parametrize("family", FAST)
def test_both_decoders_sample_the_same_dialogues(
    family: str, make_model: Callable[..., nn.Module], make_policy: Callable[..., HFPolicy]
) -> None:
    model = make_model(family)
    fast, generic = (
        roll_out(make_policy(model, fast=choice), rows=6, turns=3) for choice in (True, False)
    )
    for (_, a), (_, b) in zip(fast, generic, strict=True):
        assert a.ids.tolist() == b.ids.tolist()
        np.testing.assert_allclose(a.logp, b.logp, atol=1e-5)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "dynamic"])
def test_scaled_rotary_positions_are_the_models(
    kind: str, make_model: Callable[..., nn.Module], make_policy: Callable[..., HFPolicy]
) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 32
    model = make_model("llama", rope_parameters=rope)
    policy = make_policy(model)
    assert worst_difference(model, roll_out(policy, rows=4, turns=2)) < 1e-5
