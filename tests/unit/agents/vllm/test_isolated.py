"""The isolated engine's parent and child, with the fake engine in the child."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from turngym.agents import vllm_weights
from turngym.agents.base import Completion, Sampling
from turngym.agents.config import EngineConfig
from turngym.agents.model import load_model
from turngym.agents.tiny import build_tiny_agent
from turngym.agents.vllm_backend import EngineSpec
from turngym.agents.vllm_isolated import IsolatedBackend
from turngym.agents.vllm_policy import VLLMPolicy
from turngym.errors import ConfigError, EngineError, EngineTimeoutError, WeightSyncError
from turngym.rl.weights import Canary

pytestmark = pytest.mark.slow

T = TypeVar("T")
FAKE = "turngym.agents.vllm_fake:open_fake"
PROMPT = [4, 8, 15, 16, 23, 42]
CANARY = Canary(PROMPT, Sampling())


def run(work: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(work, 60)

    return asyncio.run(limited())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_agent(tmp_path_factory.mktemp("model"))


@pytest.fixture
def model(folder: Path) -> nn.Module:
    return load_model(folder, device="cpu")[0]


Opener = Callable[..., tuple[VLLMPolicy, IsolatedBackend]]


@pytest.fixture
def start(folder: Path) -> Iterator[Opener]:
    opened: list[VLLMPolicy] = []

    def start(timeout_s: float = 60.0, factory: str = FAKE) -> tuple[VLLMPolicy, IsolatedBackend]:
        engine = EngineConfig(kind="vllm", isolated=True, timeout_s=timeout_s)
        spec = EngineSpec(model_path=folder, max_context=256)
        backend = IsolatedBackend(engine, spec, factory=factory)
        policy = VLLMPolicy(backend, timeout_s=timeout_s)
        opened.append(policy)
        return policy, backend

    yield start
    for policy in opened:
        policy.close()


def nudge(model: nn.Module, seed: int) -> list[tuple[str, Any]]:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return list(model.named_parameters())


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


async def sample(policy: VLLMPolicy, count: int, tokens: int = 40) -> list[Completion]:
    sampling = Sampling(max_tokens=tokens)
    return await asyncio.gather(
        *(policy.generate(PROMPT, sampling, seed=seed) for seed in range(count))
    )


def test_it_samples_the_trainers_weights_before_and_after_pushes(
    start: Opener, model: nn.Module
) -> None:
    policy, _ = start()
    assert (policy.max_context, policy.version) == (256, 0)
    assert CANARY.check(policy, model, version=0) < 1e-5
    for version in (1, 2, 3):
        policy.push(nudge(model, version), version=version)
        assert CANARY.check(policy, model, version=version) < 1e-5


def test_a_child_that_is_killed_is_replaced_with_the_same_weights(
    start: Opener, model: nn.Module
) -> None:
    policy, backend = start()
    policy.push(nudge(model, 1), version=1)
    want = run(sample(policy, 4))

    async def kill_midway() -> list[Completion]:
        task = asyncio.create_task(sample(policy, 4))
        await asyncio.sleep(0.05)
        assert backend.pid is not None
        os.kill(backend.pid, signal.SIGKILL)
        return await task

    first = backend.pid
    got = run(kill_midway())
    assert backend.pid != first
    assert policy.version == 1
    assert [c.ids.tolist() for c in got] == [c.ids.tolist() for c in want]
    assert {c.version_spans[0][0] for c in got} == {1}
    assert CANARY.check(policy, model, version=1) < 1e-5


def test_a_child_that_hangs_is_replaced(start: Opener, model: nn.Module) -> None:
    policy, backend = start()
    pid, engine = backend.pid, backend._engine
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)

    async def wait_for_another() -> list[Completion]:
        task = asyncio.create_task(sample(policy, 1, tokens=5))
        backend._engine = replace(engine, timeout_s=2.0)
        while backend.pid == pid:
            await asyncio.sleep(0.01)
        backend._engine = engine
        return await task

    assert len(run(wait_for_another())[0].ids) == 5


def test_a_push_to_a_child_that_hangs_ends_by_its_deadline(start: Opener, model: nn.Module) -> None:
    policy, backend = start()
    backend._engine = replace(backend._engine, timeout_s=0.5)
    assert backend.pid is not None
    os.kill(backend.pid, signal.SIGSTOP)
    with pytest.raises(EngineTimeoutError, match=r"timeout_s=0\.5"):
        policy.push(nudge(model, 1), version=1)
    assert policy.version == 0


def test_weights_for_which_there_is_no_memory_leave_the_old_ones_in_use(
    start: Opener, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, _ = start()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}

    def full(path: Any, mode: str) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(vllm_weights, "open", full, raising=False)
        with pytest.raises(WeightSyncError, match=r"No space left.*old weights stay"):
            policy.push(nudge(model, 1), version=1)
    model.load_state_dict(before, strict=False)
    assert CANARY.check(policy, model, version=0) < 1e-5


def test_what_is_wrong_with_a_push_is_said_by_the_child(start: Opener, model: nn.Module) -> None:
    policy, _ = start()
    with pytest.raises(WeightSyncError, match="no such parameter"):
        policy.push([("model.norm.wieght", torch.zeros(96))], version=1)
    assert CANARY.check(policy, model, version=0) < 1e-5


def test_two_engines_run_side_by_side(start: Opener, model: nn.Module) -> None:
    one, two = start()[0], start()[0]
    one.push(nudge(model, 1), version=1)
    assert CANARY.check(one, model, version=1) < 1e-5
    assert (one.version, two.version) == (1, 0)


def test_a_child_that_cannot_start_says_why(start: Opener, folder: Path) -> None:
    with pytest.raises(EngineError, match=r"no_such_name"):
        start(factory="turngym.agents.vllm_fake:no_such_name")
    engine = EngineConfig(kind="vllm", isolated=True)
    with pytest.raises(ConfigError, match="no folder"):
        IsolatedBackend(engine, EngineSpec(model_path=folder / "absent"), factory=FAKE)


def test_closing_ends_the_child_and_fails_what_is_in_flight(start: Opener) -> None:
    policy, backend = start()
    pid = backend.pid
    assert pid is not None

    async def close_midway() -> None:
        task = asyncio.create_task(sample(policy, 1, tokens=200))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(policy.close)
        with pytest.raises(EngineError, match="closed"):
            await task

    run(close_midway())
    assert within(2, lambda: not is_running(pid))
    policy.close()
    with pytest.raises(EngineError, match="closed"):
        run(sample(policy, 1))


@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), 9)", "os._exit(3)", "sys.exit()"])
def test_the_child_never_outlives_its_parent(folder: Path, ending: str) -> None:
    code = f"""
import os, sys
from pathlib import Path
from turngym.agents.config import EngineConfig
from turngym.agents.vllm_backend import EngineSpec
from turngym.agents.vllm_isolated import IsolatedBackend
engine = EngineConfig(kind="vllm", isolated=True)
backend = IsolatedBackend(engine, EngineSpec(model_path=Path({str(folder)!r})), factory={FAKE!r})
print(backend.pid, flush=True)
{ending}
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=60)
    pid = int(done.stdout)
    assert within(2, lambda: not is_running(pid))


def test_nothing_is_left_open(start: Opener) -> None:
    before = set(os.listdir("/proc/self/fd"))
    policy, _ = start()
    run(sample(policy, 2, tokens=5))
    policy.close()
    assert within(2, lambda: len(os.listdir("/proc/self/fd")) <= len(before) + 1)
