"""The demo with several seeds: success before and after, and whether it needs the tool.

    python benchmarks/demo.py --seeds 0 1 2

Each seed is a whole `turngym train @recipes/calculator.toml`, evaluated on held-back tasks. The
columns train the same model to answer without the tool, by imitating right answers.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "calculator.toml"


def train(run: Path, seed: int, *more: str) -> float:
    """Train once; return the seconds it took."""
    started = time.monotonic()
    command = [sys.executable, "-m", "turngym.cli", "train", f"@{RECIPE}"]
    command += ["--run", str(run), "--seed", str(seed), "--store-trajectories", "0", *more]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started


def success(run: Path, name: str, component: str = "success") -> float:
    """Mean of a component in one of a run's evaluations."""
    report = json.loads((run / "evaluations" / f"{name}.json").read_text(encoding="utf-8"))
    return float(report["rewards"][component]["value"])


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    with tempfile.TemporaryDirectory() as folder:
        print("| seed | success before | after | seconds |\n|---|---|---|---|")
        for seed in seeds:
            run = Path(folder) / f"demo-{seed}"
            seconds = train(run, seed)
            before, after = success(run, "before"), success(run, "after")
            print(f"| {seed} | {before:.3f} | {after:.3f} | {seconds:.0f} |", flush=True)
        print("\n| seed | right without the tool |\n|---|---|")
        for seed in seeds:
            run = Path(folder) / f"direct-{seed}"
            train(run, seed, "--steps", "0", "--sft.habits", "skip_tool", "1.0")
            print(f"| {seed} | {success(run, 'after', 'correct'):.3f} |", flush=True)


if __name__ == "__main__":
    main()
