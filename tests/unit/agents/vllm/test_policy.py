import asyncio
import copy
import subprocess
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import nn

from turngym.agents.base import Completion, Sampling, TrainablePolicy
from turngym.agents.model import attach_lora, policy_logprobs
from turngym.agents.vllm_backend import EngineDiedError, EngineSpec
from turngym.agents.vllm_fake import FakeBackend, FakeFaults
from turngym.agents.vllm_policy import VLLMPolicy
from turngym.errors import ConfigError, EngineError, EngineTimeoutError, WeightSyncError
from turngym.rl.weights import Canary

T = TypeVar("T")
PROMPT = [4, 8, 15, 16, 23, 42]
CANARY = Canary(PROMPT, Sampling(temperature=0.7))


def run(work: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(work, 60)

    return asyncio.run(limited())


def nudge(model: nn.Module, seed: int, scale: float = 0.1) -> None:
    """Change every trainable weight."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn_like(parameter))


def trainable(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def gap(
    model: nn.Module, completion: Completion, temperature: float = 1.0, part: slice = slice(None)
) -> float:
    """Largest difference between a completion's log-probabilities and the model's."""
    row = np.array([*PROMPT, *completion.ids], np.int32)
    where = np.arange(len(PROMPT), len(row))
    with torch.no_grad():
        ours = policy_logprobs(model, [row], [where], temperature=temperature).logp.numpy()
    return float(np.abs(ours - completion.logp)[part].max())


def test_it_is_a_policy_that_trains(model: nn.Module) -> None:
    with VLLMPolicy(FakeBackend(model)) as policy:
        trainable_policy: TrainablePolicy = policy
        assert trainable_policy.max_context == 96
        assert policy.version == 0


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_its_log_probabilities_are_the_trainers(model: nn.Module, temperature: float) -> None:
    with VLLMPolicy(FakeBackend(model)) as policy:
        sampling = Sampling(temperature=temperature, max_tokens=20)
        completion = run(policy.generate(PROMPT, sampling, seed=5, version=0))
    assert len(completion.ids) == 20
    assert completion.finish_reason == "length"
    assert completion.version_spans == ((0, 20),)
    assert gap(model, completion, temperature) < 1e-5


def test_a_stop_token_ends_a_completion_and_belongs_to_it(model: nn.Module) -> None:
    with VLLMPolicy(FakeBackend(model)) as policy:
        whole = run(policy.generate(PROMPT, Sampling(max_tokens=20), seed=5))
        stop = int(whole.ids[7])
        first = whole.ids.tolist().index(stop)
        cut = run(policy.generate(PROMPT, Sampling(max_tokens=20, stop_ids=(stop,)), seed=5))
    assert cut.ids.tolist() == whole.ids.tolist()[: first + 1]
    assert cut.finish_reason == "stop"


def test_the_seed_alone_decides_what_is_drawn(model: nn.Module) -> None:
    async def both(policy: VLLMPolicy) -> tuple[list[Completion], list[Completion]]:
        sampling = Sampling(max_tokens=12)
        together = await asyncio.gather(
            *(policy.generate(PROMPT, sampling, seed=seed) for seed in range(8))
        )
        alone = [await policy.generate(PROMPT, sampling, seed=seed) for seed in range(8)]
        return together, alone

    with VLLMPolicy(FakeBackend(model)) as policy:
        together, alone = run(both(policy))
    assert [c.ids.tolist() for c in together] == [c.ids.tolist() for c in alone]
    assert len({tuple(c.ids.tolist()) for c in alone}) > 1


def test_a_context_that_is_full_yields_an_empty_completion(model: nn.Module) -> None:
    with VLLMPolicy(FakeBackend(model, max_context=6)) as policy:
        completion = run(policy.generate(PROMPT, Sampling(), seed=0))
    assert len(completion.ids) == 0
    assert completion.finish_reason == "length"
    assert completion.version_spans == ()


def test_a_completion_ends_where_the_context_does(model: nn.Module) -> None:
    with VLLMPolicy(FakeBackend(model, max_context=10)) as policy:
        completion = run(policy.generate(PROMPT, Sampling(max_tokens=50), seed=0))
    assert len(completion.ids) == 4
    assert completion.finish_reason == "length"


@pytest.mark.parametrize("bad", [-1, 61])
def test_a_token_outside_the_vocabulary_is_refused_and_the_engine_lives(
    model: nn.Module, bad: int
) -> None:
    with VLLMPolicy(FakeBackend(model)) as policy:
        with pytest.raises(EngineError, match=f"token id {bad} is outside .* 61"):
            run(policy.generate([4, bad], Sampling(), seed=0))
        assert len(run(policy.generate(PROMPT, Sampling(max_tokens=3), seed=0)).ids) == 3


@pytest.mark.parametrize("sampling", [Sampling(top_p=0.9), Sampling(top_k=5)])
def test_truncated_sampling_is_for_evaluation(model: nn.Module, sampling: Sampling) -> None:
    with (
        VLLMPolicy(FakeBackend(model)) as policy,
        pytest.raises(ConfigError, match="training=False"),
    ):
        run(policy.generate(PROMPT, sampling, seed=0))
    with VLLMPolicy(FakeBackend(model), training=False) as policy:
        assert len(run(policy.generate(PROMPT, sampling, seed=0)).ids)


def test_the_likeliest_tokens_come_with_the_sampled_one(model: nn.Module) -> None:
    with VLLMPolicy(FakeBackend(model), topk=3) as policy:
        completion = run(policy.generate(PROMPT, Sampling(max_tokens=9, temperature=0), seed=0))
    assert completion.extra["topk_ids"].shape == (9, 3)
    assert completion.extra["topk_ids"][:, 0].tolist() == completion.ids.tolist()
    assert np.allclose(completion.extra["topk_logp"][:, 0], completion.logp)


@pytest.mark.parametrize("rank", [0, 4])
def test_pushed_weights_are_sampled_from(model: nn.Module, rank: int) -> None:
    trained = attach_lora(copy.deepcopy(model), rank) if rank else copy.deepcopy(model)
    with VLLMPolicy(FakeBackend(trained)) as policy:
        for version in range(1, 6):
            nudge(trained, version)
            policy.push(trainable(trained), version=version)
            assert policy.version == version
            assert CANARY.check(policy, trained, version=version) < 1e-5


def test_a_push_in_flight_keeps_the_tokens_and_goes_on_under_the_new_weights(
    model: nn.Module,
) -> None:
    trained = copy.deepcopy(model)

    async def sample_and_push(policy: VLLMPolicy) -> list[Completion]:
        sampling = Sampling(max_tokens=60)
        tasks = [
            asyncio.create_task(policy.generate(PROMPT, sampling, seed=seed)) for seed in range(6)
        ]
        for version in (1, 2):
            await asyncio.sleep(0.15)
            nudge(trained, version)
            snapshots.append(copy.deepcopy(trained))
            await asyncio.to_thread(policy.push, trainable(trained), version=version)
        return await asyncio.gather(*tasks)

    snapshots = [model]
    with VLLMPolicy(FakeBackend(model, latency_s=0.005), topk=2) as policy:
        completions = run(sample_and_push(policy))
    assert {v for c in completions for v, _ in c.version_spans} == {0, 1, 2}
    for completion in completions:
        assert len(completion.ids) == len(completion.extra["topk_ids"]) == 60
        start = 0
        for version, count in completion.version_spans:
            assert gap(snapshots[version], completion, part=slice(start, start + count)) < 1e-5
            start += count
        assert start == 60


def test_a_push_from_the_loop_that_samples_does_not_deadlock(model: nn.Module) -> None:
    async def push_here(policy: VLLMPolicy) -> Completion:
        task = asyncio.create_task(policy.generate(PROMPT, Sampling(max_tokens=40), seed=1))
        await asyncio.sleep(0.05)
        policy.push(trainable(model), version=1)
        return await task

    with VLLMPolicy(FakeBackend(model, latency_s=0.005)) as policy:
        completion = run(push_here(policy))
    assert [version for version, _ in completion.version_spans] == [0, 1]


def test_giving_up_on_one_request_leaves_the_others_alone(model: nn.Module) -> None:
    async def give_up(policy: VLLMPolicy) -> Completion:
        sampling = Sampling(max_tokens=40)
        kept = asyncio.create_task(policy.generate(PROMPT, sampling, seed=1))
        dropped = asyncio.create_task(policy.generate(PROMPT, sampling, seed=2))
        await asyncio.sleep(0.05)
        dropped.cancel()
        return await kept

    with VLLMPolicy(FakeBackend(model, latency_s=0.005)) as policy:
        alone = run(policy.generate(PROMPT, Sampling(max_tokens=40), seed=1))
        assert run(give_up(policy)).ids.tolist() == alone.ids.tolist()


def test_a_skipped_sync_is_found_by_the_canary_with_both_numbers(model: nn.Module) -> None:
    trained = copy.deepcopy(model)
    nudge(trained, 1)
    with VLLMPolicy(FakeBackend(model, faults=FakeFaults(skip_sync=True))) as policy:
        policy.push(trainable(trained), version=1)
        with pytest.raises(WeightSyncError, match=r"-\d+\.\d+ in the engine and -\d+\.\d+ in the"):
            CANARY.check(policy, trained, version=1)


def test_a_head_left_with_the_old_embeddings_is_found_by_the_canary(model: nn.Module) -> None:
    trained = copy.deepcopy(model)
    nudge(trained, 1)
    with VLLMPolicy(FakeBackend(model, faults=FakeFaults(skip_names=("embed",)))) as policy:
        policy.push(trainable(trained), version=1)
        with pytest.raises(WeightSyncError, match="weights are not the same"):
            CANARY.check(policy, trained, version=1)


def test_an_engine_that_serves_an_older_version_is_stopped(model: nn.Module) -> None:
    with VLLMPolicy(FakeBackend(model, faults=FakeFaults(stale_version=True))) as policy:
        policy.push(trainable(model), version=3)
        with pytest.raises(WeightSyncError, match=r"version 3 were asked .* from version 0"):
            run(policy.generate(PROMPT, Sampling(max_tokens=3), seed=0))


def test_asking_for_another_version_names_both(model: nn.Module) -> None:
    with (
        VLLMPolicy(FakeBackend(model)) as policy,
        pytest.raises(WeightSyncError, match=r"version 4 .* version 0"),
    ):
        run(policy.generate(PROMPT, Sampling(), seed=0, version=4))


def test_weights_that_are_refused_leave_the_old_ones_in_use(model: nn.Module) -> None:
    faults = FakeFaults(refuse_load="no space left in shared memory")
    with VLLMPolicy(FakeBackend(model, faults=faults)) as policy:
        with pytest.raises(WeightSyncError, match="no space left"):
            policy.push(trainable(model), version=1)
        faults.refuse_load = ""
        with pytest.raises(WeightSyncError, match="no such parameter"):
            policy.push([("model.norm.wieght", torch.zeros(32))], version=1)
        assert policy.version == 0
        assert CANARY.check(policy, model, version=0) < 1e-5


def test_pushing_nothing_is_refused(model: nn.Module) -> None:
    with VLLMPolicy(FakeBackend(model)) as policy, pytest.raises(WeightSyncError, match="no tens"):
        policy.push([], version=1)


def test_an_engine_that_dies_is_asked_again_and_answers_alike(model: nn.Module) -> None:
    with VLLMPolicy(FakeBackend(model)) as policy:
        want = run(policy.generate(PROMPT, Sampling(max_tokens=20), seed=7))
    faults = FakeFaults(die_after=9)
    with VLLMPolicy(FakeBackend(model, faults=faults)) as policy:
        assert run(policy.generate(PROMPT, Sampling(max_tokens=20), seed=7)).ids.tolist() == (
            want.ids.tolist()
        )
    with (
        VLLMPolicy(FakeBackend(model, faults=FakeFaults(die_after=9)), retries=0) as policy,
        pytest.raises(EngineDiedError),
    ):
        run(policy.generate(PROMPT, Sampling(max_tokens=20), seed=7))


def test_a_request_that_is_rejected_fails_alone(model: nn.Module) -> None:
    faults = FakeFaults(reject="the request is malformed")
    with VLLMPolicy(FakeBackend(model, faults=faults)) as policy:
        with pytest.raises(EngineError, match="malformed"):
            run(policy.generate(PROMPT, Sampling(max_tokens=3), seed=0))
        faults.reject = ""
        assert len(run(policy.generate(PROMPT, Sampling(max_tokens=3), seed=0)).ids) == 3


def test_a_push_to_an_engine_that_hangs_ends_by_its_deadline(model: nn.Module) -> None:
    faults = FakeFaults(hang=True)
    with VLLMPolicy(FakeBackend(model, faults=faults, timeout_s=0.2), timeout_s=0.2) as policy:
        with pytest.raises(EngineTimeoutError, match=r"within 0\.2 s"):
            policy.push(trainable(model), version=1)
        assert policy.version == 0
        faults.hang = False
        policy.push(trainable(model), version=1)
        assert policy.version == 1


def test_closing_fails_what_is_in_flight(model: nn.Module) -> None:
    async def close_soon(policy: VLLMPolicy) -> None:
        task = asyncio.create_task(policy.generate(PROMPT, Sampling(max_tokens=80), seed=1))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(policy.close)
        with pytest.raises(EngineError, match="closed"):
            await task

    policy = VLLMPolicy(FakeBackend(model, latency_s=0.01))
    run(close_soon(policy))
    policy.close()


def test_settings_out_of_range_are_refused(model: nn.Module, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"0\.\.61"):
        VLLMPolicy(FakeBackend(model), topk=62)
    with pytest.raises(ConfigError, match="float32"):
        EngineSpec(model_path=tmp_path, deterministic=True, dtype="bfloat16")
    with pytest.raises(ConfigError, match="rows"):
        EngineSpec(model_path=tmp_path, rows=0)


def test_the_policys_module_does_not_load_vllm() -> None:
    code = "import sys, turngym.agents.vllm_policy; print('vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
