"""Gymnasium's vector environments over messages: infos stay objects, one an environment."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from turngym.errors import ConfigError

__all__ = ["build"]

AnyEnv = gymnasium.Env[Any, Any]


class _ObjectInfos:
    """Collects infos as they are. Gymnasium's merging would turn a None reward into NaN."""

    num_envs: int

    def _add_info(
        self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int
    ) -> dict[str, Any]:
        for key, value in env_info.items():
            values = vector_infos.setdefault(key, np.full(self.num_envs, None, dtype=object))
            values[env_num] = value
            present = vector_infos.setdefault(f"_{key}", np.zeros(self.num_envs, dtype=np.bool_))
            present[env_num] = True
        return vector_infos


class _SyncVectorEnv(_ObjectInfos, SyncVectorEnv):
    """All environments in this process, one after another."""


class _AsyncVectorEnv(_ObjectInfos, AsyncVectorEnv):
    """One process an environment."""


def build(
    spec: EnvSpec,
    num_envs: int,
    mode: Literal["sync", "async"],
    autoreset: str,
    wrappers: tuple[Callable[[AnyEnv], AnyEnv], ...],
    kwargs: Mapping[str, Any],
) -> VectorEnv[Any, Any, Any]:
    """Make a vector environment; see `turngym.make_vec`."""
    if num_envs < 1:
        raise ConfigError(f"num_envs must be at least 1, got {num_envs}")
    try:
        autoreset_mode = AutoresetMode(autoreset)
    except ValueError as error:
        modes = ", ".join(option.value for option in AutoresetMode)
        raise ConfigError(f"autoreset_mode must be one of {modes}, got {autoreset!r}") from error

    def make_one() -> AnyEnv:
        env: AnyEnv = gymnasium.make(spec, **kwargs)
        for wrapper in wrappers:
            env = wrapper(env)
        return env

    makers = [make_one] * num_envs
    vector: VectorEnv[Any, Any, Any]
    if mode == "sync":
        vector = _SyncVectorEnv(makers, autoreset_mode=autoreset_mode)
    elif mode == "async":
        # Messages are objects of any length: they are pickled, not laid out in shared memory.
        vector = _AsyncVectorEnv(makers, shared_memory=False, autoreset_mode=autoreset_mode)
    else:
        raise ConfigError(f"vectorization_mode must be 'sync' or 'async', got {mode!r}")
    vector.spec = copy.deepcopy(spec)
    vector.spec.kwargs = {**spec.kwargs, **kwargs, "num_envs": num_envs}
    return vector
