"""The seams of the agent side: policies, renderers, weight sync.

A `Policy` samples tokens and knows nothing of environments. A `MessagePolicy` acts on messages
(oracles, scripts, OpenAI-style servers) and is for evaluation and demonstrations.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from turngym.errors import ConfigError
from turngym.types import Action, FinishReason, Message

__all__ = [
    "ActContext",
    "Completion",
    "MessagePolicy",
    "Policy",
    "Sampling",
    "TrainablePolicy",
    "WeightSync",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 1.0
    """0 = greedy."""

    max_tokens: int = 512
    """Most tokens of one completion."""

    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""

    stop_ids: tuple[int, ...] = ()
    """Sampling ends after one of these (it is part of the completion)."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature must be finite and >= 0, got {self.temperature}")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ConfigError(f"top_k must be 0 (off) or positive, got {self.top_k}")

    @property
    def is_truncated(self) -> bool:
        """top-p or top-k renormalise the log-probabilities: not for training."""
        return self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """What a policy sampled in one turn."""

    ids: NDArray[np.int32]
    """Sampled tokens, the stop token included, (n,)."""

    logp: NDArray[np.float32]
    """Their log-probabilities, temperature applied, (n,)."""

    finish_reason: FinishReason
    version_spans: tuple[tuple[int, int], ...]
    """(policy version, number of tokens) in order; more than one when weights changed in flight."""

    extra: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Further columns with one row a token, for `Trajectory.extra`: `topk_ids` and `topk_logp`, the
    likeliest tokens at each place, most likely first, (n, K) int32 and float32."""


@runtime_checkable
class Policy(Protocol):
    """Tokens in, tokens out."""

    @property
    def max_context(self) -> int:
        """Most tokens a context may hold, completion included."""
        ...

    @property
    def version(self) -> int:
        """Optimizer steps the current sampling weights have seen."""
        ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        seed: int,
        version: int | None = None,
        session: str = "",
    ) -> Completion:
        """Sample one completion.

        Args:
            prompt_ids: every token of the context so far, observations included.
            sampling: how tokens are drawn.
            seed: makes the draw reproducible whatever else is in flight.
            version: policy version the caller expects to be current; None = whatever is.
            session: names the trajectory, so that the engine may keep its KV cache between turns.

        Raises:
            EngineError: the engine failed, or an id is outside the vocabulary.
        """
        ...

    def release(self, session: str) -> None:
        """Forget a session's cache. Unknown names are ignored. Thread-safe, returns at once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ActContext:
    """What a message-level policy may use besides the messages."""

    tools: Sequence[Mapping[str, Any]]
    """JSON schemas of the tools, OpenAI shape."""

    turn: int
    rng: random.Random
    demonstrate: Callable[[random.Random, Mapping[str, float]], Action] | None
    """The environment's own expert, `(rng, habits) -> action`; None when it has none."""


@runtime_checkable
class MessagePolicy(Protocol):
    """Messages in, one assistant message out. Its trajectories carry no sampled tokens."""

    async def act(self, messages: Sequence[Message], context: ActContext) -> Action:
        """Return the next action.

        Args:
            messages: the whole dialogue so far.
            context: tools, turn index, randomness, the environment's expert.
        """
        ...


class WeightSync(Protocol):
    """Brings the trainer's weights to a policy."""

    def push(self, named: Iterable[tuple[str, Any]], *, version: int) -> None:
        """Deliver named tensors as policy version `version`; blocks until they are in use.

        Requests in flight go on: the tokens they sample from then on are of the new weights, their
        context computed anew, and carry the new version.

        Args:
            named: the parameters that train, by their names in the trainer's model (a peft model's
                adapters under peft's names); none at all = the policy shares them already.
            version: optimizer steps these weights have seen.

        Raises:
            WeightSyncError: a name or a shape does not fit, or the engine did not take them.
        """
        ...


class TrainablePolicy(Policy, WeightSync, Protocol):
    """A policy that a trainer samples from and updates."""

    def close(self) -> None:
        """End it; requests in flight fail with `EngineError`. Idempotent."""
        ...
