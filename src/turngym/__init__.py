"""turngym: the gym in which language-model agents practise turn by turn, and their trainer.

Importing it registers the built-in environments with Gymnasium and loads nothing heavy: the other
public names are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

import turngym.envs.builtin as _builtin  # noqa: F401  registers the environments
from turngym.envs.registry import make, make_vec, register

if TYPE_CHECKING:
    from turngym.envs.checker import check_env
    from turngym.envs.core import TurnEnv
    from turngym.envs.tasks import TaskSet
    from turngym.envs.tools import Tool, tool
    from turngym.envs.wrappers import RecordEpisode, TextActions, TurnLimit
    from turngym.errors import ToolError, TurngymError
    from turngym.rewards.base import EpisodeView, TurnView, reward
    from turngym.types import Action, Message, Observation, Task

__version__ = "0.1.0"

_HOMES = {
    "Action": "turngym.types",
    "EpisodeView": "turngym.rewards.base",
    "Message": "turngym.types",
    "Observation": "turngym.types",
    "RecordEpisode": "turngym.envs.wrappers",
    "Task": "turngym.types",
    "TaskSet": "turngym.envs.tasks",
    "TextActions": "turngym.envs.wrappers",
    "Tool": "turngym.envs.tools",
    "ToolError": "turngym.errors",
    "TurnEnv": "turngym.envs.core",
    "TurnLimit": "turngym.envs.wrappers",
    "TurnView": "turngym.rewards.base",
    "TurngymError": "turngym.errors",
    "check_env": "turngym.envs.checker",
    "reward": "turngym.rewards.base",
    "tool": "turngym.envs.tools",
}

__all__ = [
    "Action",
    "EpisodeView",
    "Message",
    "Observation",
    "RecordEpisode",
    "Task",
    "TaskSet",
    "TextActions",
    "Tool",
    "ToolError",
    "TurnEnv",
    "TurnLimit",
    "TurnView",
    "TurngymError",
    "check_env",
    "make",
    "make_vec",
    "register",
    "reward",
    "tool",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'turngym' has no attribute {name!r}")
