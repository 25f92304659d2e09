"""An environment's own keyword arguments as command-line flags (`--env.level 2`)."""

import dataclasses
import inspect
import typing
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from gymnasium.envs.registration import EnvSpec, load_env_creator

from turngym.envs.registry import find
from turngym.errors import ConfigError, EnvNotFoundError

__all__ = ["chosen_kwargs", "find_env", "options_of", "take_env_id", "with_env_options"]


def find_env(env_id: str) -> EnvSpec:
    """Return the registered spec; `Name-v0` is short for `turngym/Name-v0`.

    Raises:
        EnvNotFoundError: nothing is registered under the id; names the nearest.
    """
    try:
        return find(env_id)
    except EnvNotFoundError as error:
        if "/" not in env_id:
            return find(f"turngym/{env_id}")
        if ":" in env_id:
            raise
        message = f"{error}; an environment of your own is named with its module: module:{env_id}"
        raise EnvNotFoundError(message) from None


def take_env_id(argv: Sequence[str]) -> list[str]:
    """Turn a leading positional environment id into `--env-id ID`.

    >>> take_env_id(["turngym/Lookup-v0", "--seed", "1"])
    ['--env-id', 'turngym/Lookup-v0', '--seed', '1']
    """
    if argv and not argv[0].startswith(("-", "@")):
        return ["--env-id", *argv]
    return list(argv)


def flag_value(argv: Sequence[str], flag: str) -> str | None:
    """Return the value of a flag before the command line is parsed, or None."""
    for position, argument in enumerate(argv):
        if argument == flag and position + 1 < len(argv):
            return argv[position + 1]
        if argument.startswith(f"{flag}="):
            return argument.removeprefix(f"{flag}=")
    return None


def options_of(spec: EnvSpec) -> Any:
    """Return an instance of a dataclass with the environment's keyword arguments and defaults.

    `split` is left out: commands choose it.

    Raises:
        ConfigError: a keyword argument of the environment has no default.
    """
    creator: Any = spec.entry_point
    if isinstance(creator, str):
        creator = load_env_creator(creator)
    target = creator.__init__ if inspect.isclass(creator) else creator
    hints = typing.get_type_hints(target)
    fields: list[tuple[str, Any, Any]] = []
    for name, parameter in inspect.signature(target).parameters.items():
        if name == "split" or parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        default = spec.kwargs.get(name, parameter.default)
        if default is parameter.empty:
            raise ConfigError(f"{spec.id}: keyword argument {name!r} needs a default")
        factory = dataclasses.field(default_factory=partial(_same, default))
        fields.append((name, hints.get(name, Any), factory))
    kind = dataclasses.make_dataclass("Env", fields, frozen=True, kw_only=True)
    kind.__doc__ = f"Arguments of {spec.id}."
    return kind()


def with_env_options(default: Any, options: Any) -> Any:
    """Return a config like `default` that has one more field, `env`, holding the options."""
    kind = dataclasses.make_dataclass(
        type(default).__name__,
        [("env", type(options), dataclasses.field(default_factory=lambda: options))],
        bases=(type(default),),
        frozen=True,
        kw_only=True,
    )
    kind.__doc__ = type(default).__doc__
    return kind(
        **{field.name: getattr(default, field.name) for field in dataclasses.fields(default)}
    )


def chosen_kwargs(options: Any, spec: EnvSpec) -> Mapping[str, Any]:
    """Return the options that differ from what the environment would take anyway."""
    usual = options_of(spec)
    values = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    return {name: value for name, value in values.items() if value != getattr(usual, name)}


def _same(value: Any) -> Any:
    return value
