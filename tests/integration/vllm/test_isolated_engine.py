import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from turngym.agents.base import Sampling
from turngym.agents.config import EngineConfig
from turngym.agents.vllm_policy import VLLMPolicy, open_vllm
from turngym.rl.weights import Canary

CANARY = Canary([4, 8, 15, 16, 23, 42], Sampling())
ENGINE = EngineConfig(kind="vllm", isolated=True, kv_gib=0.5)


@pytest.fixture(scope="module")
def policy(folder: Path) -> Iterator[VLLMPolicy]:
    with open_vllm(ENGINE, model_path=folder, deterministic=True) as policy:
        yield policy


def test_an_engine_killed_in_the_middle_changes_no_result(
    policy: VLLMPolicy, model: nn.Module, play: Any, tools: Any
) -> None:
    backend: Any = policy.backend
    for version in range(1, 4):
        tools.perturb(model, version, 0.003)
        policy.push(tools.trainable(model), version=version)
    want = play(policy, range(8), deterministic=True)
    assert tools.worst_gap({3: model}, want) <= 1e-5

    first = backend.pid
    killer = threading.Timer(0.2, lambda: os.kill(first, signal.SIGKILL))
    killer.start()
    got = play(policy, range(8), deterministic=True)
    killer.join()
    assert backend.pid != first, "the engine was killed too late to matter"
    for one_group, other_group in zip(want, got, strict=True):
        for one, other in zip(one_group.trajectories, other_group.trajectories, strict=True):
            assert one.ids.tobytes() == other.ids.tobytes()
            assert one.logp.tobytes() == other.logp.tobytes()
            assert one.version.tobytes() == other.version.tobytes()
    assert CANARY.check(policy, model, version=3) <= 1e-5


def test_a_second_trainer_on_the_box_that_is_killed_leaves_no_engine(
    policy: VLLMPolicy, folder: Path
) -> None:
    code = f"""
import os
from pathlib import Path
from turngym.agents.config import EngineConfig
from turngym.agents.vllm_policy import open_vllm
engine = EngineConfig(kind="vllm", isolated=True, kv_gib=0.5)
policy = open_vllm(engine, model_path=Path({str(folder)!r}))
print(policy.backend.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=120)
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout.split()[-1])
    deadline = time.monotonic() + 2
    while Path(f"/proc/{pid}").exists() and "Z" not in _state(pid):
        assert time.monotonic() < deadline, "the engine outlived its trainer"
        time.sleep(0.02)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"
