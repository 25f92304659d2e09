"""The seam between `VLLMPolicy` and what samples for it: an engine here, in a child, or servers.

A backend samples requests, gives running ones back when interrupted, and takes weights. Everything
that makes a policy of it (continuation under new weights, checks, versions) is `VLLMPolicy`'s.
`turngym.agents.vllm_fake.FakeBackend` is the public fake.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from turngym.agents.base import Sampling
from turngym.errors import ConfigError, EngineError
from turngym.types import FinishReason

__all__ = ["Backend", "EngineDiedError", "EngineSpec", "Sample", "SampleRequest"]


class EngineDiedError(EngineError):
    """The engine went away with the request; another one will answer the same request alike."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleRequest:
    """One stretch of tokens to sample."""

    ids: Sequence[int]
    """The context so far, at least one token."""

    sampling: Sampling
    """How tokens are drawn; `max_tokens` fits into the context. Only `stop_ids` stop it, never a
    token that the model's files name."""

    seed: int
    """In [0, 2**63)."""

    version: int
    """Policy version of the weights it must be sampled from, which names the cache entries (salt)
    or the adapter."""

    topk: int = 0
    """Likeliest tokens recorded at each place."""

    session: str = ""
    """The trajectory, so that several servers can keep it where its cache is."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """What was sampled for a request."""

    ids: NDArray[np.int32]
    """Tokens, the stop token included, (n,); empty only when interrupted before the first."""

    logp: NDArray[np.float32]
    """Log-probabilities, temperature applied, (n,)."""

    finish_reason: FinishReason
    """`abort` = interrupted: there would have been more."""

    version: int
    """Policy version of the weights it was sampled from, as the engine itself knows it."""

    topk_ids: NDArray[np.int32] | None = None
    """The likeliest tokens at each place, most likely first, (n, K)."""

    topk_logp: NDArray[np.float32] | None = None
    """Their log-probabilities, (n, K)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What an engine is started with, besides `EngineConfig`; see `open_vllm`."""

    model_path: Path
    max_context: int | None = None
    rows: int = 64
    lora_rank: int = 0
    lora_alpha: float | None = None
    seed: int = 0
    deterministic: bool = False
    threads: int | None = None
    topk: int = 0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("max_context", "rows", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        for name in ("lora_rank", "topk"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.deterministic and self.dtype != "float32":
            raise ConfigError(
                f"deterministic sampling needs dtype float32 on a CPU, got {self.dtype}"
            )

    @property
    def alpha(self) -> float:
        """Alpha of the adapters, whose product is scaled by alpha / rank."""
        return 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha


class Backend(Protocol):
    """An engine. Threads of its own resolve what it owes; all methods are thread-safe."""

    @property
    def max_context(self) -> int:
        """Most tokens a context may hold, completion included."""
        ...

    @property
    def vocab(self) -> int:
        """Number of token ids."""
        ...

    @property
    def version(self) -> int:
        """Policy version of the weights in use, as the engine itself knows it; 0 when opened."""
        ...

    def submit(self, request: SampleRequest) -> "Future[Sample]":
        """Queue a request; returns at once. Cancelling the future drops the request.

        The future raises `EngineDiedError` when the engine went away and is being replaced,
        another `EngineError` for everything else that goes wrong.
        """
        ...

    def interrupt(self) -> None:
        """Give back what is running, as samples that end by `abort`. May return before they have.

        Raises:
            EngineError: the engine failed, or did not answer in time.
        """
        ...

    def load(self, named: Sequence[tuple[str, Any]], *, version: int) -> None:
        """Sample from these weights from now on; blocks until in use. Called while nothing runs.

        What is cached of older weights, even of the same version, is never used again.

        Args:
            named: names of the trainer's model and tensors; see `WeightSync.push`.
            version: of these weights.

        Raises:
            WeightSyncError: they do not fit or did not arrive; the old ones are still in use.
            EngineError: the engine failed, or did not answer in time.
        """
        ...

    def release(self, session: str) -> None:
        """Forget a session. Unknown names are ignored. Returns at once."""
        ...

    def close(self) -> None:
        """End it; what is in flight fails with `EngineError`. Idempotent."""
        ...
