"""A public fake of the vLLM backend: a real model without a cache, and faults on demand."""

import copy
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from turngym.agents.config import EngineConfig
from turngym.agents.decode_draw import draw, likeliest, uniforms
from turngym.agents.decode_thread import StepThread, fail
from turngym.agents.model import attach_lora, load_model, vocab_size
from turngym.agents.vllm_backend import EngineDiedError, EngineSpec, Sample, SampleRequest
from turngym.errors import EngineError, EngineTimeoutError, WeightSyncError
from turngym.types import FinishReason

__all__ = ["FakeBackend", "FakeFaults", "open_fake"]


@dataclass(kw_only=True)
class FakeFaults:
    """What goes wrong; may be changed at any time."""

    skip_sync: bool = False
    """Weights are acknowledged and dropped."""

    skip_names: tuple[str, ...] = ()
    """Weights whose names hold one of these keep their old values, such as `embed_tokens`."""

    stale_version: bool = False
    """Weights are loaded, but requests go on being served under the old version's name."""

    refuse_load: str = ""
    """`load` raises `WeightSyncError` with this text."""

    hang: bool = False
    """Nothing is sampled, given back or loaded until this is over."""

    die_after: int | None = None
    """Steps after which the engine dies, once, with all it was sampling; then it is back."""

    reject: str = ""
    """Requests fail with `EngineError` and this text."""


@dataclass(slots=True, eq=False)
class _Row:
    request: SampleRequest
    future: "Future[Sample]" = field(default_factory=Future)
    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    topk_ids: list[Any] = field(default_factory=list)
    topk_logp: list[Any] = field(default_factory=list)


