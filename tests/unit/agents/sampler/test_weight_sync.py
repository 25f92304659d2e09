import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from turngym.agents.base import Completion, Sampling
from turngym.agents.hf_policy import HFPolicy
from turngym.agents.model import adapters_disabled, attach_lora, policy_logprobs
from turngym.errors import WeightSyncError

MakeModel = Callable[..., nn.Module]
MakePolicy = Callable[..., HFPolicy]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def sample(policy: HFPolicy, ids: list[int], seed: int = 0, **sampling: Any) -> Completion:
    return asyncio.run(policy.generate(ids, Sampling(**sampling), seed=seed))


def score(model: nn.Module, ids: list[int], completion: Completion) -> np.ndarray:
    row = np.array([*ids, *completion.ids], np.int32)
    found = policy_logprobs(model, [row], [np.arange(len(ids), len(row))]).logp
    return np.asarray(found.detach())


async def until_sampling(policy: HFPolicy, tokens: int) -> None:
    while policy.stats["sampled_tokens"] < tokens:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("fast", [True, False])
def test_weights_that_change_in_flight_are_recorded_token_by_token(
    fast: bool, make_model: MakeModel, make_policy: MakePolicy
) -> None:
    model = make_model("qwen3")
    policy = make_policy(model, fast=fast)

    async def switch() -> Completion:
        task = asyncio.ensure_future(
            policy.generate(PROMPT, Sampling(max_tokens=180), seed=1, session="a")
        )
        await until_sampling(policy, 5)
        with policy.paused(), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
            policy.set_version(7)
        return await task

    completion = asyncio.run(switch())
    (old, before), (new, after) = completion.version_spans
    assert (old, new, before + after) == (0, 7, 180)
    want = score(model, PROMPT, completion)
    np.testing.assert_allclose(completion.logp[before:], want[before:], atol=1e-5)
    assert np.abs(completion.logp[:before] - want[:before]).max() > 1e-3


def test_idle_sessions_meet_new_weights_with_an_empty_cache(
    make_model: MakeModel, make_policy: MakePolicy
) -> None:
    model = make_model("qwen3")
    policy = make_policy(model)
    asyncio.run(policy.generate(PROMPT, Sampling(max_tokens=5), seed=1, session="a"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    policy.set_version(1)
    again = asyncio.run(policy.generate(PROMPT, Sampling(max_tokens=5), seed=1, session="a"))
    assert again.version_spans == ((1, 5),)
    np.testing.assert_allclose(again.logp, score(model, PROMPT, again), atol=1e-5)


def test_weights_that_changed_unannounced_are_refused(
    make_model: MakeModel, make_policy: MakePolicy
) -> None:
    model = make_model("qwen3")
    policy = make_policy(model)
    sample(policy, PROMPT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    row = np.array(PROMPT, np.int32)
    torch.autograd.backward(-policy_logprobs(model, [row], [np.arange(1, 8)]).logp.sum())
    optimizer.step()
    with pytest.raises(WeightSyncError, match="set_version"):
        sample(policy, PROMPT)
    policy.set_version(1)
    completion = sample(policy, PROMPT)
    np.testing.assert_allclose(completion.logp, score(model, PROMPT, completion), atol=1e-5)


def test_weights_that_change_unannounced_end_what_is_in_flight(
    make_model: MakeModel, make_policy: MakePolicy
) -> None:
    model = make_model("qwen3")
    policy = make_policy(model, max_rows=2)

    async def change() -> list[Completion | BaseException]:
        calls = [policy.generate(PROMPT, Sampling(max_tokens=180), seed=k) for k in range(4)]
        running = asyncio.gather(*calls, return_exceptions=True)
        await until_sampling(policy, 5)
        with policy.paused(), torch.no_grad():
            next(iter(model.parameters())).mul_(1.1)
        return await asyncio.wait_for(running, 30)

    assert all(isinstance(outcome, WeightSyncError) for outcome in asyncio.run(change()))
    policy.set_version(1)
    assert len(sample(policy, PROMPT, max_tokens=5).ids) == 5


def test_a_request_for_another_version_is_refused(
    make_model: MakeModel, make_policy: MakePolicy
) -> None:
    policy = make_policy(make_model("qwen3"))
    policy.set_version(3)
    with pytest.raises(WeightSyncError, match=r"version 2 .* version 3"):
        asyncio.run(policy.generate(PROMPT, Sampling(), seed=0, version=2))
    assert asyncio.run(policy.generate(PROMPT, Sampling(), seed=0, version=3)).version_spans


def test_pushed_weights_are_copied_in(make_model: MakeModel, make_policy: MakePolicy) -> None:
    model, trained = make_model("qwen3"), make_model("qwen3")
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.1)
    policy = make_policy(model)
    policy.push(trained.named_parameters(), version=4)
    completion = sample(policy, PROMPT)
    assert completion.version_spans[0][0] == policy.version == 4
    np.testing.assert_allclose(completion.logp, score(trained, PROMPT, completion), atol=1e-5)


def test_a_push_that_does_not_fit_is_refused(
    make_model: MakeModel, make_policy: MakePolicy
) -> None:
    policy = make_policy(make_model("qwen3"))
    with pytest.raises(WeightSyncError, match=r"'lm_haed'.*no such parameter"):
        policy.push([("lm_haed", torch.zeros(2))], version=1)
    with pytest.raises(WeightSyncError, match=r"\(2,\).*\(32,\)"):
        policy.push([("model.norm.weight", torch.zeros(2))], version=1)


@pytest.mark.parametrize("fast", [True, False])
def test_lora_weights_are_sampled_from(
    fast: bool, make_model: MakeModel, make_policy: MakePolicy
) -> None:
    model = attach_lora(make_model("qwen3"), 2)
    policy = make_policy(model, fast=fast)
    assert policy.decoder_name == ("FastDecoder" if fast else "GenericDecoder")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    policy.set_version(1)
    completion = sample(policy, PROMPT, max_tokens=20)
    np.testing.assert_allclose(completion.logp, score(model, PROMPT, completion), atol=1e-5)
    with adapters_disabled(model):
        assert np.abs(completion.logp - score(model, PROMPT, completion)).max() > 1e-2
