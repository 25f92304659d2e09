"""The rollout engines of a run: one that samples, others that play the same tasks beside it."""

from collections.abc import Mapping
from dataclasses import replace

from turngym.agents.agent import AgentFactory
from turngym.agents.base import Policy, Sampling
from turngym.agents.renderer import Renderer
from turngym.agents.rollout import DemoAgent, EnvSource, MixedSource, RolloutEngine, TokenAgent
from turngym.errors import ConfigError
from turngym.rl.algorithm import BoundAlgorithm
from turngym.rl.config import TrainConfig

__all__ = ["Engines"]


class Engines:
    """Engines with one seed, so that a task begins in the same state in each; closable.

    Args:
        config: the run.
        bound: says which engines are needed.
        source: makes environments.
        renderer: between messages and tokens.
        policy: samples.
        habits: of the expert that demonstrates, by name.

    Raises:
        ConfigError: the algorithm needs demonstrations and the environment has no expert.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        bound: BoundAlgorithm,
        source: EnvSource | MixedSource,
        renderer: Renderer,
        policy: Policy,
        habits: Mapping[str, float] | None = None,
    ) -> None:
        self._renderer = renderer
        self._policy = policy
        demonstrations = bound.algorithm.selection.demonstrations
        if demonstrations and not source.has_expert:
            raise ConfigError(
                f"{bound.algorithm.name} joins demonstrations to every group, but "
                f"{source.env_id} has no expert; set algorithm.selection.demonstrations=0"
            )
        rollout = replace(config.rollout, deterministic=config.deterministic)
        seed = config.seed
        factory = self._factory(config, config.temperature)
        self.train = RolloutEngine(source, factory, rollout, seed=seed)
        self.greedy: RolloutEngine | None = None
        self.demos: RolloutEngine | None = None
        if bound.needs_greedy:
            alone = replace(rollout, group_size=1)
            self.greedy = RolloutEngine(source, self._factory(config, 0.0), alone, seed=seed)
        if demonstrations:
            size = replace(rollout, group_size=demonstrations)
            expert = DemoAgent.factory(renderer, habits)
            self.demos = RolloutEngine(source, expert, size, seed=seed)

    def _factory(self, config: TrainConfig, temperature: float) -> AgentFactory:
        sampling = Sampling(temperature=temperature, max_tokens=config.rollout.max_tokens)
        return TokenAgent.factory(self._policy, self._renderer, sampling)

    def use(self, config: TrainConfig) -> None:
        """Sample with these settings from now on; see `TrainConfig.at`."""
        self.train.agent = self._factory(config, config.temperature)
        if self.greedy is not None:
            self.greedy.agent = self._factory(config, 0.0)
        for engine in (self.train, self.greedy, self.demos):
            if engine is not None:
                engine.config = replace(
                    engine.config,
                    max_tokens=config.rollout.max_tokens,
                    max_context=config.rollout.max_context,
                )

    def close(self) -> None:
        """Close all engines. Idempotent."""
        for engine in (self.train, self.greedy, self.demos):
            if engine is not None:
                engine.close()
