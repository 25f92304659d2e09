"""Environments in message space: authoring, registering, checking, and the built-in ones."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turngym.envs.calls import make_call
    from turngym.envs.checker import check_env
    from turngym.envs.core import TurnEnv
    from turngym.envs.episode import Snapshot
    from turngym.envs.registry import env_ids, make, make_vec, register
    from turngym.envs.spaces import DialogueSpace, MessageSpace, TextSpace
    from turngym.envs.tasks import Draft, TaskSet
    from turngym.envs.tools import Tool, tool
    from turngym.envs.wrappers import RecordEpisode, TextActions, TurnLimit
    from turngym.types import Action, Message, Observation, Task

_HOMES = {
    "Action": "turngym.types",
    "DialogueSpace": "turngym.envs.spaces",
    "Draft": "turngym.envs.tasks",
    "Message": "turngym.types",
    "MessageSpace": "turngym.envs.spaces",
    "Observation": "turngym.types",
    "RecordEpisode": "turngym.envs.wrappers",
    "Snapshot": "turngym.envs.episode",
    "Task": "turngym.types",
    "TaskSet": "turngym.envs.tasks",
    "TextActions": "turngym.envs.wrappers",
    "TextSpace": "turngym.envs.spaces",
    "Tool": "turngym.envs.tools",
    "TurnEnv": "turngym.envs.core",
    "TurnLimit": "turngym.envs.wrappers",
    "check_env": "turngym.envs.checker",
    "env_ids": "turngym.envs.registry",
    "make": "turngym.envs.registry",
    "make_call": "turngym.envs.calls",
    "make_vec": "turngym.envs.registry",
    "register": "turngym.envs.registry",
    "tool": "turngym.envs.tools",
}

__all__ = [
    "Action",
    "DialogueSpace",
    "Draft",
    "Message",
    "MessageSpace",
    "Observation",
    "RecordEpisode",
    "Snapshot",
    "Task",
    "TaskSet",
    "TextActions",
    "TextSpace",
    "Tool",
    "TurnEnv",
    "TurnLimit",
    "check_env",
    "env_ids",
    "make",
    "make_call",
    "make_vec",
    "register",
    "tool",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'turngym.envs' has no attribute {name!r}")
