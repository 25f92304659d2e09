"""Whole runs whose rollouts go on while the trainer works."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from turngym.agents.config import EngineConfig, RolloutConfig
from turngym.agents.hf_policy import HFPolicy
from turngym.agents.store import TrajectoryStore
from turngym.errors import ConfigError, WeightSyncError
from turngym.rl import session
from turngym.rl.axes import NegativeEntropy, Reward
from turngym.rl.config import EvalSchedule, ModelConfig, OptimConfig, TrainConfig
from turngym.rl.observer import Quiet
from turngym.rl.parallel import Ranks
from turngym.rl.presets import preset
from turngym.rl.sampler import open_policy
from turngym.rl.session import TrainSession, train

# Random weights earn nothing; their uncertainty differs from row to row.
ALGORITHM = replace(preset("dr_grpo"), reward=Reward(shaping=(NegativeEntropy(),)))
UPDATES = 2


def settings(folder: Path, tiny: Path, *, steps: int, lora: int = 0, **more: Any) -> TrainConfig:
    options: dict[str, Any] = {"staleness": 1, "save_every": 1} | more
    return TrainConfig(
        run=folder,
        steps=steps,
        prompts=2,
        threads=1,
        model=ModelConfig(path=str(tiny), device="cpu", lora_rank=lora),
        algorithm=ALGORITHM,
        rollout=RolloutConfig(group_size=2, max_tokens=24, concurrency=6),
        optim=OptimConfig(lr=1e-2, minibatches=UPDATES),
        eval=EvalSchedule(before=False, after=False),
        **options,
    )


def logged(run: Path) -> list[dict[str, float]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def trained_by_step(run: Path) -> dict[int, list[str]]:
    """Groups by the step that trained them last, each named once a trajectory."""
    found: dict[int, list[str]] = {}
    for row in TrajectoryStore(run / "trajectories").rows():
        found.setdefault(row["step"], []).append(row["group"])
    return found


class StopsAt(Quiet):
    """Asks a session to stop when a step is done."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.session: TrainSession | None = None

    def stage(self, name: str, total: int) -> Any:
        import contextlib

        def advance(done: int, note: str = "") -> None:
            if name == "train" and done == self.step:
                assert self.session is not None
                assert self.session.trainer is not None
                self.session.trainer.stop_requested = True

        return contextlib.nullcontext(advance)


@pytest.mark.parametrize(("staleness", "lora"), [(1, 0), (3, 0), (1, 2)])
def test_a_run_ahead_keeps_its_bound_and_trains_each_task_once(
    staleness: int, lora: int, tiny: Path, tmp_path: Path, kit: Any
) -> None:
    run = tmp_path / "run"
    train(settings(run, tiny, steps=8, lora=lora, staleness=staleness), {"level": 1})
    found = logged(run)
    assert {key for line in found for key in line if not kit.is_documented(key)} <= {"step"}
    oldest = [line["train/staleness_max"] for line in found]
    assert 0 < max(oldest) <= staleness * UPDATES
    assert max(line["train/canary"] for line in found) < 1e-4
    assert all(line["train/mismatch_kl_fresh"] < 1e-9 for line in found if _is_mixed(line))
    assert found[-1]["train/mismatch_kl"] > 1e-9
    groups = [group for step in trained_by_step(run).values() for group in step]
    assert len(groups) == 8 * 2 * 2
    assert len(set(groups)) == 8 * 2
    versions = [t.version[t.sampled] for t in TrajectoryStore(run / "trajectories")]
    assert all((one[1:] >= one[:-1]).all() for one in versions)
    assert max(int(one.max()) for one in versions) > UPDATES


def _is_mixed(line: dict[str, float]) -> bool:
    return "train/mismatch_kl_fresh" in line


