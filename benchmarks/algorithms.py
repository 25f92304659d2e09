"""Every preset trains the demo agent, and the contrasts between presets that papers claim.

    python benchmarks/algorithms.py --presets grpo gspo --seeds 0 1 2 --steps 25
    python benchmarks/algorithms.py --presets all --contrasts all
    python benchmarks/algorithms.py --write docs/benchmarks.md

All cases of one seed start from one cold start, which is kept in the work folder. Results are
appended to a file of JSON lines as they come; what is there already is not run again, so that the
work can be split over time. `--write` puts the tables into a page, from that file alone.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import turngym
from turngym.agents.store import TrajectoryStore
from turngym.cli.train import parse
from turngym.config import merge
from turngym.envs.calculator import Calculator
from turngym.rl.config import TrainConfig
from turngym.rl.presets import PRESETS
from turngym.rl.session import train
from turngym.types import Action

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "calculator.toml"
SOLVED = 0.8
"""Success whose first reach is timed, as a mean over three rollout batches."""


class HardTimes(Calculator):
    """A calculator whose expert almost never multiplies where it should: a prompt that is hard."""

    def _call(
        self,
        rng: random.Random,
        left: int,
        symbol: str,
        right: int,
        slips: Callable[[str], bool],
    ) -> Action:
        if symbol == "*" and rng.random() < 0.975:
            symbol = rng.choice("+-")
        return super()._call(rng, left, symbol, right, slips)


turngym.register("bench/HardTimes-v0", HardTimes)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of a table: a preset with settings."""

    name: str
    preset: str
    algorithm: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the preset, as a recipe gives them."""

    flags: Sequence[str] = ()
    """Further flags of `turngym train`."""

    start: str = "demo"
    """Which cold start, see STARTS."""

    steps: int | None = None
    """Rollout batches; None = what the command line says."""


WIDE = ("--rollout.group-size", "16", "--prompts", "8")
CRITIC = ("--critic.lr", "1e-3")
SHORT = {"advantage": {"length_alpha": 0.5}}
SPECIAL: dict[str, Case] = {
    case.name: case
    for case in (
        Case(name="gfpo", preset="gfpo", flags=WIDE),
        Case(name="gfpo_adaptive", preset="gfpo_adaptive", flags=WIDE),
        Case(name="ppo", preset="ppo", flags=CRITIC),
        Case(name="open_reasoner_zero", preset="open_reasoner_zero", flags=CRITIC),
        Case(
            name="vapo", preset="vapo", algorithm={"advantage": {"length_alpha": 0.5}}, flags=CRITIC
        ),
        Case(name="rlep", preset="rlep", flags=("--env.size", "96")),
    )
}
"""Presets that need more than their name: other sizes, a critic's rate, tasks that come again."""

STARTS: dict[str, tuple[str, ...]] = {
    "demo": ("--sft.steps", "600"),
    "hard": (
        *("bench/HardTimes-v0", "--env.level", "1", "--sft.steps", "600"),
        *("--sft.habits", "guess", "0.1", "wrong_operator", "0.02"),
    ),
}
"""Flags of the cold starts."""

HARD = {"reward": {"weights": {"correct": 1.0, "tool": 0.0, "format": 0.0}}}
SCALED = {"reward": {"weights": {"correct": 1.0, "tool": 1.0, "format": 0.05}}}
EVEN = {"reward": {"weights": {"correct": 1.0, "tool": 1.0, "format": 1.0}}}
STALE = ("--optim.minibatches", "4")

CONTRASTS: dict[str, tuple[Case, ...]] = {
    "mis-scaled format reward (summed raw against normalised apart)": (
        Case(name="summed-grpo", preset="grpo", algorithm=SCALED),
        Case(name="apart-gdpo", preset="gdpo", algorithm=EVEN),
    ),
    "prompts that are hardly ever solved": tuple(
        Case(name=f"hard-{name}", preset=name, algorithm=HARD, start="hard", steps=40)
        for name in ("grpo", "maxrl", "ngrpo", "dapo")
    ),
    "keeping the shortest of a group": (
        Case(name="wide-grpo", preset="grpo", flags=WIDE),
        Case(name="wide-gfpo", preset="gfpo", flags=WIDE),
    ),
    "four optimizer steps a rollout batch": tuple(
        Case(name=f"stale-{name}", preset=name, flags=STALE) for name in ("grpo", "cispo", "gspo")
    ),
}


