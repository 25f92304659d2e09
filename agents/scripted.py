"""Policies that need no model: scripts, oracles, chance. Public fakes for tests and benchmarks."""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from turngym.agents.base import ActContext, Completion, Sampling
from turngym.errors import ConfigError
from turngym.types import Action, FinishReason, Message, ToolCall

__all__ = ["OraclePolicy", "RandomPolicy", "ScriptedMessagePolicy", "ScriptedPolicy"]

Line = str | Sequence[int]
"""One completion: token ids, or text for `encode`."""

Script = Sequence[Line] | Callable[[Sequence[int], int, random.Random], Line]
"""The completions of an episode in order, or `(context ids, turn, rng) -> completion`."""

Latency = float | Callable[[int, random.Random], float]
"""Seconds a completion takes, or `(turn, rng) -> seconds`."""


class ScriptedPolicy:
    """Says what a script says, token by token, with made-up log-probabilities.

    Everything it draws comes from the seed of the call, so its trajectories do not depend on what
    else is in flight. A completion longer than `max_tokens` is cut off there (`length`).

    Args:
        script: what to say; a sequence ends with its last line, which is repeated.
        encode: text to token ids, needed when the script holds text.
        latency: how long a completion takes, in seconds.
        max_context: most tokens of a context.
        version: policy version to report.

    Raises:
        ConfigError: an empty script.
    """

    def __init__(
        self,
        script: Script,
        *,
        encode: Callable[[str], Sequence[int]] | None = None,
        latency: Latency = 0.0,
        max_context: int = 1 << 20,
        version: int = 0,
    ) -> None:
        if not callable(script) and not script:
            raise ConfigError("a script needs at least one completion")
        self._script = script
        self._encode = encode
        self._latency = latency
        self._turns: dict[str, int] = {}
        self.max_context = max_context
        self.version = version

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        seed: int,
        version: int | None = None,
        session: str = "",
    ) -> Completion:
        """Return the next completion of the session's script."""
        turn = self._turns.get(session, 0)
        self._turns[session] = turn + 1
        rng = random.Random(seed)
        latency = self._latency(turn, rng) if callable(self._latency) else self._latency
        if latency > 0:
            await asyncio.sleep(latency)
        ids = self._say(prompt_ids, turn, rng)
        finish_reason: FinishReason = "stop" if len(ids) <= sampling.max_tokens else "length"
        ids = ids[: sampling.max_tokens]
        logp = np.log(np.random.default_rng(seed).uniform(0.1, 1.0, len(ids)))
        return Completion(
            ids=np.asarray(ids, np.int32),
            logp=logp.astype(np.float32),
            finish_reason=finish_reason,
            version_spans=((self.version, len(ids)),),
        )

    def release(self, session: str) -> None:
        """Start the session's script afresh."""
        self._turns.pop(session, None)

    def _say(self, prompt_ids: Sequence[int], turn: int, rng: random.Random) -> Sequence[int]:
        if callable(self._script):
            line = self._script(prompt_ids, turn, rng)
        else:
            line = self._script[min(turn, len(self._script) - 1)]
        if not isinstance(line, str):
            return line
        if self._encode is None:
            raise ConfigError("a script of text needs `encode`, a function from text to token ids")
        return self._encode(line)


class ScriptedMessagePolicy:
    """Says what a script says, in messages.

    Args:
        script: the actions of an episode in order, the last one repeated; or
            `(messages, context) -> action`.
    """

    def __init__(
        self,
        script: Sequence[Action] | Callable[[Sequence[Message], ActContext], Action],
    ) -> None:
        if not callable(script) and not script:
            raise ConfigError("a script needs at least one action")
        self._script = script

    async def act(self, messages: Sequence[Message], context: ActContext) -> Action:
        """Return the turn's action."""
        if callable(self._script):
            return self._script(messages, context)
        return self._script[min(context.turn, len(self._script) - 1)]


class OraclePolicy:
    """Does what the environment's own expert does: the upper bound of an evaluation.

    Args:
        habits: probability of each of the expert's bad habits, by name; none by default.
    """

    def __init__(self, habits: Mapping[str, float] | None = None) -> None:
        self._habits = dict(habits or {})

    async def act(self, messages: Sequence[Message], context: ActContext) -> Action:
        """Return the expert's action.

        Raises:
            ConfigError: the environment has no expert.
        """
        if context.demonstrate is None:
            raise ConfigError("the environment has no expert (has_expert is false): no oracle")
        return context.demonstrate(context.rng, self._habits)


class RandomPolicy:
    """Calls random tools with random arguments, and now and then answers: the lower bound.

    Args:
        answer_rate: probability of answering in words instead of calling a tool.
    """

    def __init__(self, answer_rate: float = 0.3) -> None:
        if not 0 <= answer_rate <= 1:
            raise ConfigError(f"answer_rate must lie in [0, 1], got {answer_rate}")
        self._answer_rate = answer_rate

    async def act(self, messages: Sequence[Message], context: ActContext) -> Action:
        """Draw an action."""
        rng = context.rng
        if not context.tools or rng.random() < self._answer_rate:
            return Message(role="assistant", content=f"The answer is {rng.randint(-99, 99)}.")
        function = rng.choice(list(context.tools))["function"]
        call = ToolCall(
            id=f"call_{context.turn}",
            type="function",
            function={
                "name": function["name"],
                "arguments": _draw(function.get("parameters", {"type": "object"}), rng),
            },
        )
        return Message(role="assistant", content="", tool_calls=[call])


def _draw(schema: Mapping[str, Any], rng: random.Random) -> Any:
    """Draw a value that a JSON schema of a tool allows."""
    if "enum" in schema:
        return rng.choice(list(schema["enum"]))
    if options := schema.get("anyOf"):
        return _draw(rng.choice(list(options)), rng)
    match schema.get("type"):
        case "object":
            return {name: _draw(part, rng) for name, part in schema.get("properties", {}).items()}
        case "array":
            return [_draw(schema.get("items", {}), rng) for _ in range(rng.randint(0, 2))]
        case "integer":
            return rng.randint(-99, 99)
        case "number":
            return round(rng.uniform(-99, 99), 2)
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
        case _:
            return "".join(rng.choices("abcdefghij0123456789", k=rng.randint(1, 8)))
