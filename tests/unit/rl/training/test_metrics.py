import json
from pathlib import Path
from typing import Any

import pytest

from turngym.agents.config import RolloutConfig
from turngym.rl.config import EvalSchedule, ModelConfig, OptimConfig, TrainConfig
from turngym.rl.presets import preset
from turngym.rl.session import train


@pytest.mark.parametrize("algorithm", ["ppo", "remax"])
def test_a_run_logs_documented_keys_only(
    algorithm: str, tiny: Path, tmp_path: Path, kit: Any
) -> None:
    config = TrainConfig(
        run=tmp_path / "run",
        steps=2,
        prompts=2,
        threads=1,
        model=ModelConfig(path=str(tiny), device="cpu"),
        algorithm=preset(algorithm),
        rollout=RolloutConfig(group_size=2, max_tokens=12, concurrency=4),
        optim=OptimConfig(lr=1e-3, minibatches=2),
        eval=EvalSchedule(before=False, after=False),
    )
    folder = train(config, {"level": 1})
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    logged = {key for line in lines for key in json.loads(line)} - {"step"}
    assert logged - {key for key in logged if kit.is_documented(key)} == set()
    assert {"train/canary", "rollout/episodes", "time/update_s"} <= logged
    assert (folder / "model.safetensors").exists()
    assert (tmp_path / "run" / "critic").exists() == (algorithm == "ppo")


def test_the_check_for_documentation_can_fail(kit: Any) -> None:
    assert kit.is_documented("reward/anything/mean")
    assert not kit.is_documented("train/made_up")
    assert not kit.is_documented("reward/a/b/mean")
