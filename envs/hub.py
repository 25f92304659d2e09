"""Data sets of the Hugging Face hub that environments can name, as plain rows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from turngym.envs.arguments import did_you_mean
from turngym.errors import ConfigError, DataError, MissingDependencyError

__all__ = ["HUB", "load_rows"]

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """Where a data set lies and how its rows become `question`, `answer`, `solution`."""

    repository: str
    config: str | None
    splits: Mapping[str, str]
    row: Callable[[Mapping[str, Any]], Row]


def _gsm8k_row(row: Mapping[str, Any]) -> Row:
    answer = str(row["answer"]).rpartition("####")[2].strip()
    return {"question": row["question"], "answer": answer, "solution": row["answer"]}


HUB: Mapping[str, HubSource] = {
    "gsm8k": HubSource(
        repository="openai/gsm8k",
        config="main",
        splits={"train": "train", "eval": "test", "test": "test"},
        row=_gsm8k_row,
    ),
}
"""Known data sets by the name an environment takes."""


def load_rows(name: str, split: str) -> list[Row]:
    """Download (or take from the local cache) the rows of a data set.

    Raises:
        ConfigError: an unknown name or split.
        MissingDependencyError: `datasets` is not installed.
        DataError: the data set cannot be fetched.
    """
    source = HUB.get(name)
    if source is None:
        raise ConfigError(
            f"no data set is called {name!r}{did_you_mean(name, HUB)}; known: {', '.join(HUB)} "
            "(a file is named by its path, for example ./tasks.jsonl)"
        )
    if split not in source.splits:
        raise ConfigError(f"{name} has the splits {', '.join(source.splits)}, got {split!r}")
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError(
            f"the data set {name!r} is fetched with the `datasets` package: "
            "pip install 'turngym[hub]', or pass the path of a JSONL file"
        ) from error
    try:
        rows = datasets.load_dataset(source.repository, source.config, split=source.splits[split])
    except Exception as error:  # offline, renamed, refused: the package raises many kinds
        raise DataError(
            f"the data set {source.repository!r} cannot be fetched ({type(error).__name__}: "
            f"{error}); offline, pass the path of a JSONL file instead"
        ) from error
    return [source.row(row) for row in rows]
