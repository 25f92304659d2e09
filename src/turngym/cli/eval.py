"""`turngym eval ID --policy P`: measure a policy on an environment's tasks."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from turngym.cli.console import out, progress, setup_logging, show_table
from turngym.cli.episodes import FLAGS, EpisodesConfig, open_engine, parse, task_count
from turngym.config import dump
from turngym.errors import EnvError

__all__ = ["FLAGS", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig(EpisodesConfig):
    """Measure a policy: reward by component, pass@k and pass^k with 95 % intervals.

    Episodes that failed for the world's fault are counted apart, never as wrong.
    """

    samples: int = 1
    """Episodes a task, for pass@k and pass^k."""

    success: str | None = None
    """Component that counts as success; None = `success`, else `correct`, else the only one."""

    out: Path | None = None
    """Folder for the episodes and `report.json`; an evaluation there can be resumed."""

    resume: bool = False
    """Go on in a folder that already holds episodes; the numbers are those of one run."""

    json: bool = False
    """Print JSON instead of a table."""


def run(argv: Sequence[str]) -> None:
    """Run the command."""
    setup_logging()
    config, env_kwargs = parse(EvalConfig(), argv, prog="turngym eval")
    from turngym.agents.evaluation import evaluate

    def advance(done: int, asked: int) -> None:
        show(done, total=asked)

    with progress("episodes") as show, open_engine(config, env_kwargs, advance) as opened:
        engine, available = opened
        count = task_count(config, available)
        report = evaluate(
            engine,
            num_tasks=count,
            samples_per_task=config.samples,
            out=config.out,
            resume=config.resume,
            success=config.success,
            policy={
                "name": config.policy,
                "model": dump(config.model),
                "max_tokens": config.rollout.max_tokens,
            },
        )
    if not report.tasks:
        raise EnvError(f"all {report.episodes} episodes failed; the last: {report.last_error}")
    if config.json:
        sys.stdout.write(json.dumps(report.to_json(), indent=2) + "\n")
        return
    title = f"{config.env_id}, {config.policy}: {report.episodes} episodes of {report.tasks} tasks"
    show_table(("", "mean", "95 % interval"), report.rows(), title=title)
    if config.out is not None:
        out.print(f"episodes and report.json: {config.out}", markup=False)
