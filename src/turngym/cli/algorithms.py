"""`turngym algorithms`: the table; `turngym algorithms NAME`: one algorithm."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from turngym.cli.console import out, show_table
from turngym.config import parse_flags
from turngym.rl.describe import describe
from turngym.rl.presets import PRESETS

__all__ = ["run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmsConfig:
    """List every algorithm, or show one: its eight axes, formula, paper and deviations."""

    name: Annotated[str, tyro.conf.Positional] = ""
    """Algorithm to show; none = list all."""


def run(argv: Sequence[str]) -> None:
    """Run the command."""
    config = parse_flags(AlgorithmsConfig(), argv, prog="turngym algorithms")
    if config.name:
        width = max(len(label) for label, _ in describe(config.name)) + 2
        for label, text in describe(config.name):
            out.print(f"{label:<{width}}{text}", markup=False)
        return
    rows = [(a.name, a.paper, a.formula) for a in PRESETS.values()]
    show_table(("name", "paper", "objective (minimised)"), rows)
