"""Learning: algorithms as values, the learner, the training loop.

    from turngym.rl import TrainConfig, train
    train(TrainConfig(env_id="my/Letters-v0", run=Path("runs/letters")))

Everything is imported on first use; configurations and algorithms need no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turngym.rl.algorithm import Algorithm
    from turngym.rl.config import (
        EvalSchedule,
        ModelConfig,
        OptimConfig,
        SftConfig,
        TrainConfig,
    )
    from turngym.rl.presets import PRESETS, preset
    from turngym.rl.session import TrainSession, train

__all__ = [
    "PRESETS",
    "Algorithm",
    "EvalSchedule",
    "ModelConfig",
    "OptimConfig",
    "SftConfig",
    "TrainConfig",
    "TrainSession",
    "preset",
    "train",
]

_HOMES = {
    "Algorithm": "algorithm",
    "EvalSchedule": "config",
    "ModelConfig": "config",
    "OptimConfig": "config",
    "PRESETS": "presets",
    "SftConfig": "config",
    "TrainConfig": "config",
    "TrainSession": "session",
    "preset": "presets",
    "train": "session",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
