"""The environments of a run: where tasks come from, in training and in evaluation."""

from collections.abc import Iterator, Mapping
from typing import Any

from turngym.agents.mixed_source import MixedSource, read_env
from turngym.agents.rollout import EnvSource
from turngym.agents.seeds import derive
from turngym.errors import ConfigError
from turngym.rl.algorithm import BoundAlgorithm, RunFacts
from turngym.rl.config import TrainConfig
from turngym.rl.estimators import Pairs
from turngym.rl.stream import MixedStream, TaskStream

__all__ = ["Worlds"]


class Worlds:
    """One kind of environment, or a mix of several.

    Args:
        config: the run.
        kwargs: arguments of `config.env_id`.

    Raises:
        ConfigError: an environment cannot be read or made, or the mix contradicts itself.
    """

    def __init__(self, config: TrainConfig, kwargs: Mapping[str, Any]) -> None:
        self._config = config
        self._envs = [(config.env_id, dict(kwargs)), *map(read_env, config.mix)]

    def source(self) -> EnvSource | MixedSource:
        """Return what makes the environments that train."""
        sources = [EnvSource(env_id, kwargs, "train") for env_id, kwargs in self._envs]
        return sources[0] if len(sources) == 1 else MixedSource(sources)

    def stream(self, source: EnvSource | MixedSource) -> TaskStream | MixedStream:
        """Return the order in which a source's tasks come."""
        seed = derive(self._config.seed, "tasks")
        if isinstance(source, EnvSource):
            return TaskStream(len(source.task_set), seed)
        sizes = [len(one.task_set) for one in source.sources]
        return MixedStream(sizes, [1.0, *self._config.mix.values()], seed)

    def held_back(self, name: str) -> Iterator[tuple[str, EnvSource]]:
        """Return sources of tasks to evaluate on, each with the name of its evaluation.

        Args:
            name: of the evaluation; with several environments each has its own after it.
        """
        for env_id, kwargs in self._envs:
            own = env_id.rpartition("/")[2].lower()
            yield (
                name if len(self._envs) == 1 else f"{name}-{own}",
                EnvSource(env_id, kwargs, "eval"),
            )

    def bind(self, source: EnvSource | MixedSource) -> BoundAlgorithm:
        """Resolve what the algorithm leaves open by what the environments are.

        Raises:
            ConfigError: the algorithm does not fit them.
        """
        config = self._config
        max_turns = source.max_turns
        facts = RunFacts(
            rubric=source.reward_specs,
            group_size=config.rollout.group_size,
            max_tokens=config.most_tokens * max_turns if max_turns else None,
            updates=config.optim.minibatches * config.optim.epochs,
            has_reference=True,
            has_critic=True,
            topk=config.topk,
        )
        bound = config.algorithm.bind(facts)
        if config.staleness and isinstance(bound.algorithm.advantage, Pairs):
            raise ConfigError(
                f"{bound.algorithm.name} learns from pairs, for whose age nothing corrects; it "
                f"needs staleness=0, got {config.staleness}"
            )
        metric = bound.algorithm.selection.metric
        for one in source.sources if isinstance(source, MixedSource) else ():
            if metric is not None and metric not in one.reward_specs:
                raise ConfigError(
                    f"algorithm.selection.metric={metric!r} tells right from wrong, but "
                    f"{one.env_id} has only {sorted(one.reward_specs)}; name a reward that all "
                    "environments of the mix have"
                )
        return bound
