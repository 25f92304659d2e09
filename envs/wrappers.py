"""Wrappers of environments: text actions, a turn limit that scores, a record of episodes."""

import importlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, cast

import gymnasium
from gymnasium.utils import RecordConstructorArgs

from turngym.envs.spaces import TextSpace
from turngym.errors import ConfigError, ResetNeededError
from turngym.types import Action, Observation, Rewards, RewardSpec

__all__ = ["RecordEpisode", "TextActions", "TurnLimit", "plain"]

Info = dict[str, Any]
Step = tuple[Observation, Any, bool, bool, Info]
AnyEnv = gymnasium.Env[Any, Any]
MessageEnv = gymnasium.Env[Observation, Action]

_PARSERS = "turngym.agents.parsing"


class TextActions(gymnasium.Wrapper[Observation, str, Observation, Action], RecordConstructorArgs):
    """Act with the text of a model: `env.step("<tool_call>...</tool_call>")`.

    The parser of the dialect belongs to the agents, above this package; it is looked up by name
    when the wrapper is made, so that environments alone never load it.
    """

    def __init__(
        self,
        env: AnyEnv,
        dialect: str = "hermes",
        *,
        parse: Callable[[str], Action] | None = None,
    ) -> None:
        """Wrap an environment.

        Args:
            env: an environment in message space.
            dialect: how the text marks tool calls and reasoning, for example `hermes`.
            parse: turns text into an action; replaces the dialect's parser.

        Raises:
            ConfigError: an unknown dialect.
        """
        RecordConstructorArgs.__init__(self, dialect=dialect, parse=parse)
        gymnasium.Wrapper.__init__(self, env)
        self.action_space = TextSpace()
        self._tools: list[dict[str, Any]] = []
        self._parse = parse or self._dialect_parser(dialect)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start an episode; some dialects need the tools' schemas to read values."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._tools = info.get("tools", [])
        return observation, info

    def step(self, action: str) -> Step:
        """Parse the text and take it as an assistant message."""
        if not isinstance(action, str):
            raise ConfigError(
                f"TextActions takes text, got {type(action).__name__}; "
                "the unwrapped environment takes messages"
            )
        env: AnyEnv = self.env
        result = env.step(self._parse(action))
        self._tools = result[4].get("tools", self._tools)
        return result

    def _dialect_parser(self, dialect: str) -> Callable[[str], Action]:
        parsing = importlib.import_module(_PARSERS)
        parsing.get_dialect(dialect)
        return lambda text: cast(Action, parsing.parse_action(text, dialect, tools=self._tools))


class TurnLimit(gymnasium.Wrapper[Observation, Action, Observation, Action], RecordConstructorArgs):
    """Truncate after a number of actions, and score the outcome then.

    Gymnasium's `TimeLimit` truncates as well, but leaves the outcome to the caller's `finish`.
    """

    def __init__(self, env: MessageEnv, max_turns: int) -> None:
        """Wrap an environment.

        Args:
            env: an environment with `finish`.
            max_turns: most actions of an episode.
        """
        RecordConstructorArgs.__init__(self, max_turns=max_turns)
        gymnasium.Wrapper.__init__(self, env)
        if max_turns < 1:
            raise ConfigError(f"max_turns must be at least 1, got {max_turns}")
        self._max_turns = max_turns
        self._turns = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start an episode and count from 0."""
        self._turns = 0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Action) -> Step:
        """Take an action; end the episode when it was the last one allowed."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._turns += 1
        if terminated or truncated or self._turns < self._max_turns:
            return observation, reward, terminated, truncated, info
        outcome: Rewards = self.get_wrapper_attr("finish")("max_turns")
        specs: Mapping[str, RewardSpec] = self.get_wrapper_attr("reward_specs")
        info = {
            **info,
            "rewards": {**info["rewards"], **outcome},
            "stop_reason": "max_turns",
        }
        gained = sum(specs[n].weight * value for n, value in outcome.items() if value is not None)
        return observation, float(reward) + gained, False, True, info


class RecordEpisode(
    gymnasium.Wrapper[Observation, Action, Observation, Action], RecordConstructorArgs
):
    """Append every finished episode to a JSON Lines file: messages, rewards, stop reason."""

    def __init__(self, env: MessageEnv, path: str) -> None:
        """Wrap an environment.

        Args:
            env: an environment in message space.
            path: the file; folders are made as needed, lines are appended.
        """
        RecordConstructorArgs.__init__(self, path=path)
        gymnasium.Wrapper.__init__(self, env)
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._record: dict[str, Any] | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start an episode; an unfinished one is dropped."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._record = {
            "env_id": self.spec.id if self.spec else None,
            "task_id": info["task_id"],
            "seed": seed,
            "messages": list(observation),
            "turns": [],
        }
        return observation, info

    def step(self, action: Action) -> Step:
        """Take an action; write the episode when it ended."""
        if self._record is None:
            raise ResetNeededError("RecordEpisode: call reset() before step()")
        result = self.env.step(action)
        observation, reward, terminated, truncated, info = result
        self._record["messages"] += [action, *observation]
        self._record["turns"].append({"reward": float(reward), "rewards": info["rewards"]})
        if terminated or truncated:
            self._write({"stop_reason": info.get("stop_reason"), "truncated": truncated})
        return result

    def finish(self, reason: str) -> dict[str, float | None]:
        """End the episode from outside, and write it."""
        outcome = cast(dict[str, float | None], self.env.get_wrapper_attr("finish")(reason))
        if self._record is not None:
            self._write({"stop_reason": reason, "truncated": True, "rewards": outcome})
        return outcome

    def _write(self, end: Mapping[str, Any]) -> None:
        line = json.dumps({**cast(dict[str, Any], self._record), **end}, default=plain)
        self._record = None
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + os.linesep)


def plain(value: Any) -> Any:
    """Return what `json.dumps` should write for an object it does not know."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, (Mapping, set, frozenset)):
        return dict(value) if isinstance(value, Mapping) else sorted(value)
    return repr(value)
