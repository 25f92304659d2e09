"""Which engine samples for a run, and where its weights come from."""

import copy
from pathlib import Path
from typing import Any

from turngym.agents.base import TrainablePolicy
from turngym.agents.hf_policy import HFPolicy
from turngym.errors import ConfigError
from turngym.rl.config import TrainConfig
from turngym.rl.parallel import Ranks

__all__ = ["open_policy"]


def open_policy(
    config: TrainConfig,
    model: Any,
    *,
    source: str | Path,
    ranks: Ranks,
    topk: int = 0,
) -> TrainablePolicy:
    """Open the policy of a run. Push the trainer's weights before its first token.

    In process, it reads the trainer's own weights where rollouts wait for the trainer; where they
    run ahead, it samples from a copy, which changes when weights are pushed and not before.

    Args:
        config: the run.
        model: the trainer's, adapters attached.
        source: folder or hub id of the weights (without adapters) that the run started from.
        ranks: the processes that train together.
        topk: likeliest tokens recorded with each sampled one.

    Raises:
        ConfigError: settings contradict each other.
        EngineError: the engine did not start.
        MissingDependencyError: the engine is not installed.
    """
    if ranks.world > 1 and (config.staleness or config.engine.kind != "hf"):
        raise ConfigError(
            f"staleness={config.staleness} and engine.kind={config.engine.kind!r} need one trainer "
            f"process, this run has {ranks.world}; with several, use staleness=0 and the "
            "in-process engine"
        )
    if config.engine.kind == "hf":
        return HFPolicy(
            _detached(model) if config.staleness else model,
            max_rows=config.rollout.concurrency,
            max_context=config.most_context,
            deterministic=config.deterministic,
            threads=config.threads,
            topk=topk,
        )
    from turngym.agents.vllm_policy import open_vllm

    return open_vllm(
        config.engine,
        model_path=Path(source),
        max_context=config.most_context,
        rows=config.rollout.concurrency,
        lora_rank=config.model.lora_rank,
        lora_alpha=config.model.lora_alpha,
        seed=config.seed,
        deterministic=config.deterministic,
        threads=config.threads,
        topk=topk,
        dtype=config.engine_dtype,
    )


def _detached(model: Any) -> Any:
    """Copy a model to sample from."""
    return copy.deepcopy(model).requires_grad_(False)
