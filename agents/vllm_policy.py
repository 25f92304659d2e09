"""A policy over vLLM: tokens in, tokens out, and live weights.

Nothing here imports vLLM; `open_vllm` loads the backend that the settings ask for.
"""

import asyncio
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.agents.base import Completion, Sampling
from turngym.agents.config import EngineConfig
from turngym.agents.seeds import derive
from turngym.agents.vllm_backend import (
    Backend,
    EngineDiedError,
    EngineSpec,
    Sample,
    SampleRequest,
)
from turngym.errors import ConfigError, EngineError, EngineTimeoutError, WeightSyncError
from turngym.types import FinishReason

__all__ = ["VLLMPolicy", "open_vllm"]


class VLLMPolicy:
    """Samples through a backend; a `Policy` and its own `WeightSync`.

    Weights change in flight: `push` takes back what is running with the tokens it has, brings the
    new weights, and every request goes on with its whole context computed anew. A token's
    log-probability is therefore the trainer's under the version it carries, to the engine's
    precision, and a prefix cached under old weights is never read under new ones.

    Args:
        backend: samples; closed with the policy.
        training: refuse top-p and top-k, which give the log-probabilities of another distribution
            than the one that trains; False = evaluation only, where they are welcome.
        topk: likeliest tokens recorded with each sampled one, in `Completion.extra`; 0 = none.
        retries: times a request is asked again after the engine died with it. The seed is the
            same, and so is the answer.
        timeout_s: most seconds a weight update may take.

    Raises:
        ConfigError: a limit is out of range.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        training: bool = True,
        topk: int = 0,
        retries: int = 1,
        timeout_s: float = 120.0,
    ) -> None:
        if not 0 <= topk <= backend.vocab:
            raise ConfigError(f"topk must lie in 0..{backend.vocab} (the vocabulary), got {topk}")
        if retries < 0:
            raise ConfigError(f"retries must not be negative, got {retries}")
        self._backend = backend
        self._training = training
        self._topk = topk
        self._retries = retries
        self._timeout_s = timeout_s
        self._version = backend.version
        self._pushing = threading.Lock()
        self._lock = threading.RLock()
        """Guards the two below: nothing is submitted once the gate is shut."""
        self._gate: Future[None] | None = None
        """Resolves when admission goes on; None = it is open."""
        self._running: set[Future[Sample]] = set()
        weakref.finalize(self, backend.close)

    @property
    def max_context(self) -> int:
        """Most tokens of a context, completion included."""
        return self._backend.max_context

    @property
    def version(self) -> int:
        """Optimizer steps the current sampling weights have seen."""
        return self._version

    @property
    def backend(self) -> Backend:
        """What samples."""
        return self._backend

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        seed: int,
        version: int | None = None,
        session: str = "",
    ) -> Completion:
        """Sample one completion; see `Policy.generate`.

        A prompt that leaves no room yields an empty completion that ends by `length`. Greedy
        tokens carry their log-probability at temperature 1.

        Raises:
            ConfigError: top-p or top-k in a policy for training.
            EngineError: an id is outside the vocabulary, the prompt is empty, or the engine failed
                or was closed.
            WeightSyncError: the current weights are not of the expected version, or the engine
                sampled from another version than it was asked to.
        """
        context = self._check(prompt_ids, sampling, version)
        budget = min(self.max_context - len(context), sampling.max_tokens)
        parts: list[Sample] = []
        reason: FinishReason = "length"
        count = 0
        while budget > count:
            request = SampleRequest(
                ids=context,
                sampling=replace(sampling, max_tokens=budget - count),
                seed=derive(seed, "go on", count) if count else seed & _SEED_MASK,
                version=-1,
                topk=self._topk,
                session=session,
            )
            part = await self._sample(request)
            count += len(part.ids)
            reason = part.finish_reason
            if len(part.ids):
                parts.append(part)
                context = context + part.ids.tolist()
                if reason == "abort" and int(part.ids[-1]) in sampling.stop_ids:
                    reason = "stop"
            if reason != "abort":
                break
        return _join(parts, "length" if reason == "abort" else reason, self._topk)

    def _check(
        self, prompt_ids: Sequence[int], sampling: Sampling, version: int | None
    ) -> list[int]:
        """Return the prompt as plain integers if it may be sampled from."""
        if sampling.is_truncated and self._training:
            raise ConfigError(
                f"top_p={sampling.top_p}, top_k={sampling.top_k} give log-probabilities of a "
                "truncated distribution, which a learner cannot reproduce; train with top_p=1 and "
                "top_k=0, or open the policy with training=False to evaluate"
            )
        if version is not None and version != self._version:
            raise WeightSyncError(
                f"policy version {version} was asked for, but the engine's weights are version "
                f"{self._version}; push them first"
            )
        ids = np.asarray(prompt_ids, dtype=np.int64)
        self._check_ids(ids)
        self._check_ids(np.asarray(sampling.stop_ids, dtype=np.int64))
        if not len(ids):
            raise EngineError(
                "prompt_ids is empty; a completion needs at least one token before it"
            )
        plain: list[int] = ids.tolist()
        return plain

    def _check_ids(self, ids: NDArray[np.int64]) -> None:
        vocab = self._backend.vocab
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab):
            bad = ids[(ids < 0) | (ids >= vocab)]
            raise EngineError(
                f"token id {int(bad[0])} is outside the model's vocabulary of {vocab}"
            )

    async def _sample(self, request: SampleRequest) -> Sample:
        """Have the backend answer under the current weights, after a death once more."""
        for retry in range(self._retries + 1):
            future, version = await self._submit(request)
            try:
                sample = await asyncio.wrap_future(future)
            except EngineDiedError:
                if retry == self._retries:
                    raise
                continue
            if sample.version != version:
                raise WeightSyncError(
                    f"tokens of policy version {version} were asked for, the engine sampled from "
                    f"version {sample.version}"
                )
            return sample
        raise AssertionError("unreachable: the last retry returns or raises")

    async def _submit(self, request: SampleRequest) -> tuple["Future[Sample]", int]:
        while True:
            with self._lock:
                if (gate := self._gate) is None:
                    version = self._version
                    future = self._backend.submit(replace(request, version=version))
                    self._running.add(future)
                    future.add_done_callback(self._forget)
                    return future, version
            # Shielded: giving up on one request must not open the gate for all.
            await asyncio.shield(asyncio.wrap_future(gate))

    def _forget(self, future: "Future[Sample]") -> None:
        with self._lock:
            self._running.discard(future)

    def release(self, session: str) -> None:
        """Forget a session. Unknown names are ignored. Thread-safe, returns at once."""
        self._backend.release(session)

    def push(self, named: Iterable[tuple[str, Any]], *, version: int) -> None:
        """Bring weights to the engine as version `version`; see `WeightSync.push`.

        Args:
            named: parameters of the trainer's model by name, all of them, or all its adapters.
            version: optimizer steps these weights have seen.

        Raises:
            WeightSyncError: they do not fit or did not arrive (the old ones stay in use), or the
                engine reports another version afterwards.
            EngineTimeoutError: that took longer than `timeout_s`.
        """
        tensors = list(named)
        if not tensors:
            raise WeightSyncError(
                f"no tensors were pushed as version {version}: the engine holds weights of its "
                "own, so pass the trainer's named parameters"
            )
        gate: Future[None] = Future()
        with self._pushing:
            with self._lock:
                self._gate = gate
            try:
                self._drain()
                self._backend.load(tensors, version=version)
                if self._backend.version != version:
                    raise WeightSyncError(
                        f"version {version} was pushed, the engine reports version "
                        f"{self._backend.version}"
                    )
                self._version = version
            finally:
                with self._lock:
                    self._gate = None
                gate.set_result(None)

    def _drain(self) -> None:
        """Take back everything that is running."""
        deadline = time.monotonic() + self._timeout_s
        with self._lock:
            running = set(self._running)
        if not running:
            return
        self._backend.interrupt()
        left = wait(running, timeout=max(0.0, deadline - time.monotonic())).not_done
        if left:
            raise EngineTimeoutError(
                f"{len(left)} of {len(running)} requests were not given back within "
                f"{self._timeout_s:g} s; the weights were not changed"
            )

    def close(self) -> None:
        """End the engine; requests in flight fail with `EngineError`. Idempotent."""
        self._backend.close()

    def __enter__(self) -> "VLLMPolicy":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_SEED_MASK = (1 << 63) - 1


def _join(parts: Sequence[Sample], reason: FinishReason, topk: int) -> Completion:
    """Make one completion of what was sampled under one version after the other."""
    spans: list[tuple[int, int]] = []
    for part in parts:
        if spans and spans[-1][0] == part.version:
            spans[-1] = (part.version, spans[-1][1] + len(part.ids))
        else:
            spans.append((part.version, len(part.ids)))
    extra: dict[str, NDArray[Any]] = {}
    if topk and parts:
        extra["topk_ids"] = np.concatenate([_column(part.topk_ids) for part in parts])
        extra["topk_logp"] = np.concatenate([_column(part.topk_logp) for part in parts])
    return Completion(
        ids=np.concatenate([part.ids for part in parts]) if parts else np.empty(0, np.int32),
        logp=np.concatenate([part.logp for part in parts]) if parts else np.empty(0, np.float32),
        finish_reason=reason,
        version_spans=tuple(spans),
        extra=extra,
    )


def _column(column: NDArray[Any] | None) -> NDArray[Any]:
    if column is None:
        raise EngineError("the likeliest tokens were asked for, the engine gave none")
    return column


def open_vllm(
    engine: EngineConfig,
    *,
    model_path: Path,
    max_context: int | None = None,
    rows: int = 64,
    lora_rank: int = 0,
    lora_alpha: float | None = None,
    seed: int = 0,
    deterministic: bool = False,
    threads: int | None = None,
    topk: int = 0,
    dtype: str = "float32",
    training: bool = True,
) -> VLLMPolicy:
    """Open a policy over the vLLM that the settings ask for; its weights are version 0.

    Args:
        engine: in this process, in a child, or running servers.
        model_path: folder of the model that the engine loads.
        max_context: most tokens of a context; None = what the model was made for.
        rows: most completions decoded at once.
        lora_rank: largest rank of the adapters that will be pushed; 0 = full weights are pushed.
        lora_alpha: the adapters' scale is alpha / rank; None = 2 * rank.
        seed: of the engine; requests carry their own.
        deterministic: bit-equal completions whatever else is in flight; needs float32 on a CPU.
        threads: intra-op threads of the engine; None = vLLM's choice.
        topk: likeliest tokens recorded with each sampled one.
        dtype: of the engine's weights.
        training: refuse truncated sampling; see `VLLMPolicy`.

    Raises:
        MissingDependencyError: vLLM is not installed.
        ConfigError: the installed vLLM or the model will not do; the message says why.
        EngineError: the engine did not start.
    """
    if engine.kind != "vllm":
        raise ConfigError(f"open_vllm opens engine.kind='vllm', got {engine.kind!r}")
    spec = EngineSpec(
        model_path=model_path,
        max_context=max_context,
        rows=rows,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        seed=seed,
        deterministic=deterministic,
        threads=threads,
        topk=topk,
        dtype=dtype,
    )
    backend = _open_backend(engine, spec)
    return VLLMPolicy(backend, training=training, topk=topk, timeout_s=engine.timeout_s)


def _open_backend(engine: EngineConfig, spec: EngineSpec) -> Backend:
    if engine.urls:
        from turngym.agents.vllm_server import ServerBackend

        return ServerBackend(engine, spec)
    if engine.isolated:
        from turngym.agents.vllm_isolated import IsolatedBackend

        return IsolatedBackend(engine, spec)
    from turngym.agents.vllm_engine import InProcessBackend

    return InProcessBackend(engine, spec)