class FakeBackend:
    """A `Backend` that computes with a copy of a model, so that its log-probabilities are real.

    Every step runs the whole context of each request: fine for tiny models and tests. Draws depend
    on the request's seed alone.

    Args:
        model: a causal LM, or a peft model whose adapters are then what is pushed; copied.
        max_context: most tokens of a context.
        latency_s: seconds a step takes at least.
        timeout_s: most seconds `interrupt` and `load` may take.
        faults: what goes wrong.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_context: int | None = None,
        latency_s: float = 0.0,
        timeout_s: float = 120.0,
        faults: FakeFaults | None = None,
    ) -> None:
        self.model = copy.deepcopy(model).eval()
        self.faults = faults or FakeFaults()
        self.steps = 0
        """Forward passes so far."""
        self.deaths = 0
        config = cast(Any, model).config
        self._max_context = max_context or int(config.max_position_embeddings)
        self._latency_s = latency_s
        self._timeout_s = timeout_s
        self._vocab = vocab_size(model)
        self._version = 0
        self._served = 0
        self._rows: list[_Row] = []
        self._thread = StepThread(
            self._step, lambda: [row.future for row in self._rows], mode=torch.no_grad, threads=1
        )

    @property
    def max_context(self) -> int:
        """Most tokens a context may hold, completion included."""
        return self._max_context

    @property
    def vocab(self) -> int:
        """Number of token ids."""
        return self._vocab

    @property
    def version(self) -> int:
        """Policy version of the weights in use."""
        return self._version

    def submit(self, request: SampleRequest) -> "Future[Sample]":
        """Queue a request; see `Backend.submit`."""
        row = _Row(request)
        self._thread.post(lambda: self._rows.append(row), row.future)
        return row.future

    def interrupt(self) -> None:
        """Give back what is running."""

        def give_back() -> None:
            while self._rows:
                self._finish(self._rows.pop(), "abort")

        self._call(give_back)

    def load(self, named: Sequence[tuple[str, Any]], *, version: int) -> None:
        """Take weights; see `Backend.load`."""
        if self.faults.refuse_load:
            raise WeightSyncError(self.faults.refuse_load)
        own = dict(self.model.named_parameters())
        for name, tensor in named:
            if name not in own or own[name].shape != tensor.shape:
                found = tuple(own[name].shape) if name in own else "no such parameter"
                raise WeightSyncError(
                    f"pushed {name!r} of shape {tuple(tensor.shape)}, the engine's model has "
                    f"{found}"
                )

        def switch() -> None:
            for name, tensor in named:
                if not self.faults.skip_sync and not any(p in name for p in self.faults.skip_names):
                    own[name].copy_(tensor)
            self._version = version
            if not self.faults.stale_version:
                self._served = version

        self._call(switch)

    def _call(self, function: Any) -> None:
        deadline = time.monotonic() + self._timeout_s
        while self.faults.hang:
            if time.monotonic() > deadline:
                raise EngineTimeoutError(f"the engine did not answer within {self._timeout_s:g} s")
            time.sleep(0.005)
        self._thread.call(function)

    def release(self, session: str) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """End it; what is in flight fails."""
        self._thread.close()

    def _step(self) -> bool:
        self._rows = [row for row in self._rows if not row.future.cancelled()]
        if self._latency_s or self.faults.hang:
            time.sleep(self._latency_s or 0.005)
        if self.faults.hang or not self._rows:
            return bool(self._rows)
        if self.faults.reject:
            self._fail_all(EngineError(self.faults.reject))
        elif self.faults.die_after is not None and self.steps >= self.faults.die_after:
            self.faults.die_after = None
            self.deaths += 1
            self._fail_all(EngineDiedError("the fake engine died, as it was told to"))
        else:
            self._advance()
        return bool(self._rows)

    def _fail_all(self, error: EngineError) -> None:
        while self._rows:
            fail(self._rows.pop().future, error)

    def _advance(self) -> None:
        """Sample one token for every row."""
        self.steps += 1
        contexts = [[*row.request.ids, *row.ids] for row in self._rows]
        width = max(map(len, contexts))
        padded = torch.tensor([ids + [0] * (width - len(ids)) for ids in contexts])
        logits = cast(Any, self.model)(input_ids=padded, use_cache=False).logits.float()
        last = logits[torch.arange(len(contexts)), [len(ids) - 1 for ids in contexts]]
        sampling = [row.request.sampling for row in self._rows]
        temperature = np.array([s.temperature for s in sampling], np.float32)
        tokens, logp = draw(
            last,
            uniforms(
                np.array([row.request.seed for row in self._rows], np.uint64),
                np.array([len(row.ids) for row in self._rows]),
            ),
            temperature,
            np.array([s.top_p for s in sampling], np.float32),
            np.array([s.top_k for s in sampling]),
        )
        best_ids, best = likeliest(last, temperature, max(r.request.topk for r in self._rows))
        running = []
        for k, row in enumerate(self._rows):
            row.ids.append(int(tokens[k]))
            row.logp.append(float(logp[k]))
            row.topk_ids.append(best_ids[k, : row.request.topk].numpy())
            row.topk_logp.append(best[k, : row.request.topk].numpy())
            if row.ids[-1] in row.request.sampling.stop_ids:
                self._finish(row, "stop")
            elif len(row.ids) == row.request.sampling.max_tokens:
                self._finish(row, "length")
            else:
                running.append(row)
        self._rows = running

    def _finish(self, row: _Row, reason: FinishReason) -> None:
        count, topk = len(row.ids), row.request.topk
        sample = Sample(
            ids=np.array(row.ids, np.int32),
            logp=np.array(row.logp, np.float32),
            finish_reason=reason,
            version=self._served,
            topk_ids=np.array(row.topk_ids, np.int32).reshape(count, topk),
            topk_logp=np.array(row.topk_logp, np.float32).reshape(count, topk),
        )
        if row.future.set_running_or_notify_cancel():
            row.future.set_result(sample)


def open_fake(engine: EngineConfig, spec: EngineSpec) -> FakeBackend:
    """Make a fake from what a real engine is made from."""
    model, _ = load_model(spec.model_path, dtype=spec.dtype, device="cpu")
    if spec.lora_rank:
        model = attach_lora(model, spec.lora_rank, alpha=spec.alpha)
    return FakeBackend(model, max_context=spec.max_context, timeout_s=engine.timeout_s)
