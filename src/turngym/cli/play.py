"""`turngym play ID`: take the agent's seat and type its messages, or watch a policy in it."""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium

from turngym.agents.config import EngineConfig, RolloutConfig
from turngym.agents.parsing import get_dialect, parse_action
from turngym.cli.console import out
from turngym.cli.env_options import (
    chosen_kwargs,
    find_env,
    flag_value,
    options_of,
    take_env_id,
    with_env_options,
)
from turngym.cli.episodes import FLAGS
from turngym.cli.policies import PolicyOptions, open_policy
from turngym.config import load
from turngym.errors import ConfigError
from turngym.types import Message, Observation, Trajectory

__all__ = ["FLAGS", "run"]

HELP = """Type what the agent says; a line ends the turn unless a tool call is open.
An empty line or Ctrl-D leaves.
"""


@dataclass(frozen=True, kw_only=True)
class PlayConfig:
    """Play one episode yourself, or let a policy play it."""

    env_id: str = "turngym/Calculator-v0"
    """Environment; also the first positional argument."""

    policy: str = ""
    """Who plays: `oracle`, `random`, a model's folder or hub id, `vllm:URL[,URL]`, `openai:URL`;
    none = you."""

    tokenizer: str | None = None
    """Folder or hub id of the tokenizer; None = the model's own."""

    split: str = "train"
    task: str | None = None
    """Id of the task; none = one drawn by the seed."""

    seed: int = 0
    dialect: str = "hermes"
    """How you write tool calls; for a model's see `model.dialect`."""

    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(group_size=1))
    model: PolicyOptions = field(default_factory=PolicyOptions)
    engine: EngineConfig = field(default_factory=EngineConfig)


def run(argv: Sequence[str]) -> None:
    """Run the command."""
    argv = take_env_id(argv)
    spec = find_env(flag_value(argv, "--env-id") or PlayConfig().env_id)
    default: Any = with_env_options(PlayConfig(), options_of(spec))
    default = dataclasses.replace(default, env_id=spec.id)
    config = load(default, argv, prog="turngym play")
    get_dialect(config.dialect)  # an unknown one is refused now, not at the first action
    kwargs = {"split": config.split, **chosen_kwargs(config.env, spec)}
    if config.policy:
        config = dataclasses.replace(config, env_id=spec.id)
        _watch(config, dict(chosen_kwargs(config.env, spec)))
        return
    if hasattr(config.env, "instructions"):
        kwargs.setdefault("instructions", True)  # a person was not taught by demonstrations
    env = gymnasium.make(spec, **kwargs)
    try:
        options = {"task": config.task} if config.task else None
        observation, info = env.reset(seed=config.seed, options=options)
        out.print(HELP, markup=False, style="dim")
        _play(env, observation, info, config.dialect)
    finally:
        env.close()


def _watch(config: PlayConfig, env_kwargs: dict[str, Any]) -> None:
    """Let a policy play one episode and print it."""
    from turngym.agents.rollout import EnvSource, RolloutEngine

    source = EnvSource(config.env_id, env_kwargs, config.split)
    settings = dataclasses.replace(config.rollout, group_size=1)
    with (
        open_policy(
            config.policy, config.model, settings, config.engine, tokenizer=config.tokenizer
        ) as factory,
        RolloutEngine(source, factory, settings, seed=config.seed) as engine,
    ):
        (group,) = engine.run([_ordinal(source.task_set, config)])
    _print(group.trajectories[0])


def _ordinal(tasks: Any, config: PlayConfig) -> int:
    if config.task is None:
        return config.seed % len(tasks)
    for ordinal in range(len(tasks)):
        if tasks[ordinal].id == config.task:
            return ordinal
    raise ConfigError(f"--task {config.task}: the {config.split} split has no such task")


def _print(trajectory: Trajectory) -> None:
    out.print(f"task {trajectory.task_id}", markup=False)
    _show(trajectory.prompt)
    for turn in trajectory.turns:
        _show_action(turn.message)
        _show(turn.observation)
        if scores := {name: value for name, value in turn.rewards.items() if value is not None}:
            out.print(f"reward {json.dumps(scores)}", markup=False)
    scores = {name: value for name, value in trajectory.rewards.items() if value is not None}
    out.print(f"over: {trajectory.status} {json.dumps(scores)}", markup=False)


def _show_action(message: Message) -> None:
    if reasoning := message.get("reasoning_content"):
        out.print(f"[thinks] {reasoning}", markup=False)
    out.print(f"[assistant] {message['content']}", markup=False)
    for call in message.get("tool_calls", ()):
        function = call["function"]
        out.print(f"[calls] {function['name']} {json.dumps(function['arguments'])}", markup=False)
    for broken in message.get("invalid_tool_calls", ()):
        out.print(f"[calls, unreadable: {broken['error']}] {broken['text']}", markup=False)


def _play(
    env: "gymnasium.Env[Any, Any]",
    observation: Observation,
    info: Mapping[str, Any],
    dialect: str,
) -> None:
    functions = [schema["function"] for schema in info["tools"]]
    out.print(f"task {info['task_id']}", markup=False)
    for function in functions:
        given = ", ".join(f"{name}: {kind}" for name, kind in _parameters(function).items())
        about = function.get("description", "")
        out.print(f"tool {function['name']}({given}): {about}", markup=False)
    if functions and dialect == "hermes":
        arguments = dict.fromkeys(_parameters(functions[0]), "...")
        call = {"name": functions[0]["name"], "arguments": arguments}
        out.print(f"a call: <tool_call>{json.dumps(call)}</tool_call>", markup=False)
    _show(observation)
    over = False
    while not over:
        text = _read()
        if not text:
            out.print("left before the end; nothing was scored")
            return
        action = parse_action(text, dialect)
        observation, reward, terminated, truncated, info = env.step(action)
        _show(observation)
        over = terminated or truncated
        scores = {name: value for name, value in info["rewards"].items() if value is not None}
        if scores or over:
            out.print(f"reward {reward:g} {json.dumps(scores)}", markup=False)
    out.print(f"over: {info['stop_reason']}")


def _parameters(function: Mapping[str, Any]) -> dict[str, str]:
    """Return the types of a tool's arguments, by name."""
    properties = function["parameters"].get("properties", {})
    return {name: str(schema.get("type", "any")) for name, schema in properties.items()}


def _show(observation: Observation) -> None:
    for message in observation:
        out.print(f"[{message['role']}] {message['content']}", markup=False)


def _read() -> str:
    """Read one action: a line, or lines up to the end of an open tool call."""
    lines: list[str] = []
    while True:
        if sys.stdin.isatty():
            out.print("... " if lines else "you> ", end="")
        line = sys.stdin.readline()
        if not line:
            break
        lines.append(line.rstrip("\n"))
        text = "\n".join(lines)
        if text.count("<tool_call>") <= text.count("</tool_call>"):
            break
    return "\n".join(lines).strip()
