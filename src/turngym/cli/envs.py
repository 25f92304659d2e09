"""`turngym envs`: list environments; `turngym envs ID`: show one."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import gymnasium
import tyro

from turngym.cli.console import out, show_table
from turngym.cli.env_options import find_env, options_of
from turngym.config import parse_flags
from turngym.envs.registry import env_ids, find

__all__ = ["run"]


@dataclass(frozen=True, kw_only=True)
class EnvsConfig:
    """List every registered environment, or show one: arguments, tools, rewards, a first prompt."""

    env_id: Annotated[str, tyro.conf.Positional] = ""
    """Environment to show; none = list all."""


def run(argv: Sequence[str]) -> None:
    """Run the command."""
    config = parse_flags(EnvsConfig(), argv, prog="turngym envs")
    if config.env_id:
        _show(config.env_id)
        return
    rows = []
    for env_id in env_ids():
        env = gymnasium.make(find(env_id))
        rows.append((env_id, _summary(env)))
        env.close()
    show_table(("id", "what it is"), rows)


def _summary(env: "gymnasium.Env[object, object]") -> str:
    lines = (type(env.unwrapped).__doc__ or "").strip().splitlines()
    return lines[0] if lines else ""


def _show(env_id: str) -> None:
    spec = find_env(env_id)
    env = gymnasium.make(spec)
    try:
        out.print(f"{spec.id}: {_summary(env)}", markup=False)
        options = options_of(spec)
        rows = [(f.name, json.dumps(getattr(options, f.name))) for f in dataclasses.fields(options)]
        show_table(("argument", "default"), rows, title="\nArguments (--env.NAME VALUE)")
        specs = env.get_wrapper_attr("reward_specs").values()
        rewards = [(spec.name, spec.weight, spec.level) for spec in specs]
        show_table(("component", "weight", "level"), rewards, title="\nRewards")
        observation, info = env.reset(seed=0)
        functions = [schema["function"] for schema in info["tools"]]
        tools = [
            (f["name"], ", ".join(f["parameters"].get("properties", {})), f.get("description", ""))
            for f in functions
        ]
        if tools:
            show_table(("tool", "arguments", "description"), tools, title="\nTools")
        out.print(f"\nA first prompt (task {info['task_id']})", markup=False)
        for message in observation:
            out.print(f"[{message['role']}] {message['content']}", markup=False)
    finally:
        env.close()
