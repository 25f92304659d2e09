"""A run that stops and goes on ends where an uninterrupted one does, to the bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from turngym.agents.config import RolloutConfig
from turngym.errors import ConfigError
from turngym.rl.algorithm import Algorithm
from turngym.rl.axes import NegativeEntropy, Reward, Selection
from turngym.rl.config import EvalSchedule, ModelConfig, OptimConfig, TrainConfig
from turngym.rl.presets import preset
from turngym.rl.session import train
from turngym.rl.terms import KL, ValueLoss

# Random weights earn nothing; their uncertainty differs from row to row.
UNCERTAIN = Reward(shaping=(NegativeEntropy(),))
CASES: dict[str, Algorithm] = {
    "critic": replace(
        preset("vapo"), reward=UNCERTAIN, regularize=(ValueLoss(updates=2, pretrain_steps=2),)
    ),
    "replay-and-reset": replace(
        preset("rlep"),
        reward=UNCERTAIN,
        selection=Selection(replay=2, correct_at=0.0),
        regularize=(KL(coef=0.04, reset_steps=2),),
    ),
}


def run(folder: Path, tiny: Path, algorithm: Algorithm, *, lora: int, **more: Any) -> None:
    config = TrainConfig(
        run=folder,
        prompts=2,
        curriculum=2,
        deterministic=True,
        model=ModelConfig(path=str(tiny), device="cpu", lora_rank=lora),
        algorithm=algorithm,
        rollout=RolloutConfig(group_size=2, max_tokens=8, concurrency=4),
        optim=OptimConfig(lr=1e-2, minibatches=1),
        eval=EvalSchedule(before=False, after=False),
        **more,
    )
    train(config, {"level": 1, "size": 3})


@pytest.mark.parametrize("lora", [0, 2], ids=["full", "lora"])
@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_ends_with_the_same_weights(
    name: str, lora: int, tiny: Path, tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole, tiny, CASES[name], lora=lora, steps=5)
    run(parts, tiny, CASES[name], lora=lora, steps=3)
    run(parts, tiny, CASES[name], lora=lora, steps=5, resume=True)
    adapters = "adapter_model.safetensors" if lora else "model.safetensors"
    for file in (f"checkpoints/step-000005/{adapters}", "model/model.safetensors"):
        expected, found = load_file(whole / file), load_file(parts / file)
        assert [key for key in expected if not torch.equal(expected[key], found[key])] == []
    if name == "critic":
        heads = [
            torch.load(f / "critic" / "value_head.pt", weights_only=True) for f in (whole, parts)
        ]
        assert torch.equal(heads[0]["weight"], heads[1]["weight"])
        assert bool(heads[0]["weight"].any())


def test_a_critic_with_other_settings_is_refused_on_resume(tiny: Path, tmp_path: Path) -> None:
    from turngym.rl.config import CriticConfig

    run(tmp_path / "run", tiny, CASES["critic"], lora=0, steps=1)
    with pytest.raises(ConfigError, match="another critic"):
        run(
            tmp_path / "run",
            tiny,
            CASES["critic"],
            lora=0,
            steps=2,
            resume=True,
            critic=CriticConfig(lr=1.0),
        )
