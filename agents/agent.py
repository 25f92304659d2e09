"""Who plays an episode: a sampling policy, a message-level policy, or the environment's expert.

An agent is made per episode. Token agents own the record of tokens: what the sampler saw and
emitted, and nothing else.
"""

import itertools
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from turngym.agents.base import ActContext, Completion, MessagePolicy, Policy, Sampling
from turngym.agents.seeds import derive
from turngym.agents.transcript import Dialogue, SharedPrompts, Tools, Transcript, TurnRenderer
from turngym.errors import ConfigError, EngineError
from turngym.types import Action, FinishReason, Message, Observation, Source, Status, TokenRole

__all__ = [
    "Act",
    "Agent",
    "AgentFactory",
    "DemoAgent",
    "Interruption",
    "LimitReachedError",
    "MessageAgent",
    "Seating",
    "TokenAgent",
]

Demonstrate = Callable[[random.Random, Mapping[str, float]], Action]

_SESSIONS = itertools.count()


class LimitReachedError(EngineError):
    """Raised by a message policy whose server ran into a token limit: the episode is truncated.

    Args:
        status: `max_tokens` when the completion was cut off, `context_full` when none fits.
        message: what there is of the completion; never executed.
    """

    def __init__(self, status: Status, message: Action | None = None) -> None:
        super().__init__(f"token limit reached: {status}")
        self.status = status
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """How a turn that only thinks is brought to an answer."""

    after: int
    """Tokens of a turn after which it is interrupted."""

    text: str
    """Put in the policy's mouth; closes the reasoning block."""

    answer_tokens: int
    """Most tokens that follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seating:
    """What an agent is told of the episode it is made for."""

    turn_seed: Callable[[int], int]
    """Seed of each turn's draws."""

    max_tokens: int
    """Most tokens of one completion."""

    max_context: int | None
    """Most tokens of a context; None = what the policy allows."""

    interruption: Interruption | None
    """When to stop a turn that only thinks; None = never."""

    expert: Demonstrate | None
    """The environment's expert, called in place; None when it has none."""

    demonstrate: Callable[[random.Random, Mapping[str, float]], Awaitable[Action]]
    """The same on the environment's thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One action and where its tokens lie in the record."""

    message: Action
    finish_reason: FinishReason = "stop"
    limit: Status | None = None
    """The limit that cut the action off: it is incomplete and must not be executed."""

    start: int = 0
    stop: int = 0


class Memory(Protocol):
    """What an agent remembers of its episode: a `Dialogue` or a `Transcript`."""

    @property
    def has_room(self) -> bool: ...

    def begin(self, prompt: Observation, tools: Tools) -> None: ...

    def observe(self, action: Action, observation: Observation, tools: Tools | None) -> None: ...

    def columns(self) -> dict[str, Any]: ...


class Agent(Protocol):
    """Plays one episode, turn by turn; the episode feeds its memory."""

    @property
    def source(self) -> Source:
        """Who its tokens come from."""
        ...

    @property
    def memory(self) -> Memory:
        """The dialogue so far."""
        ...

    async def act(self, turn: int) -> Act:
        """Choose the next action."""
        ...

    def close(self) -> None:
        """Let go of what the policy keeps for this episode."""
        ...


AgentFactory = Callable[[Seating], Agent]


class TokenAgent:
    """A sampling policy behind a renderer; its record is what the learner trains on."""

    source: Source = "policy"

    def __init__(
        self,
        policy: Policy,
        renderer: TurnRenderer,
        prompts: SharedPrompts,
        sampling: Sampling,
        seating: Seating,
    ) -> None:
        self._policy = policy
        self._renderer = renderer
        self._sampling = sampling
        self._seating = seating
        self._session = f"episode-{next(_SESSIONS)}"
        limits = (policy.max_context, seating.max_context)
        limit = min(limit for limit in limits if limit is not None)
        self.memory = Transcript(renderer, prompts, limit)

    @classmethod
    def factory(
        cls, policy: Policy, renderer: TurnRenderer, sampling: Sampling | None = None
    ) -> AgentFactory:
        """Make the agent factory of an engine.

        Args:
            policy: samples tokens.
            renderer: turns messages into tokens and back.
            sampling: how tokens are drawn; stop ids default to the renderer's. The engine's
                `max_tokens` and the room in the context may lower `max_tokens` further.
        """
        chosen = sampling or Sampling()
        if not chosen.stop_ids:
            chosen = replace(chosen, stop_ids=tuple(renderer.stop_ids))
        prompts = SharedPrompts(renderer)
        return lambda seating: cls(policy, renderer, prompts, chosen, seating)

    async def act(self, turn: int) -> Act:
        """Sample a completion, record it, read it."""
        self.memory.flush(turn)
        start = len(self.memory.record)
        cap = self._cap(min(self._sampling.max_tokens, self._seating.max_tokens))
        interruption = self._seating.interruption
        first = cap if interruption is None else min(cap, interruption.after)
        seed = self._seating.turn_seed(turn)
        completion = await self._sample(turn, first, seed)
        ids = completion.ids
        self._record(turn, completion, self._renderer.roles(ids))
        if interruption is not None and first < cap and completion.finish_reason == "length":
            completion, ids = await self._go_on(turn, ids, cap - first, interruption)
        return Act(
            message=self._renderer.parse(
                ids, self.memory.tools, finish_reason=completion.finish_reason
            ),
            finish_reason=completion.finish_reason,
            limit=self._limit(completion),
            start=start,
            stop=len(self.memory.record),
        )

    async def _go_on(
        self, turn: int, ids: NDArray[np.int32], budget: int, interruption: Interruption
    ) -> tuple[Completion, NDArray[np.int32]]:
        """Sample the rest of a turn whose thinking budget is spent.

        Returns:
            The last completion, and all ids of the turn.
        """
        glue = self._renderer.close_reasoning(ids, interruption.text)
        if glue is not None and self._cap(len(glue) + 1) == len(glue) + 1:
            role = np.full(len(glue), TokenRole.GLUE, np.int8)
            self.memory.record.add(glue, role, turn=turn)
            ids, budget = np.concatenate([ids, glue]), interruption.answer_tokens
        seed = derive(self._seating.turn_seed(turn), "go on")
        completion = await self._sample(turn, self._cap(budget), seed)
        everything = np.concatenate([ids, completion.ids])
        self._record(turn, completion, self._renderer.roles(everything)[len(ids) :])
        return completion, everything

    def _cap(self, wanted: int) -> int:
        room = self.memory.room
        return wanted if room is None else min(wanted, room)

    async def _sample(self, turn: int, cap: int, seed: int) -> Completion:
        completion = await self._policy.generate(
            self.memory.record.context,
            replace(self._sampling, max_tokens=cap),
            seed=seed,
            session=self._session,
        )
        _check_completion(completion, cap)
        return completion

    def _record(self, turn: int, completion: Completion, role: NDArray[np.int8]) -> None:
        self.memory.record.add(
            completion.ids,
            role,
            turn=turn,
            logp=completion.logp,
            version_spans=completion.version_spans,
            extra=completion.extra,
        )

    def _limit(self, completion: Completion) -> Status | None:
        if completion.finish_reason != "length":
            return None
        return "max_tokens" if self.memory.has_room else "context_full"

    def close(self) -> None:
        """Let the policy forget the episode."""
        self._policy.release(self._session)


