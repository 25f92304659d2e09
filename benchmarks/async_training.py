"""Does training ahead of the weights cost what it learns, and does it save time?

    python benchmarks/async_training.py --seeds 0 1 2 --staleness 0 1 4
    python benchmarks/async_training.py --engines hf vllm --staleness 0 2 --lora 0 8

The demo agent from one cold start a seed, rolled out in step (0), one batch off (1) and further
ahead, by one engine or another, with all of its weights or adapters of a rank. `solved` is the
rollout batch after which the mean success of three batches reached 0.8; `age` the mean over the run
of the optimizer steps between the weights that sampled a token and those that trained on it; `KL`
of the last batch, sampler against trainer before the first update.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "calculator.toml"
SOLVED = 0.8


def train(run: Path, *flags: str) -> float:
    """Train once; return the seconds it took."""
    started = time.monotonic()
    command = [sys.executable, "-m", "turngym.cli", "train", f"@{RECIPE}", "--run", str(run)]
    command += ["--store-trajectories", "0", "--save-every", "0", *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started


def cold_start(folder: Path, seed: int, options: argparse.Namespace) -> Path:
    """Return the model that all runs of a seed begin with."""
    run = folder / f"start-{seed}"
    # vLLM's kernels need wider heads, which a fresh model for that engine has.
    own = ["--engine.kind", "vllm"] if "vllm" in options.engines else []
    own += ["--seed", str(seed), "--steps", "0", "--eval.no-before", "--eval.no-after"]
    train(run, *options.flags, *own)
    return run / "model"


def measure(
    start: Path, run: Path, seed: int, engine: str, rank: int, staleness: int, options: Any
) -> str:
    """Train from a cold start and return the row of the table."""
    flags = ["--engine.kind", engine, *options.flags]
    if rank:
        flags += ["--model.lora-rank", str(rank), "--optim.lr", str(options.lora_lr)]
    seconds = train(
        run,
        *flags,
        *("--model.path", str(start), "--sft.steps", "0", "--seed", str(seed)),
        *("--staleness", str(staleness)),
    )
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    success = [line["reward/success/mean"] for line in lines]
    solved = (
        end for end in range(3, len(lines) + 1) if statistics.mean(success[end - 3 : end]) >= SOLVED
    )
    report = json.loads((run / "evaluations" / "after.json").read_text(encoding="utf-8"))
    total = {
        name: sum(line[f"time/{name}_s"] for line in lines)
        for name in ("rollout", "straggler", "update", "sync")
    }
    spent = total["rollout"] + total["update"] + total["sync"]
    cells = [
        engine,
        f"rank {rank}" if rank else "full",
        str(seed),
        str(staleness),
        str(next(solved, "-")),
        f"{report['rewards']['success']['value']:.3f}",
        f"{statistics.mean(line['train/staleness_mean'] for line in lines):.1f}",
        f"{lines[-1]['train/mismatch_kl']:.1e}",
        *(f"{total[name] / spent:.2f}" for name in ("rollout", "straggler", "sync")),
        f"{spent / len(lines):.2f}",
        f"{seconds:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--engines", nargs="+", default=["hf"], choices=["hf", "vllm"])
    parser.add_argument("--lora", type=int, nargs="+", default=[0], help="ranks; 0 = all weights")
    parser.add_argument("--lora-lr", type=float, default=5e-3, help="learning rate of adapters")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of turngym train")
    options = parser.parse_args()
    print(
        "| engine | weights | seed | staleness | solved | success after | age | KL | waited "
        "| stragglers | sync | s a batch | seconds |\n|" + "---|" * 13
    )
    cases = list(itertools.product(options.lora, options.staleness, options.engines))
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            start = cold_start(Path(folder), seed, options)
            for rank, staleness, engine in cases:
                run = Path(folder) / f"run-{seed}-{engine}-{rank}-{staleness}"
                row = measure(start, run, seed, engine, rank, staleness, options)
                print(row, flush=True)


if __name__ == "__main__":
    main()
