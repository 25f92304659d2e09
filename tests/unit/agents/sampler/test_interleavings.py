import asyncio
import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from turngym.agents.base import Sampling
from turngym.agents.hf_policy import HFPolicy
from turngym.agents.model import policy_logprobs

Sampled = tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.float32]]
"""A context, the positions of what was sampled last, and the log-probabilities of that."""


async def wander(policy: HFPolicy, rng: random.Random, name: str) -> list[Sampled]:
    """Run a dialogue that is cancelled, released and rewritten at random."""
    ids = [rng.randrange(61) for _ in range(rng.randint(1, 12))]
    found = []
    for _ in range(rng.randint(1, 5)):
        sampling = Sampling(max_tokens=rng.randint(1, 40), stop_ids=(5,) * (rng.random() < 0.7))
        task = asyncio.ensure_future(
            policy.generate(ids, sampling, seed=rng.getrandbits(70), session=name)
        )
        if rng.random() < 0.2:
            await asyncio.sleep(rng.random() * 0.02)
            task.cancel()
        try:
            completion = await task
        except asyncio.CancelledError:
            continue
        row = np.array([*ids, *completion.ids], np.int32)
        found.append((row, np.arange(len(ids), len(row)), completion.logp))
        assert sum(count for _, count in completion.version_spans) == len(completion.ids)
        if rng.random() < 0.2:
            policy.release(name)
        ids = ids[: rng.randint(1, len(ids))] if rng.random() < 0.2 else row.tolist()
        ids += [rng.randrange(61) for _ in range(rng.randint(0, 20))]
    policy.release(name)
    return found


@pytest.mark.parametrize(
    ("family", "max_rows", "cache_mb", "deterministic"),
    [
        ("qwen3", 16, 1, False),
        ("qwen3", 3, 64, False),
        ("gpt2", 64, 1, False),
        ("llama", 8, 1, True),
    ],
)
def test_any_interleaving_yields_the_models_log_probabilities(
    family: str,
    max_rows: int,
    cache_mb: int,
    deterministic: bool,
    make_model: Callable[..., nn.Module],
    make_policy: Callable[..., HFPolicy],
) -> None:
    model = make_model(family)
    policy = make_policy(model, max_rows=max_rows, cache_mb=cache_mb, deterministic=deterministic)

    async def drop_caches() -> list[Sampled]:
        for version in range(1, 5):
            await asyncio.sleep(0.05)
            policy.set_version(version)
        return []

    async def everything() -> list[list[Sampled]]:
        names = [str(k) if k % 5 else "" for k in range(40)]
        wandering = (wander(policy, random.Random(k), name) for k, name in enumerate(names))
        return await asyncio.wait_for(asyncio.gather(drop_caches(), *wandering), 120)

    rows, where, sampled = zip(*itertools.chain(*asyncio.run(everything())), strict=True)
    with torch.no_grad():
        want = policy_logprobs(model, rows, where).logp.numpy()
    assert len(want) > 500
    np.testing.assert_allclose(np.concatenate(sampled), want, atol=2e-5)
    assert asyncio.run(idle_sessions(policy)) == 0


async def idle_sessions(policy: HFPolicy) -> int:
    """Count cached sessions once everything posted so far has been done."""
    await policy.generate([1], Sampling(max_tokens=1), seed=0)
    return policy.stats["cached_sessions"]