def configure(argv: Sequence[str], changes: Mapping[str, Any]) -> tuple[TrainConfig, Any]:
    """Read flags as the command line does, then change the algorithm."""
    leading = [item for item in argv[:1] if "/" in item and not item.startswith("-")]
    config, kwargs = parse([*leading, f"@{RECIPE}", *argv[len(leading) :]])
    config = replace(config, store_trajectories=0)
    return replace(config, algorithm=merge(config.algorithm, changes)), kwargs


def cold_start(name: str, seed: int, work: Path) -> Path:
    """Return the model that all cases of a seed begin with; made when missing."""
    run = work / f"start-{name}-{seed}"
    if not (run / "model").exists():
        flags = [*STARTS[name], "--seed", str(seed), "--run", str(run), "--steps", "0"]
        config, kwargs = configure(flags, {})
        print(f"cold start {name!r}, seed {seed}", flush=True)
        quiet = replace(config.eval, before=False, after=False)
        train(replace(config, eval=quiet), kwargs)
    return run / "model"


def play(case: Case, seed: int, steps: int, work: Path) -> dict[str, Any]:
    """Train one case once and measure it."""
    start = cold_start(case.start, seed, work)
    steps = case.steps or steps
    run = work / f"{case.name}-{seed}-{steps}-{time.time_ns()}"
    flags = [*(STARTS[case.start][:3] if case.start != "demo" else ()), "--algorithm", case.preset]
    flags += ["--model.path", str(start), "--sft.steps", "0", "--seed", str(seed)]
    flags += ["--run", str(run), "--steps", str(steps), "--save-every", "0", *case.flags]
    config, kwargs = configure(flags, case.algorithm)
    if case.start == "hard":
        config = replace(config, store_trajectories=1)
    cpu = time.process_time()
    train(config, kwargs)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["step"] > 0]
    found = {
        "case": case.name,
        "preset": case.preset,
        "seed": seed,
        "steps": steps,
        "cpu_s": time.process_time() - cpu,
        "before": evaluation(run, "before"),
        "after": evaluation(run, "after"),
        "to_solved": first_reach([line["reward/success/mean"] for line in lines]),
        "tokens": sum(line["rollout/sampled_tokens"] * line["rollout/episodes"] for line in lines),
        "grad_norm": max(line["train/grad_norm"] or 0.0 for line in lines),
        "moving": statistics.mean(line["train/moving_rows"] for line in lines),
        "curves": {
            name: [line[f"reward/{name}/mean"] for line in lines]
            for name in ("success", "correct", "tool", "format")
        },
        "length": [line["rollout/sampled_tokens"] for line in lines],
    }
    if case.start == "hard":
        found["times"] = right_on_times(run)
    return found


def evaluation(run: Path, name: str) -> dict[str, float]:
    """Mean of each component in one of a run's evaluations."""
    report = json.loads((run / "evaluations" / f"{name}.json").read_text(encoding="utf-8"))
    return {name: float(one["value"]) for name, one in report["rewards"].items()}


def first_reach(success: Sequence[float]) -> int | None:
    """Rollout batches until the mean of the last three is at least SOLVED; None = never."""
    for end in range(3, len(success) + 1):
        if statistics.mean(success[end - 3 : end]) >= SOLVED:
            return end
    return None


