import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from turngym.agents.base import Sampling
from turngym.agents.model import policy_logprobs
from turngym.errors import ConfigError

PROMPT = [3, 14, 15, 9]


def complete(policy: Any, count: int = 3, tokens: int = 12) -> list[Any]:
    async def all_of_them() -> list[Any]:
        sampling = Sampling(max_tokens=tokens, temperature=0.8)
        calls = (policy.generate(PROMPT, sampling, seed=seed) for seed in range(count))
        return list(await asyncio.gather(*calls))

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_likeliest_tokens_are_those_of_the_model(
    deterministic: bool, make_model: Callable[..., Any], make_policy: Callable[..., Any]
) -> None:
    model = make_model("qwen3")
    for found in complete(make_policy(model, topk=4, deterministic=deterministic)):
        row = np.concatenate([np.array(PROMPT, np.int32), found.ids])
        with torch.no_grad():
            logits = model(torch.tensor(row[None].astype(np.int64))).logits[0]
        logp, ids = (logits[len(PROMPT) - 1 : -1] / 0.8).log_softmax(-1).topk(4)
        assert found.extra["topk_ids"].tolist() == ids.tolist()
        assert found.extra["topk_ids"].dtype == np.int32
        np.testing.assert_allclose(found.extra["topk_logp"], logp.numpy(), atol=1e-4)
        scored = policy_logprobs(
            model,
            [row],
            [np.arange(len(PROMPT), len(row))],
            temperature=0.8,
            chunk_tokens=5,
            topk_ids=torch.from_numpy(found.extra["topk_ids"].astype(np.int64)),
        )
        assert scored.topk is not None
        torch.testing.assert_close(scored.topk, logp, atol=1e-4, rtol=0)


def test_recording_changes_no_sample_and_survives_preemption(
    make_model: Callable[..., Any], make_policy: Callable[..., Any]
) -> None:
    model = make_model("qwen3")
    plain = complete(make_policy(model), 8, 150)
    roomy = complete(make_policy(model, topk=3), 8, 150)
    tight_policy = make_policy(model, topk=3, cache_mb=1)
    tight_policy._engine.table._cache_bytes = 5 * 256 * 2 * 2 * 8 * 4 * 2
    tight = complete(tight_policy, 8, 150)
    assert tight_policy.stats["preempted_requests"] > 0
    for bare, wide, narrow in zip(plain, roomy, tight, strict=True):
        assert bare.extra == {}
        assert bare.ids.tolist() == wide.ids.tolist() == narrow.ids.tolist()
        assert wide.extra["topk_ids"].tolist() == narrow.extra["topk_ids"].tolist()


def test_more_than_the_vocabulary_is_refused(
    make_model: Callable[..., Any], make_policy: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigError, match=r"topk must lie in 0\.\.61"):
        make_policy(make_model("qwen3"), topk=62)


def test_self_certainty_is_the_divergence_from_uniform(make_model: Callable[..., Any]) -> None:
    model = make_model("llama")
    row = np.array([5, 6, 7, 8], np.int32)
    found = policy_logprobs(
        model, [row], [np.array([1, 3])], temperature=2.0, with_certainty=True, with_entropy=True
    )
    logp = (model(torch.from_numpy(row.astype(np.int64))[None]).logits[0, [0, 2]] / 2).log_softmax(
        -1
    )
    uniform = torch.full_like(logp, 1 / logp.shape[-1])
    divergence = (uniform * (uniform.log() - logp)).sum(-1)
    assert found.certainty is not None
    torch.testing.assert_close(found.certainty, divergence, atol=1e-4, rtol=0)
    assert found.topk is None
