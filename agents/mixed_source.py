"""Several kinds of environments in one run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl

from turngym.agents.source import EnvSource, Tasks
from turngym.errors import ConfigError
from turngym.types import RewardSpec, Task

__all__ = ["MixedSource", "read_env"]


class MixedSource:
    """Deals the tasks of several sources out of one stream of ordinals.

    Of n sources, the i-th has the ordinals i, n + i, 2n + i, ... in the order of its own stream;
    which ordinal comes when is for `MixedStream` to say. Tasks are named by their environment too,
    for two environments may give one id to different tasks.

    Args:
        sources: those mixed, at least one.

    Raises:
        ConfigError: two of them mean different things by one reward name.
    """

    def __init__(self, sources: Sequence[EnvSource]) -> None:
        self.sources = tuple(sources)
        self.env_id = " + ".join(source.env_id for source in self.sources)
        self.kwargs = {source.env_id: source.kwargs for source in self.sources}
        self.task_set: Tasks = _Rounds(self)
        self.reward_specs = _joined(self.sources)
        self.has_expert = all(source.has_expert for source in self.sources)
        turns = [source.max_turns for source in self.sources]
        self.max_turns = None if None in turns else max(turn or 0 for turn in turns)

    def at(self, ordinal: int) -> EnvSource:
        """Return the source whose task an ordinal is."""
        return self.sources[ordinal % len(self.sources)]

    def task(self, ordinal: int) -> Task:
        """Return the task at a position of the endless stream."""
        place, kind = divmod(ordinal, len(self.sources))
        source = self.sources[kind]
        task = source.task(place)
        return replace(task, id=f"{source.env_id}:{task.id}")

    def close(self) -> None:
        """Close all sources. Idempotent."""
        for source in self.sources:
            source.close()


class _Rounds:
    """The tasks of a mix, as long as every source has new ones."""

    def __init__(self, source: MixedSource) -> None:
        self._source = source

    def __len__(self) -> int:
        sources = self._source.sources
        return len(sources) * min(len(source.task_set) for source in sources)

    def __getitem__(self, ordinal: int) -> Task:
        return self._source.task(ordinal)


def _joined(sources: Sequence[EnvSource]) -> Mapping[str, RewardSpec]:
    specs: dict[str, RewardSpec] = {}
    for source in sources:
        for name, spec in source.reward_specs.items():
            if specs.setdefault(name, spec) != spec:
                raise ConfigError(
                    f"reward {name!r} of {source.env_id} is {spec}, of another environment of the "
                    f"mix {specs[name]}; rename one of them, or give both the same meaning"
                )
    return specs


def read_env(text: str) -> tuple[str, dict[str, Any]]:
    """Take apart an environment written as `namespace/Name-v0?argument=value&...`.

    Returns:
        The id, and the arguments; a value that is JSON is read as such, all else is text.

    Raises:
        ConfigError: an argument without a value.
    """
    env_id, _, query = text.partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise ConfigError(f"cannot read the arguments of {text!r}: {error}") from error
    return env_id, {name: _value(word) for name, word in pairs}


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word
