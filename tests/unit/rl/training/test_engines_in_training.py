"""Whole runs over each engine: every token is of the weights whose version it carries."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from turngym.agents import vllm_engine
from turngym.agents.base import TrainablePolicy
from turngym.agents.config import EngineConfig, RolloutConfig
from turngym.agents.model import attach_lora, load_model, policy_logprobs
from turngym.agents.store import TrajectoryStore
from turngym.agents.vllm_backend import EngineSpec
from turngym.agents.vllm_fake import FakeBackend, FakeFaults, open_fake
from turngym.errors import WeightSyncError
from turngym.rl import session
from turngym.rl.axes import NegativeEntropy, Reward
from turngym.rl.config import EvalSchedule, ModelConfig, OptimConfig, TrainConfig
from turngym.rl.presets import preset
from turngym.rl.sampler import open_policy
from turngym.rl.session import train

# Random weights earn nothing; their uncertainty differs from row to row.
ALGORITHM = replace(preset("dppo_topk"), reward=Reward(shaping=(NegativeEntropy(),)))


class Watched:
    """Keeps the weights that were pushed, by version."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, faults: FakeFaults) -> None:
        self.pushed: dict[int, dict[str, torch.Tensor]] = {}
        self.backends: list[FakeBackend] = []
        self._faults = faults
        monkeypatch.setattr(session, "open_policy", self._open)
        monkeypatch.setattr(vllm_engine, "InProcessBackend", self._backend)

    def _backend(self, engine: EngineConfig, spec: EngineSpec) -> FakeBackend:
        self.backends.append(open_fake(engine, spec))
        self.backends[-1].faults = self._faults
        return self.backends[-1]

    def _open(self, *args: Any, **more: Any) -> TrainablePolicy:
        policy: Any = open_policy(*args, **more)
        push: Callable[..., None] = policy.push

        def watched(named: Iterable[tuple[str, Any]], *, version: int) -> None:
            tensors = list(named)
            self.pushed[version] = {name: tensor.clone() for name, tensor in tensors}
            push(tensors, version=version)

        policy.push = watched
        opened: TrainablePolicy = policy
        return opened


def settings(run: Path, tiny: Path, *, kind: Any, staleness: int, lora: int = 0) -> TrainConfig:
    return TrainConfig(
        run=run,
        steps=4,
        prompts=2,
        threads=1,
        topk=3,
        staleness=staleness,
        engine=EngineConfig(kind=kind),
        model=ModelConfig(path=str(tiny), device="cpu", lora_rank=lora),
        algorithm=ALGORITHM,
        rollout=RolloutConfig(group_size=2, max_tokens=16, concurrency=6),
        optim=OptimConfig(lr=1e-2, minibatches=2),
        eval=EvalSchedule(tasks=2, before=False),
    )


def largest_gap(run: Path, tiny: Path, watched: Watched, lora: int) -> float:
    """Largest difference of a recorded log-probability from that of the weights it names."""
    model = load_model(tiny, device="cpu")[0]
    if lora:
        model = attach_lora(model, lora, seed=0)
    own = dict(model.named_parameters())
    worst = 0.0
    for one in TrajectoryStore(run / "trajectories"):
        for version in np.unique(one.version[one.sampled]).tolist():
            with torch.no_grad():
                for name, tensor in watched.pushed[version].items():
                    own[name].copy_(tensor)
                where = np.flatnonzero(one.sampled & (one.version == version))
                found = policy_logprobs(model, [one.ids], [where]).logp.numpy()
            worst = max(worst, float(np.abs(found - one.logp[where]).max()))
    return worst


@pytest.mark.parametrize("lora", [0, 2], ids=["full", "lora"])
@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("kind", ["hf", "vllm"])
def test_every_token_is_of_the_weights_it_names(
    kind: str,
    staleness: int,
    lora: int,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, FakeFaults())
    run = tmp_path / "run"
    train(settings(run, tiny, kind=kind, staleness=staleness, lora=lora), {"level": 1})
    assert sorted(watched.pushed) == [0, 2, 4, 6, 8]
    assert len(watched.backends) == (kind == "vllm")
    assert largest_gap(run, tiny, watched, lora) < 1e-5
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert max(json.loads(line)["train/canary"] for line in lines) < 1e-4
    first, last = watched.pushed[0], watched.pushed[8]
    assert any(not torch.equal(first[name], last[name]) for name in first)


def test_an_engine_that_dies_loses_no_group(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch, FakeFaults(die_after=50))
    run = tmp_path / "run"
    train(settings(run, tiny, kind="vllm", staleness=1), {"level": 1})
    assert watched.backends[0].deaths == 1
    assert largest_gap(run, tiny, watched, 0) < 1e-5
    groups = [row["group"] for row in TrajectoryStore(run / "trajectories").rows()]
    assert len(groups) == 2 * len(set(groups)) == 4 * 2 * 2


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (FakeFaults(skip_sync=True), r"after syncing version 2 the canary's token"),
        (FakeFaults(stale_version=True), r"version 2 were asked for.* version 0"),
        (FakeFaults(skip_names=("embed_tokens",)), r"after syncing version 2 the canary's token"),
    ],
    ids=["skipped", "stale", "head"],
)
def test_weights_that_do_not_arrive_stop_the_run_with_a_checkpoint(
    faults: FakeFaults,
    message: str,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Watched(monkeypatch, faults)
    with pytest.raises(WeightSyncError, match=message):
        train(settings(tmp_path / "run", tiny, kind="vllm", staleness=1), {"level": 1})
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")]
    assert saved == ["step-000001"]
