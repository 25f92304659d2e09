"""The decoding engine: continuous admission, one batched step after another."""

import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turngym.agents.base import Completion
from turngym.agents.decode import Decoder, make_step
from turngym.agents.decode_draw import draw, likeliest, uniforms
from turngym.agents.decode_slots import Request, SlotTable
from turngym.agents.decode_thread import StepThread, fail
from turngym.errors import EngineError
from turngym.types import FinishReason

__all__ = ["Engine"]

_FORCED_INLINE = 4
"""Forced tokens (tool results) up to this many ride along in decode steps; more are prefilled."""

_PREFILL_TOKENS = 4096
"""Tokens after which prefilling lets the others decode a token."""

_PREFILL_CHUNK = {"cpu": 640}
"""Most tokens of one forward pass, by device: activations should stay in a CPU's cache."""

_PREFILL_LENGTH = 512
"""Most tokens of one row in one forward pass."""

_BUCKET_ROWS = 32
"""Rows of a deterministic step: with 32, every elementwise kernel runs whole vectors only, and
matrix products never take the paths for few rows, which round differently."""

_BUCKET_SPAN = 64


class Engine:
    """Runs requests on one thread, started by the first of them, until closed.

    Args:
        decoder: runs tokens.
        max_rows: most requests decoded at once.
        max_context: most tokens of a context.
        cache_bytes: most bytes of keys and values.
        vocab: number of token ids.
        device: where the model is.
        deterministic: make tokens and log-probabilities independent of what else is in flight: one
            token a row and step, steps of one fixed number of rows, and attention over a span that
            depends on the row's own position alone.
        threads: intra-op threads of the decoding thread; None = torch's setting.
        topk: likeliest tokens recorded with each sampled one.
        check_weights: called before every step; what it raises ends what is in flight.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_rows: int,
        max_context: int,
        cache_bytes: int,
        vocab: int,
        device: torch.device,
        deterministic: bool,
        threads: int | None,
        topk: int,
        check_weights: Callable[[], None],
    ) -> None:
        self.version = 0
        self.table = SlotTable(decoder, cache_bytes=cache_bytes, device=device, topk=topk)
        self._topk = topk
        self._decoder = decoder
        self._max_rows = max_rows
        self._max_context = max_context
        self._device = device
        self._chunk = _PREFILL_CHUNK.get(device.type, _PREFILL_TOKENS)
        self._deterministic = deterministic
        self._check_weights = check_weights
        self._stops = np.zeros(vocab, bool)
        """Ids that stop some request: a cheap first test."""
        self.fed_tokens = 0
        """Tokens run through the model, one row each; what a cache or an equal row had is not."""
        self.sampled_tokens = 0
        self._pending: deque[Request] = deque()
        self.thread = StepThread(self._work, self._in_flight, mode=decoder.mode, threads=threads)

    def submit(self, request: Request) -> None:
        """Queue a request; its future resolves when it is done or has failed.

        Raises:
            EngineError: the engine has failed or was closed.
        """
        self.thread.post(lambda: self._pending.append(request), request.future)
        request.future.add_done_callback(
            lambda future: self._cancel(request) if future.cancelled() else None
        )

    def release(self, session: str) -> None:
        """Forget a session's cache."""
        with contextlib.suppress(EngineError):
            self.thread.post(lambda: self.table.forget(session))

    def _cancel(self, request: Request) -> None:
        def drop() -> None:
            if request in self._pending:
                self._pending.remove(request)
            if request in self.table.requests:
                self.table.retire(self.table.requests.index(request))

        with contextlib.suppress(EngineError):
            self.thread.post(drop)

    def _in_flight(self) -> list["Future[Any]"]:
        running = [request for request in self.table.requests if request is not None]
        return [request.future for request in (*running, *self._pending)]

    def _work(self) -> bool:
        try:
            self._check_weights()
        except EngineError as error:
            self._abort(error)
        self._admit()
        if self.table.num_active:
            self._step()
        return bool(self._pending or self.table.num_active)

    def _abort(self, error: EngineError) -> None:
        """Fail everything in flight and stay usable."""
        for slot in np.flatnonzero(self.table.rows["active"]).tolist():
            request = self.table.requests[slot]
            assert request is not None
            self.table.retire(slot)
            fail(request.future, error)
        while self._pending:
            fail(self._pending.popleft().future, error)

    def _admit(self) -> None:
        while self._pending and self.table.num_active < self._max_rows:
            request = self._pending[0]
            try:
                self._make_room(len(request.ids))
                if not request.future.cancelled() and not self.table.admit(request):
                    return
                self._stops[list(request.sampling.stop_ids)] = True
            except EngineError as error:
                fail(request.future, error)
            self._pending.remove(request)

    def _make_room(self, length: int) -> None:
        # One column for the token sampled next, one for filler.
        self._pending.extendleft(self.table.widen(length + 2))

    def _step(self) -> None:
        rows = self.table.rows
        self._make_room(int(rows["known"][rows["active"]].max()))
        if self._deterministic:
            self._step_buckets()
            return
        budget = _PREFILL_TOKENS
        while budget > 0 and (fed := self._prefill()):
            budget -= fed
        count = self.table.num_active
        if not count:
            return
        top = self._top()
        if 4 * count < 3 * top:
            self.table.pack(count, by="active")
            top = self._top()
        slots = np.arange(top)
        self._sample(slots, self._forward(slots, 1, is_prefix=True))

    def _top(self) -> int:
        return int(np.flatnonzero(self.table.rows["active"])[-1]) + 1

    def _prefill(self) -> int:
        """Feed some rows that are far behind what they know; return how many tokens that took.

        Equal contexts are computed once.
        """
        rows = self.table.rows
        behind = np.where(rows["active"], rows["known"] - rows["fed"], 0)
        followers: dict[tuple[int, bytes], list[int]] = {}
        for slot in np.flatnonzero(behind > _FORCED_INLINE):
            context = self.table.tokens[slot, : rows["known"][slot]].tobytes()
            followers.setdefault((int(rows["fed"][slot]), context), []).append(int(slot))
        if not followers:
            return 0
        groups = sorted(followers.values(), key=lambda group: -behind[group[0]])
        length = min(int(behind[groups[0][0]]), _PREFILL_LENGTH)
        groups = groups[: max(1, self._chunk // length)]
        leaders = np.array([group[0] for group in groups])
        hidden = self._forward(leaders, length)
        slots = np.concatenate([np.array(group) for group in groups])
        origin = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        copied = slots != leaders[origin]
        if copied.any():
            fed = rows["fed"][leaders[origin]]
            self.table.copy(leaders[origin][copied], slots[copied], int(fed.max()))
            rows["fed"][slots] = fed
        self._sample(slots, hidden[torch.from_numpy(origin).to(self._device)])
        return len(groups) * length

    def _step_buckets(self) -> None:
        rows = self.table.rows
        active = np.flatnonzero(rows["active"])
        spans = [max(_BUCKET_SPAN, 1 << int(fed).bit_length()) for fed in rows["fed"][active]]
        for span in sorted(set(spans)):
            members = active[np.array(spans) == span]
            for start in range(0, len(members), _BUCKET_ROWS):
                slots = members[start : start + _BUCKET_ROWS]
                self._sample(slots, self._forward(slots, 1, span=span))

    def _forward(
        self,
        slots: NDArray[np.int64],
        length: int,
        *,
        is_prefix: bool = False,
        span: int | None = None,
    ) -> Tensor:
        """Feed up to `length` tokens of each slot; return one hidden state a slot, (B, d)."""
        table = self.table
        real = len(slots)
        if self._deterministic:
            slots = np.concatenate([slots, np.full(_BUCKET_ROWS - real, slots[0])])
        here = table.rows[slots]
        fed = here["fed"]
        counts = np.where(here["active"], np.minimum(here["known"] - fed, length), 0)
        counts[real:] = 0
        columns = np.minimum(fed[:, None] + np.arange(length), table.width - 1)
        step = make_step(
            slots,
            table.tokens[slots[:, None], columns],
            fed,
            counts,
            is_prefix=is_prefix,
            span=span or int(((fed + counts) * (counts > 0)).max()),
            capacity=table.width,
            max_context=self._max_context,
            device=self._device,
        )
        hidden = self._decoder.forward(step)
        table.rows["fed"][slots[:real]] += counts[:real]
        self.fed_tokens += int(counts.sum())
        return hidden

    def _sample(self, slots: NDArray[np.int64], hidden: Tensor) -> None:
        """Draw the next token of every slot whose known tokens are all fed."""
        table = self.table
        here = table.rows[slots]
        ready = np.flatnonzero(here["active"] & (here["fed"] == here["known"]))
        if not len(ready):
            return
        if self._deterministic:
            # Whole buckets, filler too: the number of ready rows must not choose a kernel.
            here = np.concatenate([here, np.repeat(here[:1], _BUCKET_ROWS - len(here))])
        elif len(ready) < len(slots):
            hidden = hidden[torch.from_numpy(ready).to(self._device)]
            slots, here, ready = slots[ready], here[ready], np.arange(len(ready))
        logits = self._decoder.head(hidden)
        drawn, drawn_logp = draw(
            logits,
            uniforms(here["seed"], here["known"] - here["prompt"]),
            here["temperature"],
            here["top_p"],
            here["top_k"],
        )
        tokens, logp = drawn.cpu().numpy()[ready], drawn_logp.cpu().numpy()[ready]
        slots, known = slots[ready], here["known"][ready]
        table.tokens[slots, known] = tokens
        table.logp[slots, known] = logp
        table.version[slots, known] = self.version
        if self._topk:
            ids, best = likeliest(logits, here["temperature"], self._topk)
            table.topk_ids[slots, known] = ids.cpu().numpy()[ready]
            table.topk_logp[slots, known] = best.cpu().numpy()[ready]
        table.rows["known"][slots] = known + 1
        self.sampled_tokens += len(slots)
        done = self._stops[tokens] | (known + 1 >= here["limit"][ready]) | ~np.isfinite(logp)
        for slot in slots[done].tolist():
            self._finish(slot)

    def _finish(self, slot: int) -> None:
        """Hand over a completion, if the last token really ended it."""
        table = self.table
        request = table.requests[slot]
        assert request is not None
        known = int(table.rows["known"][slot])
        own = slice(request.prompt, known)
        is_stop = int(table.tokens[slot, known - 1]) in request.sampling.stop_ids
        if not np.isfinite(table.logp[slot, known - 1]):
            table.retire(slot)
            fail(request.future, EngineError("the model's logits are not finite"))
            return
        if not is_stop and known < request.limit:
            return
        reason: FinishReason = "stop" if is_stop else "length"
        completion = Completion(
            ids=table.tokens[slot, own].astype(np.int32),
            logp=table.logp[slot, own].copy(),
            finish_reason=reason,
            version_spans=_spans(table.version[slot, own]),
            extra={
                "topk_ids": table.topk_ids[slot, own].copy(),
                "topk_logp": table.topk_logp[slot, own].copy(),
            }
            if self._topk
            else {},
        )
        table.retire(slot)
        if request.future.set_running_or_notify_cancel():
            request.future.set_result(completion)


def _spans(versions: NDArray[np.int32]) -> tuple[tuple[int, int], ...]:
    """Return the runs of equal values as (value, length)."""
    first = int(versions[0])
    if (versions == first).all():
        return ((first, len(versions)),)
    starts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist()]
    lengths = np.diff([*starts, len(versions)]).tolist()
    return tuple(zip(versions[starts].tolist(), lengths, strict=True))
