"""The models of a run: the policy, and beside it a reference and a critic where they are needed."""

import logging
import shutil
from pathlib import Path
from typing import Any

from turngym.agents.model import attach_lora, load_model
from turngym.agents.seeds import derive
from turngym.agents.tiny import WIDE_HEADS, TinyConfig, build_tiny_agent
from turngym.rl.algorithm import BoundAlgorithm
from turngym.rl.checkpoint import Checkpoint, load_weights, saving
from turngym.rl.config import TrainConfig
from turngym.rl.critic import Critic, ValueModel, critic_optim
from turngym.rl.parallel import Ranks
from turngym.rl.reference import AdaptersOff, FrozenCopy, Reference
from turngym.rl.terms import KL

__all__ = ["Models"]

logger = logging.getLogger(__name__)


class Models:
    """Loads and prepares them.

    Args:
        config: the run.
        ranks: the processes that train together.
        checkpoint: to go on from; None = a fresh run.
    """

    def __init__(
        self, config: TrainConfig, ranks: Ranks, checkpoint: Checkpoint | None = None
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._checkpoint = checkpoint
        self.source: str | Path = config.model.path
        """Folder or hub id of the model loaded last."""

    def load(self, *, started: bool = False) -> tuple[Any, Any]:
        """Load a model and its tokenizer.

        Args:
            started: the one that RL starts from; else, before the cold start, the one named.
        """
        config, base = self._config.model, self._config.run / "base"
        path: str | Path = config.path
        if (started or self._checkpoint is not None) and base.exists():
            path = base
        elif path == "tiny":
            path = self._config.run / "tiny"
            if self._ranks.is_main and self._checkpoint is None:
                shutil.rmtree(path, ignore_errors=True)  # left by a start that was refused
                with saving(path):
                    shape = WIDE_HEADS if self._config.engine.kind == "vllm" else TinyConfig()
                    build_tiny_agent(path, shape, seed=self._config.seed)
            self._ranks.wait()
            if self._checkpoint is None and not self._config.sft.steps:
                logger.warning(
                    "model.path='tiny' starts from random weights, and sft.steps=0 leaves out the "
                    "cold start that teaches it to speak: it may never earn a reward; set "
                    "sft.steps=900, or begin with recipes/calculator.toml"
                )
        self.source = path
        device = self._ranks.device or config.device
        return load_model(path, dtype=config.dtype, device=device)

    def attach(self, model: Any) -> Any:
        """Wrap a model with the adapters that the settings ask for."""
        config = self._config.model
        targets: Any = config.lora_targets or "all-linear"
        return attach_lora(
            model,
            config.lora_rank,
            alpha=config.lora_alpha,
            targets=targets,
            seed=derive(self._config.seed, "adapters"),
        )

    def ready(
        self, model: Any, bound: BoundAlgorithm
    ) -> tuple[Any, Reference | None, Critic | None]:
        """Attach adapters, keep a reference and a critic where they are needed.

        The policy's weights are then those of the checkpoint, when there is one.
        """
        config = self._config
        critic: Critic | None = None
        if bound.needs_values:
            value_model = ValueModel.beside(model, config.critic)
            critic = Critic(value_model, critic_optim(config.critic, config.optim), self._ranks)
        reference: Reference | None = None
        kl = bound.algorithm.term(KL)
        mix = 1.0 if kl is None else kl.reset_mix
        if config.model.lora_rank:
            model = self.attach(model)
            reference = AdaptersOff(model, mix=mix)
        elif bound.needs_ref:
            reference = FrozenCopy(model, mix=mix)
        if self._checkpoint is not None:
            load_weights(model, self._checkpoint.folder)
        return model, reference, critic
