"""Training with the real vLLM through the command line, all from one cold start."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from turngym.agents.store import TrajectoryStore
from turngym.rl.stream import TaskStream

ROOT = Path(__file__).resolve().parents[3]
TASKS = ["--env.level", "1"]
VLLM = ["--engine.kind", "vllm", "--engine.kv-gib", "0.5"]
COLD = ["--steps", "0", "--sft.steps", "300", "--sft.demos", "1500"]
FROM = ["--sft.steps", "0", "--save-every", "2", "--eval.no-before", "--eval.no-after"]
STEPS = 6
SHORT = [*FROM, "--steps", str(STEPS), "--prompts", "4", "--rollout.group-size", "4"]


def begin(*argv: str) -> "subprocess.Popen[str]":
    own = {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "turngym.cli", *argv]
    return subprocess.Popen(
        command,
        env=os.environ | own,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def train(run: Path, *flags: str) -> "subprocess.Popen[str]":
    recipe = ROOT / "recipes" / "calculator.toml"
    return begin("train", f"@{recipe}", *TASKS, *VLLM, "--run", str(run), *flags)


def finish(process: "subprocess.Popen[str]") -> str:
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    return output


def metrics(run: Path) -> list[dict[str, float]]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def kill_after(process: "subprocess.Popen[str]", run: Path, step: int) -> None:
    """SIGKILL a run as soon as it has logged a step."""
    deadline = time.monotonic() + 120
    try:
        while not any(line["step"] == step for line in metrics(run)):
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline, f"step {step} was never logged"
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL, output


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An agent that knows the format and is wrong half of the time."""
    run = tmp_path_factory.mktemp("start") / "run"
    finish(train(run, *COLD, "--eval.no-before", "--eval.no-after"))
    return run / "model"


@pytest.fixture(scope="module")
def better(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that trained in step with vLLM in its process."""
    run = tmp_path_factory.mktemp("better") / "run"
    finish(train(run, "--model.path", str(start), *FROM, "--steps", "12"))
    return run


def assert_it_learned(run: Path) -> None:
    success = [line["reward/success/mean"] for line in metrics(run)]
    first, last = statistics.mean(success[:2]), statistics.mean(success[-3:])
    assert last > first + 0.2, success
    assert max(abs(line["train/mismatch_kl"]) for line in metrics(run)) < 0.05


def test_the_demo_agent_learns_with_vllm_in_process(better: Path) -> None:
    assert_it_learned(better)
    assert all(line["train/staleness_max"] == 0 for line in metrics(better))


def test_the_demo_agent_learns_one_batch_off_with_an_isolated_engine(
    start: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    flags = ["--engine.isolated", "--staleness", "1", "--steps", "12"]
    finish(train(run, "--model.path", str(start), *FROM, *flags))
    assert_it_learned(run)
    assert max(line["train/staleness_max"] for line in metrics(run)) > 0


def test_both_engines_measure_the_same_success(better: Path, tmp_path: Path) -> None:
    def success(name: str, *engine: str) -> float:
        argv = ["eval", "Calculator-v0", "--policy", str(better / "model"), "--tasks", "200"]
        argv += [*TASKS, "--env.notation", "words", "--rollout.max-tokens", "64"]
        finish(begin(*argv, "--out", str(tmp_path / name), *engine))
        report = json.loads((tmp_path / name / "report.json").read_text())
        assert report["episodes"] == 200
        found: float = report["rewards"]["success"]["value"]
        return found

    # Five standard errors of the difference between two means of 200 at 0.9.
    assert success("vllm", *VLLM) == pytest.approx(success("hf"), abs=0.15)


def test_a_killed_deterministic_run_resumes_to_bit_equal_weights(
    start: Path, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    flags = ["--model.path", str(start), *SHORT, "--deterministic"]
    finish(train(whole, *flags))
    kill_after(train(killed, *flags), killed, 3)
    finish(train(killed, *flags, "--resume"))
    assert [line["step"] for line in metrics(killed)] == list(range(1, STEPS + 1))
    expected = load_file(whole / "model" / "model.safetensors")
    found = load_file(killed / "model" / "model.safetensors")
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    before = load_file(start / "model.safetensors")
    assert any(not torch.equal(expected[name], before[name]) for name in expected)


def test_a_killed_run_that_samples_ahead_loses_and_repeats_no_task(
    start: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    flags = ["--model.path", str(start), *SHORT, "--staleness", "2", "--store-trajectories", "1"]
    kill_after(train(run, *flags), run, 3)
    saved = max(int(p.parent.name[5:]) for p in run.glob("checkpoints/step-*/state.json"))
    stored = TrajectoryStore(run / "trajectories").rows()
    before = [row for row in stored if row["step"] < saved]
    finish(train(run, *flags, "--resume"))
    assert [line["step"] for line in metrics(run)] == list(range(1, STEPS + 1))
    rows = before + TrajectoryStore(run / "trajectories").rows()[len(stored) :]
    trained = [int(row["group"].split("/")[0]) for row in rows]
    state = json.loads((run / "checkpoints" / f"step-{STEPS:06d}" / "state.json").read_text())
    stream = state["collector"]["stream"]
    assert stream["position"] == STEPS * 4
    tasks = TaskStream(stream["num_tasks"], stream["seed"]).take(STEPS * 4)
    assert sorted(trained) == sorted([*tasks] * 4)
    assert state["collector"]["pipeline"]["again"] == []
