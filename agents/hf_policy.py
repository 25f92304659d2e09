"""The in-process policy: a transformers model that shares its weights with the learner."""

import asyncio
import contextlib
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from turngym.agents.base import Completion, Sampling
from turngym.agents.decode_engine import Engine
from turngym.agents.decode_select import select_decoder
from turngym.agents.decode_slots import Request
from turngym.agents.model import vocab_size
from turngym.errors import ConfigError, EngineError, WeightSyncError

__all__ = ["HFPolicy"]


class HFPolicy:
    """Continuous batching over a model in this process; a `Policy` and its own `WeightSync`.

    Requests join and leave between decoding steps, rows at different turns share a step, and a
    session keeps its keys and values between turns: only what was added to the context is
    computed. Prompts that do not extend what is cached lose what differs, nothing else. Equal
    prompts that arrive together are computed once.

    The weights are the model's own, read in place: update them between `collect` calls (or under
    `paused()`), then call `set_version`. Sampling with weights that changed without it raises.

    Args:
        model: a causal LM or a peft model around one; not copied.
        max_rows: most completions decoded at once.
        max_context: most tokens of a context; None = what the model was made for.
        cache_mb: most memory for keys and values; idle sessions lose theirs, longest idle first.
        deterministic: bit-equal completions whatever else is in flight; needs fp32 weights on a
            CPU, and uses one thread.
        fast: allow the functional decoder (Llama, Mistral, Qwen2, Qwen3); the others take the
            model's own modules. The choice is checked against the model at construction.
        threads: intra-op threads of the decoding thread. Small models run fastest with 1. torch
            keeps the setting per thread, but threads started later inherit it.
        topk: likeliest tokens recorded with each sampled one, in `Completion.extra`; 0 = none.

    Raises:
        ConfigError: a limit is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_rows: int = 128,
        max_context: int | None = None,
        cache_mb: int = 4096,
        deterministic: bool = False,
        fast: bool = True,
        threads: int | None = None,
        topk: int = 0,
    ) -> None:
        for name, value in (("max_rows", max_rows), ("cache_mb", cache_mb)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if threads is not None and threads < 1:
            raise ConfigError(f"threads must be at least 1, or None for torch's own, got {threads}")
        weight = cast(Any, model).get_input_embeddings().weight
        if deterministic and (weight.device.type, weight.dtype) != ("cpu", torch.float32):
            raise ConfigError(
                "deterministic sampling needs float32 weights on a CPU, got "
                f"{weight.dtype} on {weight.device}"
            )
        self._max_context = _context_limit(model, max_context)
        self._vocab = vocab_size(model)
        if not 0 <= topk <= self._vocab:
            raise ConfigError(f"topk must lie in 0..{self._vocab} (the vocabulary), got {topk}")
        self._model = model
        self._decoder = select_decoder(model, self._max_context, fast=fast)
        self._weights = _Weights(model)
        self._engine = Engine(
            self._decoder,
            max_rows=max_rows,
            max_context=self._max_context,
            cache_bytes=cache_mb << 20,
            vocab=self._vocab,
            device=weight.device,
            deterministic=deterministic,
            threads=1 if deterministic else threads,
            topk=topk,
            check_weights=self._weights.check,
        )
        weakref.finalize(self, self._engine.thread.close)

    @property
    def max_context(self) -> int:
        """Most tokens of a context, completion included."""
        return self._max_context

    @property
    def version(self) -> int:
        """Optimizer steps the current sampling weights have seen."""
        return self._engine.version

    @property
    def stats(self) -> dict[str, int]:
        """Counts since construction.

        `fed_tokens` run through the model (cached and shared ones are not), `sampled_tokens`,
        `evicted_sessions` that lost their cache to the memory cap, `preempted_requests` that had to
        start over for it, and `cached_sessions` now.
        """
        table = self._engine.table
        return {
            "fed_tokens": self._engine.fed_tokens,
            "sampled_tokens": self._engine.sampled_tokens,
            "evicted_sessions": table.num_evicted,
            "preempted_requests": table.num_preempted,
            "cached_sessions": table.num_held,
        }

    @property
    def decoder_name(self) -> str:
        """Which decoder the model got: `FastDecoder`, `GenericDecoder` or `RecomputeDecoder`."""
        return type(self._decoder).__name__

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
        tokens carry their log-probability at temperature 1; with top_p or top_k, log-probabilities
        are renormalised over what is kept (not for training).

        Raises:
            EngineError: an id is outside the vocabulary, the prompt is empty, the session is
                already sampling, or the engine failed or was closed.
            WeightSyncError: the current weights are not of the expected version, or they changed
                without `set_version`.
        """
        if version is not None and version != self.version:
            raise WeightSyncError(
                f"policy version {version} was asked for, but the sampling weights are version "
                f"{self.version}; call set_version after each update"
            )
        ids = np.asarray(prompt_ids, dtype=np.int64)
        self._check_ids(ids)
        if sampling.stop_ids:
            self._check_ids(np.asarray(sampling.stop_ids, dtype=np.int64))
        if not len(ids):
            raise EngineError(
                "prompt_ids is empty; a completion needs at least one token before it"
            )
        limit = min(self._max_context, len(ids) + sampling.max_tokens)
        if limit <= len(ids):
            return Completion(
                ids=np.empty(0, np.int32),
                logp=np.empty(0, np.float32),
                finish_reason="length",
                version_spans=(),
            )
        request = Request(
            ids=ids, sampling=sampling, seed=seed, session=session, limit=limit, prompt=len(ids)
        )
        self._engine.submit(request)
        return await asyncio.wrap_future(request.future)

    def _check_ids(self, ids: NDArray[np.int64]) -> None:
        if len(ids) and (ids.min() < 0 or ids.max() >= self._vocab):
            bad = ids[(ids < 0) | (ids >= self._vocab)]
            raise EngineError(
                f"token id {int(bad[0])} is outside the model's vocabulary of {self._vocab}"
            )

    def release(self, session: str) -> None:
        """Forget a session's cache. Unknown names are ignored. Thread-safe, returns at once."""
        self._engine.release(session)

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Hold sampling between two steps, so that weights can change under requests in flight."""
        return self._engine.thread.parked()

    def set_version(self, version: int) -> None:
        """Take up the model's current weights as policy version `version`; blocks until in use.

        Caches of the old weights are dropped. Requests in flight go on: their context is computed
        anew and the tokens they sample from here on carry the new version.
        """

        def switch() -> None:
            self._decoder.refresh()
            self._weights.accept()
            self._engine.table.invalidate()
            self._engine.version = version

        self._engine.thread.call(switch)

    def push(self, named: Iterable[tuple[str, Any]], *, version: int) -> None:
        """Bring weights to the policy's model, in place, as version `version`.

        Args:
            named: parameter names and tensors; those that are the model's own memory cost nothing,
                and none at all means that the model already holds the new weights.
            version: optimizer steps these weights have seen.

        Raises:
            WeightSyncError: a name or a shape is not the model's.
        """
        own = dict(self._model.named_parameters())
        with self.paused(), torch.no_grad():
            for name, tensor in named:
                if name not in own or own[name].shape != tensor.shape:
                    found = tuple(own[name].shape) if name in own else "no such parameter"
                    raise WeightSyncError(
                        f"pushed {name!r} of shape {tuple(tensor.shape)}, the policy's model has "
                        f"{found}"
                    )
                if own[name].data_ptr() != tensor.data_ptr():
                    own[name].copy_(tensor)
            self.set_version(version)

    def close(self) -> None:
        """End the decoding thread; requests in flight fail with `EngineError`."""
        self._engine.thread.close()

    def __enter__(self) -> "HFPolicy":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Weights:
    """Notices weights that change without the policy being told."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self.accept()

    def _stamp(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]

    def accept(self) -> None:
        self._seen = self._stamp()

    def check(self) -> None:
        if self._stamp() != self._seen:
            raise WeightSyncError(
                "the model's weights changed since the last set_version; call "
                "policy.set_version(step) after every update, so that caches and versions are true"
            )


def _context_limit(model: nn.Module, wanted: int | None) -> int:
    config = cast(Any, model).config
    config = getattr(config, "get_text_config", lambda: config)()
    most = getattr(config, "max_position_embeddings", None)
    if wanted is None and most is None:
        raise ConfigError(
            f"{type(model).__name__} does not say how long a context may be; pass max_context"
        )
    limit = int(cast(int, most) if wanted is None else wanted)
    if limit < 2 or (most is not None and limit > most):
        raise ConfigError(f"max_context must lie in 2..{most} (the model's positions), got {limit}")
    return limit