class DemoAgent:
    """The environment's own expert, recorded as tokens: demonstrations for a cold start.

    The environment is given what the parser reads from the expert's tokens, so that a learner that
    repeats those tokens gets the same answers.
    """

    source: Source = "demo"

    def __init__(
        self,
        renderer: TurnRenderer,
        prompts: SharedPrompts,
        habits: Mapping[str, float],
        seating: Seating,
    ) -> None:
        self._renderer = renderer
        self._habits = habits
        self._seating = seating
        self.memory = Transcript(renderer, prompts, seating.max_context)

    @classmethod
    def factory(
        cls, renderer: TurnRenderer, habits: Mapping[str, float] | None = None
    ) -> AgentFactory:
        """Make the agent factory of an engine.

        Args:
            renderer: turns messages into tokens and back.
            habits: probability of each of the expert's bad habits, by name.
        """
        chosen = dict(habits or {})
        prompts = SharedPrompts(renderer)
        return lambda seating: cls(renderer, prompts, chosen, seating)

    async def act(self, turn: int) -> Act:
        """Ask the expert and record its answer; one that does not fit is not recorded.

        Raises:
            ConfigError: the environment has no expert.
        """
        if self._seating.expert is None:
            raise ConfigError("the environment has no expert (has_expert is false) to demonstrate")
        rng = random.Random(self._seating.turn_seed(turn))
        action = await self._seating.demonstrate(rng, self._habits)
        ids = self._renderer.encode_action(action)
        self.memory.flush(turn)
        record, room = self.memory.record, self.memory.room
        start = len(record)
        if room is not None and len(ids) > room:
            return Act(
                message=action,
                finish_reason="length",
                limit="context_full",
                start=start,
                stop=start,
            )
        record.add(ids, self._renderer.roles(ids), turn=turn)
        message = self._renderer.parse(ids, self.memory.tools)
        return Act(message=message, start=start, stop=len(record))

    def close(self) -> None:
        """Nothing is kept."""


class MessageAgent:
    """A message-level policy: for evaluation and demonstrations; records no tokens."""

    source: Source = "policy"

    def __init__(self, policy: MessagePolicy, seating: Seating) -> None:
        self._policy = policy
        self._seating = seating
        self.memory = Dialogue()

    @classmethod
    def factory(cls, policy: MessagePolicy) -> AgentFactory:
        """Make the agent factory of an engine."""
        return lambda seating: cls(policy, seating)

    async def act(self, turn: int) -> Act:
        """Ask the policy for a message."""
        context = ActContext(
            tools=self.memory.tools,
            turn=turn,
            rng=random.Random(self._seating.turn_seed(turn)),
            demonstrate=self._seating.expert,
        )
        try:
            return Act(message=await self._policy.act(tuple(self.memory.messages), context))
        except LimitReachedError as limit:
            message = limit.message or Message(role="assistant", content="")
            return Act(message=message, finish_reason="length", limit=limit.status)

    def close(self) -> None:
        """Nothing is kept."""


def _check_completion(completion: Completion, cap: int) -> None:
    count = len(completion.ids)
    if completion.finish_reason == "abort":
        raise EngineError(f"the policy aborted the completion after {count} tokens")
    if not 1 <= count <= cap:
        raise EngineError(f"a completion must have 1 to {cap} tokens, the policy gave {count}")
    spans = sum(span for _, span in completion.version_spans)
    if len(completion.logp) != count or spans != count:
        raise EngineError(
            f"the policy gave {count} tokens with {len(completion.logp)} log-probabilities and "
            f"versions for {spans}; each token needs one of both"
        )
