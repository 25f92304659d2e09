"""`turngym train @recipe.toml`: improve an agent."""

import dataclasses
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from turngym.cli.console import (
    Advance,
    out,
    progress,
    quiet_transformers,
    setup_logging,
    show_table,
)
from turngym.cli.env_options import (
    chosen_kwargs,
    find_env,
    flag_value,
    options_of,
    take_env_id,
    with_env_options,
)
from turngym.config import load, read_toml
from turngym.errors import ConfigError
from turngym.rl.config import TrainConfig
from turngym.rl.presets import preset

if TYPE_CHECKING:
    from turngym.agents.summary import Report
    from turngym.rl.session import TrainSession

__all__ = ["FLAGS", "run"]

FLAGS = {"on_rewrite": "--on-rewrite"}
"""Names that the library's messages use, and the flags that set them here."""


def run(argv: Sequence[str]) -> None:
    """Run the command."""
    setup_logging()
    config, kwargs = parse(argv)
    from turngym.rl.session import TrainSession  # torch, only once the arguments are right

    quiet_transformers()
    observer = _Console()
    started = time.monotonic()
    with TrainSession(config, kwargs, observer) as session:
        if config.resume:
            observer.recall("before", config.run / "evaluations" / "before.json")
        with _interruptible(session):
            session.run()
        stopped = session.trainer is not None and session.trainer.stop_requested
    observer.summarise(time.monotonic() - started)
    out.print(f"run folder: {config.run}", markup=False)
    if stopped:
        out.print("stopped early; go on with the same settings and --resume")
    else:
        flags = [f"--env.{name} {_word(value)}" for name, value in kwargs.items()]
        command = " ".join([config.env_id, *flags, f"--policy {config.run / 'model'}"])
        out.print(f"evaluate it: turngym eval {command}", markup=False)


def _word(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def parse(argv: Sequence[str]) -> tuple[TrainConfig, dict[str, Any]]:
    """Return the configuration of a run and its environment's arguments.

    Raises:
        ConfigError: a recipe is wrong, or names an unknown environment or algorithm.
    """
    argv, algorithm = _take_algorithm(take_env_id(argv))
    recipes = [read_toml(item[1:]) for item in argv if item.startswith("@")]
    env_id = flag_value(argv, "--env-id")
    for recipe in recipes if env_id is None else ():
        env_id = recipe.get("env_id", env_id)
    spec = find_env(env_id or TrainConfig().env_id)
    default: Any = with_env_options(TrainConfig(), options_of(spec))
    default = dataclasses.replace(default, env_id=spec.id)

    def prepare(config: Any, values: dict[str, Any]) -> Any:
        """Let the algorithm's name choose the preset that the other settings then change."""
        wanted = values.get("algorithm", {})
        if isinstance(wanted, str):
            wanted = {"preset": wanted}
        if not isinstance(wanted, dict):
            raise ConfigError(f"algorithm must be a preset's name or a table, got {wanted!r}")
        usual = wanted.pop("preset", config.algorithm.name)
        name = algorithm or usual
        if name != usual and wanted:
            out.print(
                f"--algorithm {name}: what the recipe changes of {usual!r} "
                f"({', '.join(wanted)}) is left out",
                markup=False,
            )
        values["algorithm"] = wanted if name == usual else {}
        values.pop("env_id", None)
        return dataclasses.replace(config, algorithm=preset(name))

    config = load(default, argv, prog="turngym train", prepare=prepare)
    return config, dict(chosen_kwargs(config.env, spec))


def _take_algorithm(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """Split off `--algorithm NAME`, which must be known before the other flags are."""
    name = flag_value(argv, "--algorithm")
    if name is None:
        return list(argv), None
    at = next(i for i, item in enumerate(argv) if item.split("=")[0] == "--algorithm")
    return [*argv[:at], *argv[at + (1 if "=" in argv[at] else 2) :]], name


class _Console:
    """Shows a run: a bar a stage, and the evaluations side by side at the end."""

    def __init__(self) -> None:
        self._reports: dict[str, Report] = {}

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Advance]:
        started = time.monotonic()
        reached = 0
        with progress(name, total) as show:

            def advance(done: int, note: str = "", *, total: int | None = None) -> None:
                nonlocal reached
                reached = done
                show(done, note, total=total)

            yield advance
        took = time.monotonic() - started
        out.print(f"{name}: {reached} of {total} done in {took:.1f} s", markup=False)

    def evaluated(self, name: str, report: "Report") -> None:
        self._reports[name] = report
        found = report.pass_at.get(1)
        if found is not None:
            interval = f" [{found.low:.3f}, {found.high:.3f}]" if found.low is not None else ""
            out.print(f"{name}: success {found.value:.3f}{interval}", markup=False)

    def recall(self, name: str, path: Path) -> None:
        """Take the numbers of an evaluation that the run made before it was interrupted."""
        from turngym.agents.summary import Report

        if path.is_file():
            self._reports[name] = Report.from_json(json.loads(path.read_text(encoding="utf-8")))

    def summarise(self, seconds: float) -> None:
        if self._reports:
            rows: dict[str, list[str]] = {}
            for position, report in enumerate(self._reports.values()):
                for name, value, interval in report.rows():
                    row = rows.setdefault(name, [""] * len(self._reports))
                    row[position] = f"{value} {interval}".rstrip()
            columns = ("held-back tasks", *self._reports)
            show_table(columns, [(name, *values) for name, values in rows.items()])
        out.print(f"finished in {seconds:.0f} s", markup=False)


@contextmanager
def _interruptible(session: "TrainSession") -> Iterator[None]:
    """Ctrl-C once: finish the step and save; twice: stop at once, the last checkpoint is whole."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        trainer = session.trainer
        if trainer is None or trainer.stop_requested:
            raise KeyboardInterrupt
        trainer.stop_requested = True
        sys.stderr.write("\nfinishing the step and saving; Ctrl-C again stops at once\n")

    previous: Callable[[int, FrameType | None], Any] | int | None
    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
