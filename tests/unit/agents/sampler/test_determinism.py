import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from torch import nn

from turngym.agents.base import Sampling
from turngym.agents.hf_policy import HFPolicy

MakeModel = Callable[..., nn.Module]
MakePolicy = Callable[..., HFPolicy]


def roll_out(policy: HFPolicy, concurrency: int, rows: int) -> list[bytes]:
    """Run dialogues, so many at once; return the bits each one sampled."""

    async def dialogue(row: int, gate: asyncio.Semaphore) -> bytes:
        found = b""
        async with gate:
            rng = np.random.default_rng(row % 5)
            ids = rng.integers(0, 61, 3 + row % 7).tolist()
            for turn in range(2):
                sampling = Sampling(
                    max_tokens=3 + row % 11,
                    stop_ids=(5,),
                    temperature=(1.0, 0.7, 0.0)[row % 3],
                    top_k=(0, 0, 5)[row // 3 % 3],
                )
                one = await policy.generate(
                    ids, sampling, seed=10 * row + turn, session=str(row) if row % 2 else ""
                )
                found += one.ids.tobytes() + one.logp.tobytes()
                ids = [*ids, *one.ids.tolist(), *rng.integers(0, 61, 1 + 13 * row % 40).tolist()]
            policy.release(str(row))
        return found

    async def everything() -> list[bytes]:
        gate = asyncio.Semaphore(concurrency)
        return await asyncio.gather(*(dialogue(row, gate) for row in range(rows)))

    return asyncio.run(everything())


@pytest.mark.slow
@pytest.mark.parametrize(("family", "fast"), [("qwen3-odd", True), ("gemma3_text", False)])
def test_completions_are_bit_equal_for_any_concurrency(
    family: str, fast: bool, make_model: MakeModel, make_policy: MakePolicy
) -> None:
    policy = make_policy(make_model(family), fast=fast, deterministic=True)
    want = roll_out(policy, concurrency=64, rows=64)
    for concurrency in (1, 7):
        assert roll_out(policy, concurrency, rows=64) == want


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "bloom"])
def test_completions_are_bit_equal_alone_and_in_a_crowd(
    family: str, make_model: MakeModel, make_policy: MakePolicy
) -> None:
    policy = make_policy(make_model(family), deterministic=True)
    crowd = roll_out(policy, concurrency=12, rows=12)
    assert roll_out(policy, concurrency=1, rows=4) == crowd[:4]


def test_memory_pressure_does_not_show_in_the_bits(
    make_model: MakeModel, make_policy: MakePolicy
) -> None:
    model = make_model("qwen3")

    def run(cache_mb: int) -> tuple[list[bytes], HFPolicy]:
        policy = make_policy(model, deterministic=True, cache_mb=cache_mb)

        async def everything() -> list[bytes]:
            sampling = Sampling(max_tokens=130)
            completions = await asyncio.gather(
                *(policy.generate([row, 1, 2], sampling, seed=row) for row in range(20))
            )
            return [one.ids.tobytes() + one.logp.tobytes() for one in completions]

        return asyncio.run(everything()), policy

    (tight, pressed), (wide, free) = run(1), run(100)
    assert pressed.stats["preempted_requests"] > 0
    assert free.stats["preempted_requests"] == 0
    assert tight == wide
