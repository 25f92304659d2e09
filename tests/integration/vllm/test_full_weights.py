import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from turngym.agents.base import Completion, Sampling
from turngym.agents.config import EngineConfig
from turngym.agents.vllm_engine import InProcessBackend
from turngym.agents.vllm_policy import VLLMPolicy, open_vllm
from turngym.agents.vllm_worker import WeightReceiver
from turngym.errors import ConfigError, EngineError, WeightSyncError
from turngym.rl.weights import Canary

PROMPT = [4, 8, 15, 16, 23, 42]
CANARY = Canary(PROMPT, Sampling())
ENGINE = EngineConfig(kind="vllm", kv_gib=0.5)


@pytest.fixture(scope="module")
def policy(folder: Path) -> Iterator[VLLMPolicy]:
    before = torch.get_num_threads(), random.getstate(), torch.get_rng_state()
    setter = torch.set_num_threads
    with open_vllm(ENGINE, model_path=folder, topk=3) as policy:
        assert torch.set_num_threads is setter
        assert torch.get_num_threads() == before[0]
        assert random.getstate() == before[1]
        assert torch.equal(torch.get_rng_state(), before[2])
        yield policy


@pytest.fixture
def synced(policy: VLLMPolicy, model: nn.Module, tools: Any) -> VLLMPolicy:
    """The module's policy, sampling from this test's fresh model under a new version."""
    policy.push(tools.trainable(model), version=policy.version + 1)
    return policy


def versions(groups: Any) -> set[int]:
    return {int(v) for g in groups for t in g.trajectories for v in t.version[t.sampled]}


@pytest.mark.parametrize("temperature", [1.0, 0.8, 1.3])
def test_log_probabilities_are_the_trainers_over_several_turns(
    synced: VLLMPolicy, model: nn.Module, play: Any, tools: Any, temperature: float
) -> None:
    groups = play(synced, range(6), temperature=temperature)
    assert sum(len(t.turns) > 1 for g in groups for t in g.trajectories) > 5
    assert tools.worst_gap({synced.version: model}, groups, temperature) <= 1e-5


def test_they_still_are_after_twenty_updates(
    synced: VLLMPolicy, model: nn.Module, play: Any, tools: Any
) -> None:
    before = synced.version
    times = []
    for update in range(20):
        tools.perturb(model, update, 0.003)
        began = time.perf_counter()
        synced.push(tools.trainable(model), version=synced.version + 1)
        times.append(time.perf_counter() - began)
        if update % 5 == 0:
            CANARY.check(synced, model, version=synced.version)
    assert synced.version == before + 20
    assert sorted(times)[10] < 0.2
    assert tools.worst_gap({synced.version: model}, play(synced, range(6))) <= 1e-5


def test_they_are_for_each_version_when_weights_change_in_flight(
    synced: VLLMPolicy, model: nn.Module, play: Any, tools: Any
) -> None:
    models = {synced.version: tools.snapshot(model)}
    done = threading.Event()

    def keep_pushing() -> None:
        while not done.wait(0.3) and len(models) < 12:
            tools.perturb(model, len(models), 0.003)
            version = synced.version + 1
            models[version] = tools.snapshot(model)
            synced.push(tools.trainable(model), version=version)

    pusher = threading.Thread(target=keep_pushing)
    pusher.start()
    try:
        groups = play(synced, range(40))
    finally:
        done.set()
        pusher.join()
    assert len(versions(groups)) > 1
    several = [
        t
        for g in groups
        for t in g.trajectories
        for turn in t.turns
        if len(set(t.version[turn.start : turn.stop].tolist())) > 1
    ]
    assert several, "no turn was sampled under two versions"
    assert tools.worst_gap(models, groups) <= 1e-5


def test_the_same_version_pushed_twice_does_not_read_the_first_ones_cache(
    synced: VLLMPolicy, model: nn.Module, run: Any, tools: Any
) -> None:
    prompt = list(range(5, 150))
    run(synced.generate(prompt, Sampling(max_tokens=4), seed=1))
    tools.perturb(model, 1, 0.1)
    synced.push(tools.trainable(model), version=synced.version)
    Canary(prompt, Sampling()).check(synced, model, version=synced.version)


