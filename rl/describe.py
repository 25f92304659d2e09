"""The table of algorithms as plain text, for the command line and the docs; no torch here."""

import dataclasses
import sys
from collections.abc import Collection, Iterable
from typing import Any

from turngym.rl.algorithm import Algorithm
from turngym.rl.estimators import Estimator, GroupAdvantage
from turngym.rl.presets import PRESETS, preset

__all__ = ["COLUMNS", "describe", "markdown", "row"]

COLUMNS = (
    "algorithm",
    "paper",
    "reward",
    "selection",
    "advantage",
    "ratio",
    "trust region",
    "tokens",
    "aggregate",
    "regularize",
)
"""Headers of `row`: the name, where it comes from, and the eight axes."""


_SETTINGS = {
    "beta", "clip", "coef", "estimator", "frac", "high", "k", "ks", "lam", "low", "max",
    "measure", "method", "metric", "min", "omega", "tau_neg", "tau_pos", "where",
}  # fmt: skip
"""Fields worth reading even where they have their default."""


def row(algorithm: Algorithm) -> tuple[str, ...]:
    """One line of the table, a cell for each of `COLUMNS`; "-" where an axis is not used."""
    return (
        algorithm.name,
        algorithm.paper,
        _value(algorithm.reward, named=False),
        _value(algorithm.selection, named=False),
        _advantage(algorithm.advantage),
        _ratio(algorithm),
        _value(algorithm.trust_region),
        _values(algorithm.tokens),
        _aggregate(algorithm),
        _values(algorithm.regularize),
    )


def describe(name: str) -> list[tuple[str, str]]:
    """Everything about one algorithm as (label, text), in reading order.

    Raises:
        ConfigError: no preset has this name.
    """
    algorithm = preset(name)
    cells = list(zip(COLUMNS, row(algorithm), strict=True))
    head = [("algorithm", algorithm.name), ("paper", algorithm.paper)]
    formula = [("formula", algorithm.formula)]
    return head + formula + cells[2:] + [("deviation", text) for text in algorithm.deviations]


def markdown(algorithms: Iterable[Algorithm] = tuple(PRESETS.values())) -> str:
    """The table in Markdown, then what each algorithm minimises and where it deviates."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    notes = []
    for algorithm in algorithms:
        lines.append("| " + " | ".join(_linked(cell) for cell in row(algorithm)) + " |")
        notes.append(f"- **{algorithm.name}**: `{algorithm.formula}`")
        notes += [f"  - deviates: {text}" for text in algorithm.deviations]
    return "\n".join([*lines, "", *notes])


def _linked(cell: str) -> str:
    if cell.startswith("arXiv:"):
        return f"[{cell}](https://arxiv.org/abs/{cell.removeprefix('arXiv:')})"
    if cell.startswith("doi:"):
        return f"[{cell}](https://doi.org/{cell.removeprefix('doi:')})"
    return cell


def _advantage(estimator: Estimator) -> str:
    """Baseline / scale / whiten, and what else is set."""
    if not isinstance(estimator, GroupAdvantage):
        return _value(estimator)
    axes = ("baseline", "scale", "whiten")
    head = " / ".join(getattr(estimator, name) for name in axes)
    rest = _value(estimator, named=False, skip=axes)
    return head if rest == "-" else f"{head}; {rest}"


def _aggregate(algorithm: Algorithm) -> str:
    if not algorithm.aggregates:
        return "-"
    rest = _value(algorithm.aggregate, named=False, skip=("mode",))
    return algorithm.aggregate.mode + ("" if rest == "-" else f", {rest}")


def _ratio(algorithm: Algorithm) -> str:
    ratio = algorithm.ratio
    if ratio.anchor == "none":
        return "-"
    shaped = "" if ratio.demo_shaping is None else f", demos p/(p+{ratio.demo_shaping:g})"
    return f"{ratio.level}, {ratio.anchor}{shaped}"


def _values(items: Iterable[Any]) -> str:
    return ", ".join(_value(item) for item in items) or "-"


def _value(item: Any, *, named: bool = True, skip: Collection[str] = ()) -> str:
    """A dataclass as its kind, its settings, and what else differs from the default."""
    if item is None:
        return "-"
    fields = []
    for field in dataclasses.fields(item):
        value, default = getattr(item, field.name), field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if field.name in skip or value is None:
            continue
        if value != default or field.name in _SETTINGS:
            fields.append(f"{field.name}={_plain(value)}")
    inside = ", ".join(fields)
    if not named:
        return inside or "-"
    return type(item).__name__ + (f"({inside})" if inside else "")


def _plain(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        return _value(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(_plain(item) for item in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.stdout.write(markdown() + "\n")
