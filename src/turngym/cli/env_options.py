"""An environment's own keyword arguments as command-line flags (`--env.level 2`)."""

import dataclasses
import inspect
import typing
from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

import turngym
from turngym.config import suggest
from turngym.errors import ConfigError, EnvNotFoundError

__all__ = ["env_kwargs", "find_spec", "options_of", "take_env_id", "with_env_options"]


def find_spec(env_id: str) -> EnvSpec:
    """Return the registered spec; `Name-v0` is short for `turngym/Name-v0`.

    Raises:
        EnvNotFoundError: nothing is registered under the id; names the nearest.
    """
    turngym.load_plugins()
    known = [name for name, spec in gymnasium.registry.items() if is_turn_env(spec)]
    for name in (env_id, f"turngym/{env_id}"):
        if name in gymnasium.registry:
            return gymnasium.registry[name]
    if ":" in env_id:
        try:
            return gymnasium.spec(env_id)
        except (gymnasium.error.Error, ModuleNotFoundError) as error:
            raise EnvNotFoundError(f"no environment {env_id!r}: {error}") from None
    raise EnvNotFoundError(f"no environment is registered as {env_id!r}{suggest(env_id, known)}")


def is_turn_env(spec: EnvSpec) -> bool:
    """Tell turn environments from the rest of Gymnasium's registry without importing them."""
    return bool(spec.entry_point) and (spec.additional_wrappers or ()) == () and _marked(spec)


def _marked(spec: EnvSpec) -> bool:
    return spec.id in turngym.registered_ids()


def take_env_id(argv: list[str]) -> list[str]:
    """Turn a leading positional environment id into `--env-id`."""
    if argv and not argv[0].startswith(("-", "@")):
        return ["--env-id", argv[0], *argv[1:]]
    return argv


def options_of(spec: EnvSpec) -> Any:
    """Return an instance of a dataclass with the environment's keyword arguments and defaults."""
    creator = spec.entry_point
    if isinstance(creator, str):
        creator = load_env_creator(creator)
    target = creator.__init__ if inspect.isclass(creator) else creator
    hints = typing.get_type_hints(target)
    fields: list[tuple[str, Any, Any]] = []
    for name, parameter in inspect.signature(typing.cast(Any, target)).parameters.items():
        if name in ("self", "render_mode") or parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        default = spec.kwargs.get(name, parameter.default)
        if default is parameter.empty:
            raise ConfigError(f"{spec.id}: keyword argument {name!r} needs a default")
        fields.append((name, hints.get(name, Any), dataclasses.field(default=default)))
    return dataclasses.make_dataclass("Env", fields, frozen=True, kw_only=True)()


def with_env_options(default: Any, options: Any) -> Any:
    """Return a config like `default` that has one more field, `env`, holding the options."""
    kind = dataclasses.make_dataclass(
        type(default).__name__,
        [("env", type(options), dataclasses.field(default=options))],
        bases=(type(default),),
        frozen=True,
        kw_only=True,
    )
    kind.__doc__ = type(default).__doc__
    values = {field.name: getattr(default, field.name) for field in dataclasses.fields(default)}
    return kind(**values)


def env_kwargs(config: Any, spec: EnvSpec) -> Mapping[str, Any]:
    """Return the keyword arguments that differ from the environment's defaults."""
    defaults = options_of(spec)
    chosen = {field.name: getattr(config.env, field.name) for field in dataclasses.fields(config.env)}
    return {k: v for k, v in chosen.items() if v != getattr(defaults, k)}
