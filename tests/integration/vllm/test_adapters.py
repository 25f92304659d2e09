import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from turngym.agents import vllm_weights
from turngym.agents.base import Sampling
from turngym.agents.config import EngineConfig
from turngym.agents.model import attach_lora, policy_logprobs
from turngym.agents.vllm_engine import InProcessBackend
from turngym.agents.vllm_policy import VLLMPolicy, open_vllm
from turngym.errors import WeightSyncError
from turngym.rl.weights import Canary

PROMPT = [4, 8, 15, 16, 23, 42]
CANARY = Canary(PROMPT, Sampling())
RANK, ALPHA = 4, 12.0


@pytest.fixture(scope="module")
def policy(folder: Path) -> Iterator[VLLMPolicy]:
    engine = EngineConfig(kind="vllm", kv_gib=0.5)
    with open_vllm(engine, model_path=folder, lora_rank=RANK, lora_alpha=ALPHA) as policy:
        yield policy


@pytest.fixture
def adapted(model: nn.Module) -> nn.Module:
    return attach_lora(model, RANK, alpha=ALPHA)


@pytest.fixture
def synced(policy: VLLMPolicy, adapted: nn.Module, tools: Any) -> VLLMPolicy:
    policy.push(tools.trainable(adapted), version=policy.version + 1)
    return policy


def test_the_base_is_sampled_before_the_first_push(policy: VLLMPolicy, model: nn.Module) -> None:
    assert policy.version == 0
    assert CANARY.check(policy, model, version=0) <= 1e-5


def test_twenty_adapters_are_the_trainers(
    synced: VLLMPolicy, adapted: nn.Module, play: Any, tools: Any
) -> None:
    for update in range(20):
        tools.perturb(adapted, update, 0.02)
        synced.push(tools.trainable(adapted), version=synced.version + 1)
        if update % 5 == 0:
            assert CANARY.check(synced, adapted, version=synced.version) <= 1e-5
    backend: Any = synced.backend
    assert len(backend._engine.list_loras()) == 1
    assert tools.worst_gap({synced.version: adapted}, play(synced, range(6))) <= 1e-5


def test_adapters_that_change_in_flight_are_kept_apart(
    synced: VLLMPolicy, adapted: nn.Module, run: Any, tools: Any
) -> None:
    models = {synced.version: tools.snapshot(adapted)}

    async def push_midway() -> list[Any]:
        sampling = Sampling(max_tokens=250)
        tasks = [
            asyncio.create_task(synced.generate(PROMPT, sampling, seed=seed)) for seed in range(8)
        ]
        await asyncio.sleep(0.15)
        tools.perturb(adapted, 1, 0.05)
        models[synced.version + 1] = tools.snapshot(adapted)
        await asyncio.to_thread(synced.push, tools.trainable(adapted), version=synced.version + 1)
        return await asyncio.gather(*tasks)

    completions = run(push_midway())
    assert any(len(c.version_spans) == 2 for c in completions)
    for completion in completions:
        row = np.array([*PROMPT, *completion.ids], np.int32)
        start = len(PROMPT)
        for version, count in completion.version_spans:
            with torch.no_grad():
                ours = policy_logprobs(
                    models[version], [row], [np.arange(start, start + count)]
                ).logp.numpy()
            at = start - len(PROMPT)
            assert np.abs(ours - completion.logp[at : at + count]).max() <= 1e-5
            start += count


def test_an_adapter_that_is_stale_is_stopped_with_both_versions(
    synced: VLLMPolicy, adapted: nn.Module, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = synced.version
    tools.perturb(adapted, 1, 0.1)

    def keep_the_old_one(self: Any, adapter: Any) -> None:
        pass

    with monkeypatch.context() as patch:
        patch.setattr(InProcessBackend, "_use", keep_the_old_one)
        with pytest.raises(
            WeightSyncError, match=f"{version + 1} was pushed.* reports version {version}"
        ):
            synced.push(tools.trainable(adapted), version=version + 1)


def test_a_disk_that_is_full_leaves_the_old_adapter_in_use(
    synced: VLLMPolicy, adapted: nn.Module, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tools.snapshot(adapted)
    tools.perturb(adapted, 1, 0.1)

    def open_full(path: Any, mode: str) -> Any:
        return Path("/dev/full").open(mode)

    with monkeypatch.context() as patch:
        patch.setattr(vllm_weights, "open", open_full, raising=False)
        with pytest.raises(WeightSyncError, match="No space left"):
            synced.push(tools.trainable(adapted), version=synced.version + 1)
    assert CANARY.check(synced, before, version=synced.version) <= 1e-5


def test_tensors_that_are_no_adapters_of_the_rank_are_refused(
    synced: VLLMPolicy, adapted: nn.Module, tools: Any
) -> None:
    with pytest.raises(WeightSyncError, match="lora_rank=0"):
        synced.push([("model.norm.weight", torch.zeros(96))], version=99)
    name = tools.trainable(adapted)[0][0]
    with pytest.raises(WeightSyncError, match="rank 8"):
        synced.push([(name, torch.zeros(8, 96))], version=99)
    assert CANARY.check(synced, adapted, version=synced.version) <= 1e-5
