"""What `eval` and `rollout` share: their settings, and an engine made from them."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from turngym.agents.config import EngineConfig, RolloutConfig
from turngym.cli.env_options import (
    chosen_kwargs,
    find_env,
    flag_value,
    options_of,
    take_env_id,
    with_env_options,
)
from turngym.cli.policies import PolicyOptions, open_policy
from turngym.config import load, read_toml
from turngym.errors import ConfigError

if TYPE_CHECKING:
    from turngym.agents.rollout import RolloutEngine

__all__ = ["FLAGS", "EpisodesConfig", "open_engine", "parse", "task_count"]

FLAGS = {
    "samples_per_task": "--samples",
    "num_tasks": "--tasks",
    "on_rewrite": "--model.on-rewrite",
    "top_p": "--model.top-p",
    "top_k": "--model.top-k",
    "base_url": "--policy openai:URL",
}
"""Names that the library's messages use, and the flags that set them here."""

C = TypeVar("C", bound="EpisodesConfig")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodesConfig:
    """Settings of every command that plays episodes with a policy."""

    env_id: str = "turngym/Calculator-v0"
    """Environment; also the first positional argument."""

    policy: str = ""
    """`oracle`, `random`, a model's folder or hub id, `vllm:URL[,URL]`, or `openai:URL`."""

    tokenizer: str | None = None
    """Folder or hub id of the tokenizer; None = the model's own."""

    split: str = "eval"
    """Which tasks: train, eval or test."""

    tasks: int | None = None
    """How many tasks; None = all of them, at most 1000 where tasks are generated."""

    seed: int = 0
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(group_size=1))
    model: PolicyOptions = field(default_factory=PolicyOptions)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        if self.tasks is not None and self.tasks < 1:
            raise ConfigError(f"--tasks must be at least 1, got {self.tasks}")


def parse(default: C, argv: Sequence[str], *, prog: str) -> tuple[C, dict[str, Any]]:
    """Return a command's configuration and its environment's arguments."""
    argv = take_env_id(argv)
    env_id = flag_value(argv, "--env-id")
    for item in argv:
        if item.startswith("@") and env_id is None:
            env_id = read_toml(item[1:]).get("env_id")
    spec = find_env(env_id or default.env_id)
    full: Any = with_env_options(dataclasses.replace(default, env_id=spec.id), options_of(spec))
    config = load(full, argv, prog=prog)
    return dataclasses.replace(config, env_id=spec.id), dict(chosen_kwargs(config.env, spec))


@contextmanager
def open_engine(
    config: EpisodesConfig, env_kwargs: dict[str, Any], advance: Callable[[int, int], None]
) -> "Iterator[tuple[RolloutEngine, int]]":
    """Yield a rollout engine that plays the configured policy, and how many tasks there are."""
    from turngym.agents.rollout import EnvSource, RolloutEngine

    source = EnvSource(config.env_id, env_kwargs, config.split)
    with (
        open_policy(
            config.policy, config.model, config.rollout, config.engine, tokenizer=config.tokenizer
        ) as factory,
        RolloutEngine(
            source, factory, config.rollout, seed=config.seed, progress=advance
        ) as engine,
    ):
        yield engine, len(source.task_set)


def task_count(config: EpisodesConfig, available: int) -> int:
    """Return how many tasks to play.

    Raises:
        ConfigError: more were asked than there are.
    """
    if config.tasks is None:
        return min(available, 1000)
    if config.tasks > available:
        raise ConfigError(f"--tasks {config.tasks}, but the {config.split} split has {available}")
    return config.tasks
