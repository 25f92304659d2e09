"""Registering and making environments, in Gymnasium's own registry.

Third-party packages name a module in the entry-point group `turngym.envs`; importing the module
registers their environments. Such plugins are loaded when an id is not known or all ids are asked
for, and one that fails is named and skipped.
"""

import functools
import importlib
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Literal

import gymnasium
from gymnasium.envs.registration import EnvSpec

from turngym.envs.arguments import did_you_mean, refuse_unknown
from turngym.errors import ConfigError, EnvNotFoundError

if TYPE_CHECKING:
    from turngym.envs.core import TurnEnv

__all__ = ["env_ids", "find", "load_plugins", "make", "make_vec", "register"]

logger = logging.getLogger(__name__)

_GROUP = "turngym.envs"
_registered: dict[str, None] = {}

AnyEnv = gymnasium.Env[Any, Any]


def register(
    env_id: str,
    env: "type[TurnEnv] | str",
    *,
    max_turns: int | None = None,
    kwargs: Mapping[str, Any] | None = None,
    nondeterministic: bool = False,
) -> None:
    """Register an environment with Gymnasium.

    Gymnasium's passive checker and order enforcer are left out: `TurnEnv` does the second itself,
    and `turngym.envs.check_env` is stricter than the first.

    Args:
        env_id: `namespace/Name-v0`.
        env: the class, or `"module:Class"` to import it when it is first made.
        max_turns: default of the class's `max_turns`.
        kwargs: further defaults of its constructor, JSON values.
        nondeterministic: the same seed and actions may lead elsewhere.

    Raises:
        ConfigError: the class takes no such argument, or a value is no JSON value.
    """
    defaults = dict(kwargs or {})
    if max_turns is not None:
        defaults["max_turns"] = max_turns
    try:
        json.dumps(defaults)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{env_id}: the arguments of an environment must be JSON values ({error}); name live "
            "objects by strings, see turngym.envs.resources"
        ) from error
    if not isinstance(env, str):
        refuse_unknown(env, defaults)
        env = _importable_name(env) or env
    entry_point: Any = env
    spec = gymnasium.registry.get(env_id)
    if spec is None or (spec.entry_point, spec.kwargs) != (entry_point, defaults):
        gymnasium.register(
            env_id,
            entry_point=entry_point,
            nondeterministic=nondeterministic,
            order_enforce=False,
            disable_env_checker=True,
            kwargs=defaults,
        )
    _registered[env_id] = None


def make(env_id: str, **kwargs: Any) -> AnyEnv:
    """Make an environment, as `gymnasium.make` does, after loading plugins where needed.

    Args:
        env_id: `namespace/Name-v0`, or `module:namespace/Name-v0`.
        kwargs: arguments of the environment.

    Raises:
        EnvNotFoundError: nothing is registered under the id.
        ConfigError: the environment takes no such argument.
    """
    return gymnasium.make(find(env_id), **kwargs)


def make_vec(
    env_id: str,
    num_envs: int = 1,
    *,
    vectorization_mode: Literal["sync", "async"] = "sync",
    autoreset_mode: str = "NextStep",
    wrappers: Sequence[Callable[[AnyEnv], AnyEnv]] = (),
    **kwargs: Any,
) -> "gymnasium.vector.VectorEnv[Any, Any, Any]":
    """Make several copies of an environment that step together.

    Observations are tuples with one dialogue an environment, actions tuples with one message each.
    Infos are object arrays: an abstaining reward stays None, and dictionaries are not merged.

    Args:
        env_id: `namespace/Name-v0`.
        num_envs: number of copies.
        vectorization_mode: `sync` = one after another, `async` = a process each.
        autoreset_mode: `NextStep`, `SameStep` (last observation and info under `final_obs` and
            `final_info`) or `Disabled`.
        wrappers: applied to each copy, innermost first.
        kwargs: arguments of the environment.

    Raises:
        EnvNotFoundError: nothing is registered under the id.
        ConfigError: the environment takes no such argument, or an unknown mode.
    """
    from turngym.envs.vector import build

    return build(
        find(env_id), num_envs, vectorization_mode, autoreset_mode, tuple(wrappers), kwargs
    )


def env_ids() -> list[str]:
    """Return the ids of all turngym environments, those of plugins included, sorted."""
    load_plugins()
    return sorted(_registered)


def find(env_id: str) -> EnvSpec:
    """Return the spec of an id, loading its module or the plugins where needed.

    Raises:
        EnvNotFoundError: nothing is registered under the id; names the closest id and any plugin
            that failed to load.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    failed: Mapping[str, str] = {}
    if name not in gymnasium.registry:
        failed = load_plugins()
    spec = gymnasium.registry.get(name)
    if spec is None:
        hint = did_you_mean(name, [*_registered, *gymnasium.registry])
        broken = "".join(f"; plugin {plugin!r} failed: {why}" for plugin, why in failed.items())
        raise EnvNotFoundError(f"no environment is registered as {name!r}{hint}{broken}")
    return spec


@functools.cache
def load_plugins() -> Mapping[str, str]:
    """Import every module of the entry-point group once.

    Returns:
        Why a plugin could not be loaded, by its name; a broken one stops nobody else.
    """
    failed: dict[str, str] = {}
    for plugin in entry_points(group=_GROUP):
        try:
            plugin.load()
        except Exception as error:
            failed[plugin.name] = f"{type(error).__name__}: {error}"
            logger.warning("environments of %r (%s): %s", plugin.name, plugin.value, error)
    return failed


def _importable_name(env: type) -> str | None:
    """Return `module:Class` when that leads back to the class, so that specs are plain text."""
    module = sys.modules.get(env.__module__)
    if getattr(module, env.__qualname__, None) is env:
        return f"{env.__module__}:{env.__qualname__}"
    return None