def test_a_stopped_run_goes_on_without_losing_or_repeating_a_task(
    tiny: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    observer = StopsAt(3)
    with TrainSession(settings(run, tiny, steps=7, staleness=2), {"level": 1}, observer) as begun:
        observer.session = begun
        begun.run()
    state = json.loads((run / "checkpoints" / "step-000003" / "state.json").read_text())
    under_way = state["collector"]["pipeline"]
    assert len(under_way["again"]) + len(under_way["finished"]) > 0
    assert len(logged(run)) == 3
    train(settings(run, tiny, steps=7, staleness=2, resume=True), {"level": 1})
    groups = [group for step in trained_by_step(run).values() for group in step]
    assert len(groups) == 2 * len(set(groups)) == 7 * 2 * 2
    state = json.loads((run / "checkpoints" / "step-000007" / "state.json").read_text())
    assert state["collector"]["stream"]["position"] == 7 * 2
    assert max(line["train/staleness_max"] for line in logged(run)) <= 2 * UPDATES


def test_another_staleness_is_refused_on_resume(tiny: Path, tmp_path: Path) -> None:
    train(settings(tmp_path / "run", tiny, steps=1), {"level": 1})
    with pytest.raises(ConfigError, match="another staleness: was 1, now it is 0"):
        train(settings(tmp_path / "run", tiny, steps=2, staleness=0, resume=True), {"level": 1})


class Forgetful(HFPolicy):
    """Says that it took the weights of a version, and did not."""

    forgets = 2 * UPDATES

    def push(self, named: Iterable[tuple[str, Any]], *, version: int) -> None:
        super().push([] if version == self.forgets else named, version=version)


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_failed_canary_stops_the_run_with_a_checkpoint(
    staleness: int, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def forgetful(config: TrainConfig, model: Any, **more: Any) -> HFPolicy:
        opened = open_policy(config, model, **more)
        assert isinstance(opened, HFPolicy)
        opened.__class__ = Forgetful
        return opened

    config = settings(run, tiny, steps=4, staleness=staleness, save_every=0)
    with monkeypatch.context() as patch:
        patch.setattr(session, "open_policy", forgetful)
        with pytest.raises(WeightSyncError, match="after syncing version 4 the canary's token"):
            train(config, {"level": 1})
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-000002"]
    train(replace(config, resume=True), {"level": 1})
    groups = [group for step in trained_by_step(run).values() for group in step]
    assert len(set(groups)) == 4 * 2


@pytest.mark.parametrize("staleness", [0, 1])
def test_only_rollouts_that_run_ahead_need_a_second_copy(
    staleness: int, tiny: Path, tmp_path: Path, model: Any
) -> None:
    config = settings(tmp_path, tiny, steps=1, staleness=staleness)
    opened = open_policy(config, model, source=tiny, ranks=Ranks())
    assert isinstance(opened, HFPolicy)
    with opened:
        assert (opened._model is model) == (staleness == 0)
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(1.5)
        opened.push(model.named_parameters(), version=3)
        mine, its = (dict(m.named_parameters()) for m in (model, opened._model))
        assert all(torch.equal(mine[name], its[name]) for name in mine)
        assert opened.version == 3


@pytest.mark.parametrize(
    "more", [{"staleness": 1}, {"staleness": 0, "engine": EngineConfig(kind="vllm")}]
)
def test_several_trainer_processes_sample_in_process_and_in_step(
    more: Any, tiny: Path, tmp_path: Path, model: Any
) -> None:
    class Two(Ranks):
        def __init__(self) -> None:
            self.rank, self.world = 0, 2

    config = settings(tmp_path, tiny, steps=1, **more)
    with pytest.raises(ConfigError, match="need one trainer process, this run has 2"):
        open_policy(config, model, source=tiny, ranks=Two())


def test_pairs_are_not_trained_on_late(tiny: Path, tmp_path: Path) -> None:
    config = replace(settings(tmp_path / "run", tiny, steps=1), algorithm=preset("dpo"))
    with pytest.raises(ConfigError, match=r"dpo learns from pairs.* needs staleness=0, got 1"):
        train(config, {"level": 1})


def test_the_trained_model_is_the_last_checkpoints(tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(settings(run, tiny, steps=3), {"level": 1})
    final = load_file(run / "model" / "model.safetensors")
    saved = load_file(run / "checkpoints" / "step-000003" / "model.safetensors")
    assert all(torch.equal(final[name], saved[name]) for name in saved)