def right_on_times(run: Path) -> float:
    """How often multiplications were right, in the last tenth of the episodes."""
    right = [
        one.rewards.get("correct") or 0.0
        for one in TrajectoryStore(run / "trajectories")
        if " times " in str(one.prompt[-1]["content"])
    ]
    last = right[-max(1, len(right) // 10) :]
    return statistics.mean(last) if last else float("nan")


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean, smallest and largest."""
    if not values:
        return "-"
    low, high = min(values), max(values)
    return f"{statistics.mean(values):.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"


def of_case(results: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Results of one case, the longest runs only, one a seed, the latest."""
    steps = max((one["steps"] for one in results if one["case"] == name), default=0)
    chosen = [one for one in results if one["case"] == name and one["steps"] == steps]
    return list({one["seed"]: one for one in chosen}.values())


def preset_table(results: Sequence[dict[str, Any]]) -> list[str]:
    """One row a preset that was run."""
    lines = [
        f"| preset | seeds | batches | success before | after | batches to {SOLVED} | "
        "thousand tokens | CPU s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in PRESETS:
        runs = of_case(results, name)
        if not runs:
            continue
        reached = [str(one["to_solved"] or "never") for one in runs]
        cells = (
            name,
            str(len(runs)),
            str(runs[0]["steps"]),
            spread([one["before"]["success"] for one in runs]),
            spread([one["after"]["success"] for one in runs]),
            ", ".join(reached),
            spread([one["tokens"] / 1000 for one in runs], 0),
            spread([one["cpu_s"] for one in runs], 0),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def contrast_table(results: Sequence[dict[str, Any]], title: str) -> list[str]:
    """One row a case of a contrast."""
    lines = [
        f"**{title}**\n",
        "| case | seeds | correct after | mean format while training | "
        "tokens an episode, first 3 | last 3 | rows that move | largest gradient | "
        "`times` right at the end |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in CONTRASTS[title]:
        runs = of_case(results, case.name)
        if not runs:
            continue
        cells = (
            case.name,
            str(len(runs)),
            spread([one["after"]["correct"] for one in runs]),
            spread([statistics.mean(one["curves"]["format"]) for one in runs]),
            spread([statistics.mean(one["length"][:3]) for one in runs], 0),
            spread([statistics.mean(one["length"][-3:]) for one in runs], 0),
            spread([one["moving"] for one in runs], 0),
            spread([one["grad_norm"] for one in runs]),
            spread([one["times"] for one in runs if "times" in one]),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return [] if len(lines) == 3 else [*lines, ""]


def write(page: Path, results: Sequence[dict[str, Any]]) -> None:
    """Put the tables between the page's markers, or at its end."""
    begin, end = "<!-- algorithms: begin -->", "<!-- algorithms: end -->"
    lines = [*preset_table(results), ""]
    for title in CONTRASTS:
        lines += contrast_table(results, title)
    text = page.read_text(encoding="utf-8") if page.exists() else "# Benchmarks\n"
    if begin not in text:
        text = text.rstrip() + f"\n\n## Algorithms\n\n{begin}\n{end}\n"
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    table = "\n".join(lines).rstrip()
    page.write_text(f"{head}{begin}\n\n{table}\n\n{end}{tail}", encoding="utf-8")


def load(path: Path) -> list[dict[str, Any]]:
    """Read the results so far."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--presets", nargs="*", default=[], help="names, or all")
    parser.add_argument("--contrasts", nargs="*", default=[], help="numbers from 1, or all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--work", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--out", type=Path, default=Path("runs/algorithms/results.jsonl"))
    parser.add_argument("--write", type=Path, default=None, help="page to put the tables into")
    asked = parser.parse_args()
    names = list(PRESETS) if asked.presets == ["all"] else asked.presets
    cases = [SPECIAL.get(name, Case(name=name, preset=name)) for name in names]
    for number, contrast in enumerate(CONTRASTS.values(), 1):
        if asked.contrasts == ["all"] or str(number) in asked.contrasts:
            cases += contrast
    asked.work.mkdir(parents=True, exist_ok=True)
    done = {(one["case"], one["seed"], one["steps"]) for one in load(asked.out)}
    for seed in asked.seeds:
        for case in cases:
            if (case.name, seed, case.steps or asked.steps) in done:
                continue
            found = play(case, seed, asked.steps, asked.work)
            with asked.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
            print(
                f"{case.name:<24} seed {seed}  success {found['before']['success']:.2f} -> "
                f"{found['after']['success']:.2f}  solved at {found['to_solved']}  "
                f"{found['cpu_s']:.0f} CPU s",
                flush=True,
            )
    if asked.write is not None:
        write(asked.write, load(asked.out))


if __name__ == "__main__":
    main()