def test_a_head_tied_to_the_embeddings_and_not_packed_anew_is_found_by_the_canary(
    synced: VLLMPolicy, model: nn.Module, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools.perturb(model, 1, 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(WeightReceiver, "turngym_repack", lambda self, module: None)
        synced.push(tools.trainable(model), version=synced.version + 1)
    with pytest.raises(WeightSyncError, match=r"-\d+\.\d+ in the engine and -\d+\.\d+ in the tr"):
        CANARY.check(synced, model, version=synced.version)
    synced.push(tools.trainable(model), version=synced.version + 1)
    assert CANARY.check(synced, model, version=synced.version) <= 1e-5


def test_a_sync_that_is_skipped_is_stopped(
    synced: VLLMPolicy, model: nn.Module, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = synced.version
    tools.perturb(model, 1, 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(InProcessBackend, "_load_weights", lambda self, named, version: version)
        synced.push(tools.trainable(model), version=version + 1)
        with pytest.raises(WeightSyncError, match="weights are not the same"):
            CANARY.check(synced, model, version=version + 1)
        patch.setattr(InProcessBackend, "_load_weights", lambda self, named, _: version)
        with pytest.raises(
            WeightSyncError, match=f"{version + 2} was .* reports version {version}"
        ):
            synced.push(tools.trainable(model), version=version + 2)


def test_weights_that_do_not_fit_leave_the_old_ones_in_use(
    synced: VLLMPolicy, model: nn.Module, tools: Any
) -> None:
    named = tools.trainable(model)
    with pytest.raises(WeightSyncError, match="were not pushed"):
        synced.push(named[1:], version=99)
    with pytest.raises(WeightSyncError, match="of shape"):
        synced.push([(named[0][0], torch.zeros(3)), *named[1:]], version=99)
    assert CANARY.check(synced, model, version=synced.version) <= 1e-5


def test_the_likeliest_tokens_are_the_trainers(
    synced: VLLMPolicy, model: nn.Module, run: Any
) -> None:
    completion = run(synced.generate(PROMPT, Sampling(temperature=0.8, max_tokens=12), seed=1))
    row = torch.tensor([[*PROMPT, *completion.ids.tolist()]])
    with torch.no_grad():
        logits: Any = model(row).logits[0, len(PROMPT) - 1 : -1] / 0.8
    best = logits.log_softmax(-1).topk(3)
    assert np.allclose(completion.extra["topk_logp"], best.values, atol=1e-5)
    distinct = best.values.diff(dim=1).abs().min(dim=1).values.numpy() > 1e-5
    assert (completion.extra["topk_ids"] == best.indices.numpy())[distinct].all()


def test_greedy_tokens_carry_their_log_probability_at_temperature_one(
    synced: VLLMPolicy, model: nn.Module, run: Any
) -> None:
    greedy = Canary(PROMPT, Sampling(temperature=0))
    assert greedy.check(synced, model, version=synced.version) <= 1e-5


def test_truncated_sampling_evaluates(
    synced: VLLMPolicy, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = Sampling(top_k=1, max_tokens=5)
    with pytest.raises(ConfigError, match="training=False"):
        run(synced.generate(PROMPT, sampling, seed=1))
    monkeypatch.setattr(synced, "_training", False)
    completion = run(synced.generate(PROMPT, sampling, seed=1))
    assert np.allclose(completion.logp, 0, atol=1e-6)


def test_only_the_stop_tokens_asked_for_stop(synced: VLLMPolicy, renderer: Any, run: Any) -> None:
    async def many(stop_ids: tuple[int, ...]) -> list[Completion]:
        sampling = Sampling(max_tokens=200, stop_ids=stop_ids)
        prompt = PROMPT
        return await asyncio.gather(*(synced.generate(prompt, sampling, seed=s) for s in range(8)))

    (stop,) = renderer.stop_ids
    free, stopped = run(many(())), run(many((stop,)))
    assert all(len(c.ids) == 200 for c in free)
    for one, other in zip(free, stopped, strict=True):
        first = one.ids.tolist().index(stop) + 1 if stop in one.ids else 200
        assert other.ids.tolist() == one.ids.tolist()[:first]
        assert other.finish_reason == ("stop" if first < 200 else "length")


def test_a_token_outside_the_vocabulary_is_refused_and_the_engine_lives(
    synced: VLLMPolicy, run: Any
) -> None:
    bad = synced.backend.vocab
    with pytest.raises(EngineError, match=f"token id {bad}"):
        run(synced.generate([1, bad], Sampling(), seed=0))
    assert len(run(synced.generate(PROMPT, Sampling(max_tokens=3), seed=0)).ids) == 3


def test_a_context_that_is_full_ends_the_completion(synced: VLLMPolicy, run: Any) -> None:
    size = synced.max_context
    assert size == 512
    full = run(synced.generate([5] * size, Sampling(), seed=0))
    assert (len(full.ids), full.finish_reason) == (0, "length")
    nearly = run(synced.generate([5] * (size - 2), Sampling(max_tokens=9), seed=0))
    assert (len(nearly.ids), nearly.finish_reason) == (2, "length")


def test_a_request_given_up_is_dropped_from_the_engine(synced: VLLMPolicy, run: Any) -> None:
    async def give_up() -> None:
        task = asyncio.create_task(synced.generate(PROMPT, Sampling(max_tokens=400), seed=0))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(give_up())
    deadline = time.monotonic() + 2
    backend: Any = synced.backend
    while backend._engine.has_unfinished_requests():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_second_engine_in_this_process_is_refused(policy: VLLMPolicy, folder: Path) -> None:
    with pytest.raises(EngineError, match=r"engine\.isolated"):
        open_vllm(ENGINE, model_path=folder)


@pytest.fixture
def broken(synced: VLLMPolicy) -> Callable[[], None]:
    def break_it() -> None:
        backend: Any = synced.backend

        def fail() -> Any:
            raise RuntimeError("a kernel gave up")

        backend._engine.step = fail

    return break_it


def test_an_engine_that_fails_says_so_to_everybody(
    synced: VLLMPolicy, broken: Callable[[], None], run: Any
) -> None:
    """Last: it ends the module's engine."""
    broken()
    for _ in range(2):
        with pytest.raises(EngineError, match="a kernel gave up"):
            run(synced.generate(PROMPT, Sampling(), seed=0))
