import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from turngym.agents.store import TrajectoryStore
from turngym.rl.stream import TaskStream

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow

SETTINGS = [
    *("--env.level", "1", "--env.notation", "words", "--seed", "3"),
    *("--steps", "6", "--prompts", "4", "--rollout.group-size", "4", "--rollout.max-tokens", "24"),
    *("--sft.steps", "30", "--sft.demos", "60", "--sft.habits", "guess", "0.5"),
    *("--optim.lr", "1e-3", "--optim.minibatches", "2", "--save-every", "2"),
    *("--eval.tasks", "8"),
]


def start(run: Path, *more: str, ahead: int = 0) -> "subprocess.Popen[str]":
    mode = ["--staleness", str(ahead), "--threads", "1"] if ahead else ["--deterministic"]
    command = [sys.executable, "-m", "turngym.cli", "train", *SETTINGS, *mode, *more]
    command += ["--run", str(run)]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(run: Path, *more: str, ahead: int = 0) -> None:
    process = start(run, *more, ahead=ahead)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output


def steps_logged(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def wait_for_step(run: Path, step: int) -> None:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        if step in steps_logged(run):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was never logged")


def trained(run: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = load_file(run / "model" / "model.safetensors")
    return weights


def test_a_killed_run_resumes_to_bit_equal_weights(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(whole, "--rollout.concurrency", "1")
    process = start(killed, "--rollout.concurrency", "64")
    try:
        wait_for_step(killed, 3)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
    finish(killed, "--rollout.concurrency", "64", "--resume")
    assert steps_logged(killed) == steps_logged(whole) == [1, 2, 3, 4, 5, 6]
    expected, found = trained(whole), trained(killed)
    assert expected.keys() == found.keys()
    different = [name for name in expected if not torch.equal(expected[name], found[name])]
    assert not different
    start_weights = load_file(whole / "base" / "model.safetensors")
    assert any(not torch.equal(expected[name], start_weights[name]) for name in expected)


def test_a_killed_run_that_samples_ahead_loses_and_repeats_no_task(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(run, ahead=2)
    try:
        wait_for_step(run, 3)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
    saved = max(int(p.parent.name[5:]) for p in run.glob("checkpoints/step-*/state.json"))
    before = [row for row in TrajectoryStore(run / "trajectories").rows() if row["step"] < saved]
    stored = len(TrajectoryStore(run / "trajectories").rows())
    finish(run, "--resume", ahead=2)
    assert steps_logged(run) == [1, 2, 3, 4, 5, 6]
    rows = before + TrajectoryStore(run / "trajectories").rows()[stored:]
    trained = [int(row["group"].split("/")[0]) for row in rows]
    state = json.loads((run / "checkpoints" / "step-000006" / "state.json").read_text())
    stream = state["collector"]["stream"]
    assert stream["position"] == 6 * 4
    tasks = TaskStream(stream["num_tasks"], stream["seed"]).take(6 * 4)
    assert sorted(trained) == sorted([*tasks] * 4)
    assert state["collector"]["pipeline"]["again"] == []


@pytest.mark.parametrize("ahead", [0, 2])
def test_ctrl_c_once_finishes_the_step_and_saves(ahead: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(run, "--steps", "500", "--save-every", "0", ahead=ahead)
    wait_for_step(run, 1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    last = steps_logged(run)[-1]
    assert (run / "checkpoints" / f"step-{last:06d}" / "state.json").exists(), output
    assert "--resume" in output


def test_ctrl_c_twice_stops_at_once_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(run, "--steps", "500", "--save-every", "1", "--prompts", "64")
    wait_for_step(run, 2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    # The second may come when the run has already ended in good order and the process is leaving.
    assert process.returncode in (0, 130, -signal.SIGINT), output
    folders = sorted((run / "checkpoints").glob("step-*"))
    assert folders
    assert all((folder / "state.json").exists() for folder in folders)


def test_a_run_folder_in_use_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    process = start(run)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "already holds a run" in output
