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
from turngym.agents.base import Sampling
from turngym.agents.config import RolloutConfig
from turngym.agents.hf_policy import HFPolicy
from turngym.agents.model import load_model
from turngym.agents.renderer import Renderer
from turngym.agents.rollout import EnvSource, RolloutEngine, TokenAgent
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


class Wordy(Calculator):
    """A calculator whose expert may say what it thinks up to four times over."""

    def expert(self, rng: random.Random, habits: Mapping[str, float]) -> Action:
        """Do what the calculator's expert does, at length."""
        action = super().expert(rng, habits)
        thought = action.get("reasoning_content")
        if thought:
            action["reasoning_content"] = " so ".join([thought] * rng.randint(1, 4))
        return action


turngym.register("bench/HardTimes-v0", HardTimes)
turngym.register("bench/Wordy-v0", Wordy)


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
EFFICIENT = {"selection": {"keep_in_group": {"metric": "token_efficiency"}}}
SPECIAL: dict[str, Case] = {
    case.name: case
    for case in (
        Case(name="gfpo", preset="gfpo", algorithm=EFFICIENT, flags=WIDE),
        Case(name="gfpo_adaptive", preset="gfpo_adaptive", algorithm=EFFICIENT, flags=WIDE),
        Case(
            name="passk_grpo",
            preset="passk_grpo",
            algorithm={"selection": {"metric": "success"}},
            flags=("--eval.samples", "4"),
        ),
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
    "wordy": (
        *("bench/Wordy-v0", "--env.level", "2", "--sft.steps", "600"),
        *("--sft.habits", "wrong_operator", "0.06", "ignore_result", "0.05"),
    ),
}
"""Flags of the cold starts; an environment of its own comes first, with one setting."""

ONLY_RIGHT = {"reward": {"weights": {"correct": 1.0, "tool": 0.0, "format": 0.0}}}
SCALED = {"reward": {"weights": {"correct": 1.0, "tool": 1.0, "format": 0.05}}}
"""A format reward twenty times too small; GDPO divides by the spread and would not notice."""

EVEN = {"reward": {"weights": {"correct": 1.0, "tool": 1.0, "format": 1.0}}}
STALE = ("--optim.minibatches", "4")
FAST = (*STALE, "--optim.lr", "4e-3")

Run = dict[str, Any]
Column = Callable[[Run], float]


def after(name: str) -> Column:
    """A component on the held-back tasks, at the end."""
    return lambda run: run["after"][name]


def through(name: str, fold: Callable[[Sequence[float]], float] = statistics.mean) -> Column:
    """A metric, folded over the rollout batches."""
    return lambda run: fold(run["metrics"][name])


def late_low(run: Run) -> float:
    """Least success of a rollout batch in the second half of the training."""
    curve: list[float] = run["curves"]["success"]
    return min(curve[len(curve) // 2 :])


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """Cases that differ in one thing, and what of them is compared."""

    cases: tuple[Case, ...]
    columns: Mapping[str, Column]


CONTRASTS: dict[str, Contrast] = {
    "several rewards": Contrast(
        cases=(
            Case(name="even-grpo", preset="grpo", algorithm=EVEN),
            Case(name="summed-grpo", preset="grpo", algorithm=SCALED),
            Case(name="apart-gdpo", preset="gdpo", algorithm=EVEN),
        ),
        columns={
            # The first batch is the same in every case: same start, same seed.
            "different advantages a group, first batch": through(
                "train/distinct_advantages", lambda values: values[0]
            ),
            "all batches": through("train/distinct_advantages"),
            "format while training": lambda run: statistics.mean(run["curves"]["format"]),
            "format after": after("format"),
            "correct after": after("correct"),
            "success after": after("success"),
        },
    ),
    "prompts that are hardly ever solved": Contrast(
        cases=tuple(
            Case(name=f"hard-{name}", preset=name, algorithm=ONLY_RIGHT, start="hard", steps=40)
            for name in ("grpo", "maxrl", "ngrpo")
        ),
        columns={
            "groups without advantage": through("train/idle_groups_frac"),
            "`times` right at first": lambda run: run["times"][0],
            "`times` right at the end": lambda run: run["times"][1],
            "correct after": after("correct"),
            "largest gradient norm": through("train/grad_norm", max),
        },
    ),
    "the shortest of a group, short failures": Contrast(
        cases=(
            Case(name="wide-grpo", preset="grpo", flags=WIDE),
            Case(name="wide-gfpo", preset="gfpo", flags=WIDE),
            Case(name="wide-gfpo_adaptive", preset="gfpo_adaptive", flags=WIDE),
            SPECIAL["gfpo"],
            SPECIAL["gfpo_adaptive"],
        ),
        columns={
            "success after": after("success"),
            "correct after": after("correct"),
            "format after": after("format"),
            "tokens before": lambda run: run["held_back_tokens"]["before"],
            "tokens after": lambda run: run["held_back_tokens"]["after"],
        },
    ),
    "the shortest of a group, wordy start": Contrast(
        cases=(
            Case(name="wordy-grpo", preset="grpo", flags=WIDE, start="wordy"),
            Case(name="wordy-gfpo", preset="gfpo", flags=WIDE, start="wordy"),
            Case(
                name="wordy-gfpo-efficient",
                preset="gfpo",
                algorithm=EFFICIENT,
                flags=WIDE,
                start="wordy",
            ),
        ),
        columns={
            "success after": after("success"),
            "tokens before": lambda run: run["held_back_tokens"]["before"],
            "tokens after": lambda run: run["held_back_tokens"]["after"],
            "groups without advantage": through("train/idle_groups_frac"),
        },
    ),
    "four optimizer steps a rollout batch": Contrast(
        cases=tuple(
            Case(name=f"{kind}-{name}", preset=name, flags=flags)
            for kind, flags in (("stale", STALE), ("fast", FAST))
            for name in ("grpo", "cispo", "gspo")
        ),
        columns={
            "success after": after("success"),
            "least success, second half": late_low,
            "largest gradient norm": through("train/grad_norm", max),
            "largest log ratio": through("train/log_ratio_max", max),
            "KL(anchor, policy)": through("train/anchor_kl"),
            "bounded tokens": through("train/clip_frac"),
        },
    ),
}

KEPT_METRICS = (
    *("train/idle_groups_frac", "train/distinct_advantages", "train/moving_rows"),
    *("train/grad_norm", "train/log_ratio_max", "train/anchor_kl", "train/clip_frac"),
)


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
    cpu = time.process_time() - cpu
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["step"] > 0]
    found = {
        "case": case.name,
        "preset": case.preset,
        "seed": seed,
        "steps": steps,
        "cpu_s": cpu,
        "before": evaluation(run, "before"),
        "after": evaluation(run, "after"),
        "to_solved": first_reach([line["reward/success/mean"] for line in lines]),
        "tokens": sum(line["rollout/sampled_tokens"] * line["rollout/episodes"] for line in lines),
        "pass_at": {name: pass_rates(run, name) for name in ("before", "after")},
        "metrics": {
            name: [line[name] for line in lines if line.get(name) is not None]
            for name in KEPT_METRICS
        },
        "curves": {
            name: [line[f"reward/{name}/mean"] for line in lines]
            for name in ("success", "correct", "tool", "format")
        },
        "length": [line["rollout/sampled_tokens"] for line in lines],
    }
    if case.start == "hard":
        found["times"] = right_on_times(run)
    if case.flags == WIDE:
        models = {"before": start, "after": run / "model"}
        found["held_back_tokens"] = {
            name: held_back_tokens(model, config.env_id, kwargs) for name, model in models.items()
        }
    return found


def evaluation(run: Path, name: str) -> dict[str, float]:
    """Mean of each component in one of a run's evaluations."""
    report = json.loads((run / "evaluations" / f"{name}.json").read_text(encoding="utf-8"))
    return {name: float(one["value"]) for name, one in report["rewards"].items()}


def pass_rates(run: Path, name: str) -> dict[str, float]:
    """Success of the best of k samples, by k, in one of a run's evaluations."""
    report = json.loads((run / "evaluations" / f"{name}.json").read_text(encoding="utf-8"))
    return {k: float(one["value"]) for k, one in report["pass_at"].items()}


def held_back_tokens(model: Path, env_id: str, kwargs: Mapping[str, Any]) -> float:
    """Policy tokens an episode on held-back tasks, the same for every model."""
    weights, tokenizer = load_model(model, device="cpu")
    renderer = Renderer(tokenizer)
    config = RolloutConfig(group_size=1, concurrency=128, max_tokens=64)
    with (
        HFPolicy(weights, max_rows=128, threads=1) as policy,
        RolloutEngine(
            EnvSource(env_id, kwargs, "eval"),
            TokenAgent.factory(policy, renderer, Sampling(max_tokens=64)),
            config,
            seed=0,
        ) as engine,
    ):
        groups = engine.run(range(300))
    return statistics.mean(one.num_sampled for group in groups for one in group.trajectories)


def first_reach(success: Sequence[float]) -> int | None:
    """Rollout batches until the mean of the last three is at least SOLVED; None = never."""
    for end in range(3, len(success) + 1):
        if statistics.mean(success[end - 3 : end]) >= SOLVED:
            return end
    return None


def right_on_times(run: Path) -> tuple[float, float]:
    """How often multiplications were right, in the first and the last tenth of the episodes."""
    right = [
        one.rewards.get("correct") or 0.0
        for one in TrajectoryStore(run / "trajectories")
        if " times " in str(one.prompt[-1]["content"])
    ]
    tenth = max(1, len(right) // 10)
    return statistics.mean(right[:tenth]), statistics.mean(right[-tenth:])


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean, smallest and largest."""
    if not values:
        return "-"
    low, high = min(values), max(values)
    return f"{statistics.mean(values):.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"


def of_case(results: Sequence[Run], name: str) -> list[Run]:
    """Results of one case, the longest runs only, one a seed, the latest."""
    steps = max((one["steps"] for one in results if one["case"] == name), default=0)
    chosen = [one for one in results if one["case"] == name and one["steps"] == steps]
    return list({one["seed"]: one for one in chosen}.values())


def preset_table(results: Sequence[Run]) -> list[str]:
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


def contrast_table(results: Sequence[Run], contrast: Contrast) -> list[str]:
    """One row a case of a contrast; "-" where an older result lacks a figure."""
    header = ("case", "seeds", "batches", *contrast.columns)
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for case in contrast.cases:
        runs = of_case(results, case.name)
        if not runs:
            continue
        cells = [case.name, str(len(runs)), str(runs[0]["steps"])]
        for column in contrast.columns.values():
            try:
                found = [column(run) for run in runs]
            except (KeyError, statistics.StatisticsError):
                found = []
            cells.append(spread(found, 3))
        lines.append("| " + " | ".join(cells) + " |")
    return lines if len(lines) > 2 else []


def write(page: Path, results: Sequence[Run]) -> None:
    """Put each table between its markers; what has none yet comes at the end of the page."""
    text = page.read_text(encoding="utf-8") if page.exists() else "# Benchmarks\n"
    tables = {"presets": preset_table(results)}
    tables |= {title: contrast_table(results, contrast) for title, contrast in CONTRASTS.items()}
    for title, lines in tables.items():
        begin, end = f"<!-- {title}: begin -->", f"<!-- {title}: end -->"
        if not lines:
            continue
        if begin not in text:
            text = f"{text.rstrip()}\n\n### {title.capitalize()}\n\n{begin}\n{end}\n"
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(end)
        text = f"{head}{begin}\n" + "\n".join(lines) + f"\n{end}{tail}"
    page.write_text(text, encoding="utf-8")


def load(path: Path) -> list[Run]:
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
            cases += contrast.cases
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
