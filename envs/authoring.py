"""Finds what an author marked on an environment class: tools and rewards."""

import inspect
from collections.abc import Iterator
from typing import Any

from turngym.envs.tools import Tool
from turngym.errors import ConfigError
from turngym.rewards.base import RewardFn, spec_of

__all__ = ["bound_rewards", "bound_tools"]


def _members(cls: type) -> Iterator[str]:
    """Yield names of class attributes, base classes first, in the order they were written."""
    seen: dict[str, None] = {}
    for base in reversed(cls.__mro__):
        seen |= dict.fromkeys(vars(base))
    return iter(seen)


def bound_tools(env: Any) -> Iterator[Tool]:
    """Yield the tools of a class, bound to one environment: those listed, then the methods.

    Raises:
        ConfigError: something listed is no tool, or two tools have one name.
    """
    found: dict[str, Tool] = {}
    methods = [getattr(env, name) for name in _members(type(env)) if _is_tool(env, name)]
    for tool in (*type(env).tools, *methods):
        if not isinstance(tool, Tool):
            raise ConfigError(
                f"{type(env).__name__}.tools holds {tool!r}, which is no tool; mark it with @tool"
            )
        tool = tool.__get__(env)
        if tool.name in found and found[tool.name].fn is not tool.fn:
            raise ConfigError(f"{type(env).__name__}: two tools are called {tool.name!r}")
        found[tool.name] = tool
    return iter(found.values())


def _is_tool(env: object, name: str) -> bool:
    return isinstance(inspect.getattr_static(type(env), name, None), Tool)


def bound_rewards(env: object) -> Iterator[RewardFn]:
    """Yield the reward methods of a class, bound to one environment."""
    for name in _members(type(env)):
        # A method that overrides a reward without marking it is no reward any more.
        if spec_of(inspect.getattr_static(type(env), name, None)) is not None:
            yield getattr(env, name)
