"""Two processes take the optimizer step of one: same gradients, whoever runs which rows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from turngym.agents.tiny import TinyConfig, build_tiny_agent

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
from dataclasses import replace
from pathlib import Path

import torch

from turngym.agents.config import RolloutConfig
from turngym.rl.axes import NegativeEntropy, Reward
from turngym.rl.config import EvalSchedule, ModelConfig, OptimConfig, TrainConfig
from turngym.rl.optim import Optimizers
from turngym.rl.presets import preset
from turngym.rl.session import train

model, run, name, lora = sys.argv[1:]
gradients = []
step = Optimizers.step


def recording(self):
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
    gradients.append(torch.cat([grad.flatten() for grad in found]).clone())
    return step(self)


Optimizers.step = recording
algorithm = preset(name)
if name != "grpo":
    # Random weights earn nothing; their uncertainty differs from row to row.
    algorithm = replace(algorithm, reward=Reward(shaping=(NegativeEntropy(),)))
else:
    algorithm = replace(algorithm, reward=Reward(shaping=(NegativeEntropy(),)), regularize=())
train(
    TrainConfig(
        run=Path(run),
        steps=1,
        prompts=3,
        deterministic=True,
        model=ModelConfig(path=model, device="cpu", lora_rank=int(lora)),
        algorithm=algorithm,
        rollout=RolloutConfig(group_size=3, max_tokens=8, concurrency=3),
        optim=OptimConfig(lr=1e-3, micro_tokens=200),
        eval=EvalSchedule(before=False, after=False),
    )
)
from accelerate import PartialState

if PartialState().is_main_process:
    torch.save(gradients, Path(run) / "gradients.pt")
"""


def gradients_of(
    processes: int, model: Path, folder: Path, name: str, lora: int
) -> list[torch.Tensor]:
    folder.mkdir(exist_ok=True)
    script = folder / "step.py"
    script.write_text(SCRIPT, encoding="utf-8")
    run = folder / f"{processes}"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes"]
    launch += [str(processes), "--num_machines", "1", "--mixed_precision", "no"]
    launch += ["--dynamo_backend", "no", "--num_cpu_threads_per_process", "1"]
    launch += ["--main_process_port", "0"] if processes > 1 else []
    command = [*launch, str(script), str(model), str(run), name, str(lora)]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[torch.Tensor] = torch.load(run / "gradients.pt", weights_only=True)
    return found


@pytest.mark.parametrize(("name", "lora"), [("ppo", 0), ("grpo", 2)])
def test_two_processes_have_the_gradients_of_one(name: str, lora: int, tmp_path: Path) -> None:
    shape = TinyConfig(hidden_size=32, layers=1, heads=2, kv_heads=1, mlp_size=32)
    model = build_tiny_agent(tmp_path / "model", shape)
    one = gradients_of(1, model, tmp_path / "one", name, lora)
    two = gradients_of(2, model, tmp_path / "two", name, lora)
    assert len(one) == len(two) == (2 if name == "ppo" else 1)
    for alone, shared in zip(one, two, strict=True):
        assert float(alone.abs().max()) > 1e-4
        torch.testing.assert_close(alone, shared, atol=1e-6, rtol=1e-4)
