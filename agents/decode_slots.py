"""The slots of a decoder: which request or idle session lives where, and who has to go."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turngym.agents.base import Completion, Sampling
from turngym.agents.decode import Decoder
from turngym.errors import EngineError

__all__ = ["Request", "SlotTable"]

_MIN_WIDTH = 64

_ROW = np.dtype(
    [
        ("held", "?"),  # a request runs here, or a session waits here between turns
        ("active", "?"),
        ("fed", "i8"),  # tokens whose keys and values are in the buffers
        ("known", "i8"),  # tokens of the context so far
        ("prompt", "i8"),
        ("limit", "i8"),
        ("used", "i8"),  # clock of the last admission
        ("seed", "u8"),
        ("temperature", "f4"),
        ("top_p", "f4"),
        ("top_k", "i8"),
    ],
    align=True,  # torch takes views of fields only at whole strides
)


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One completion being sampled."""

    ids: NDArray[np.int64]
    """The prompt; after a preemption also what was sampled so far."""

    sampling: Sampling
    seed: int
    session: str
    limit: int
    """Length of the context at which sampling stops."""

    prompt: int
    """Length of the prompt."""

    future: "Future[Completion]" = field(default_factory=Future)
    logp: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    version: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    topk: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None
    """Likeliest tokens at the places sampled so far and their log-probabilities, (n, K) each."""


class SlotTable:
    """Slots, grown on demand up to a memory cap.

    Args:
        decoder: whose buffers the slots are.
        cache_bytes: most bytes of keys and values; one slot is always allowed.
        topk: likeliest tokens recorded at each place.
    """

    def __init__(
        self, decoder: Decoder, *, cache_bytes: int, device: torch.device, topk: int = 0
    ) -> None:
        self._decoder = decoder
        self._cache_bytes = cache_bytes
        self._device = device
        self.num_evicted = 0
        self.num_preempted = 0
        self._clock = 0
        self.width = _MIN_WIDTH
        """Columns of a slot, the decoder's filler column included."""
        self.rows = np.zeros(0, _ROW)
        self.tokens = np.zeros((0, self.width), np.int64)
        self.logp = np.zeros((0, self.width), np.float32)
        self.version = np.zeros((0, self.width), np.int32)
        self.topk_ids = np.zeros((0, self.width, topk), np.int32)
        self.topk_logp = np.zeros((0, self.width, topk), np.float32)
        self.requests: list[Request | None] = []
        self._names: list[str] = []
        self._sessions: dict[str, int] = {}

    @property
    def num_active(self) -> int:
        """Requests being decoded."""
        return int(self.rows["active"].sum())

    @property
    def num_held(self) -> int:
        """Slots in use, idle sessions included."""
        return int(self.rows["held"].sum())

    def admit(self, request: Request) -> bool:
        """Give a request a slot, its session's own where it still has one.

        Returns:
            False when all memory is taken by requests that are being decoded.

        Raises:
            EngineError: the session is already sampling.
        """
        slot = self._sessions.get(request.session)
        if slot is None:
            slot = self._take_slot()
            if slot is None:
                return False
        elif self.rows["active"][slot]:
            raise EngineError(
                f"session {request.session!r} is already sampling; one completion at a time"
            )
        count = len(request.ids)
        cached = self.tokens[slot, : min(int(self.rows["fed"][slot]), count - 1)]
        differs = np.flatnonzero(cached != request.ids[: len(cached)])
        fed = int(differs[0]) if len(differs) else len(cached)
        self.tokens[slot, :count] = request.ids
        self.logp[slot, request.prompt : count] = request.logp
        self.version[slot, request.prompt : count] = request.version
        if request.topk is not None:
            sampled = slice(request.prompt, count)
            self.topk_ids[slot, sampled], self.topk_logp[slot, sampled] = request.topk
        self._clock += 1
        sampling = request.sampling
        # In the order of _ROW's fields.
        self.rows[slot] = (
            True,
            True,
            fed,
            count,
            request.prompt,
            request.limit,
            self._clock,
            request.seed & (2**64 - 1),
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
        )
        self.requests[slot] = request
        if request.session:
            self._names[slot] = request.session
            self._sessions[request.session] = slot
        return True

    def retire(self, slot: int) -> None:
        """End a slot's request; its session, if it has one, keeps the cache."""
        self.rows["active"][slot] = False
        self.requests[slot] = None
        if not self._names[slot]:
            self.rows[slot] = np.zeros((), _ROW)

    def forget(self, session: str) -> None:
        """Free a session's slot, now or when its request ends; unknown names are ignored."""
        slot = self._sessions.pop(session, None)
        if slot is not None:
            self._names[slot] = ""
            if not self.rows["active"][slot]:
                self.rows[slot] = np.zeros((), _ROW)

    def invalidate(self) -> None:
        """Drop all keys and values: idle sessions go, running requests start over."""
        for session, slot in list(self._sessions.items()):
            if not self.rows["active"][slot]:
                self.forget(session)
        self.rows["fed"] = 0

    def widen(self, width: int) -> list[Request]:
        """Make every slot at least `width` columns wide.

        Returns:
            Requests that had to give up their slot for it, youngest first, to be admitted again.
        """
        if width <= self.width:
            return []
        width = 1 << (width - 1).bit_length()
        most = self._most_slots(width)
        preempted = []
        while self.num_held > most:
            if not self._evict_idle():
                slot = int(np.where(self.rows["active"], self.rows["used"], -1).argmax())
                preempted.append(self._preempt(slot))
        self.pack(int(self.rows["held"].sum()), by="held")
        self._resize(min(len(self.rows), most), width)
        return preempted

    def pack(self, count: int, *, by: str) -> None:
        """Move the slots with a flag (`active` or `held`) into the first `count` ones."""
        flag = self.rows[by]
        holes = np.flatnonzero(~flag[:count])
        movers = count + np.flatnonzero(flag[count:])
        if not len(movers):
            return
        holes = holes[: len(movers)]
        source, target = np.concatenate([movers, holes]), np.concatenate([holes, movers])
        self.copy(source, target, int(self.rows["fed"][source].max()))
        for array in (self.rows, *self._columns()):
            array[target] = array[source]
        for a, b in zip(holes.tolist(), movers.tolist(), strict=True):
            self.requests[a], self.requests[b] = self.requests[b], self.requests[a]
            self._names[a], self._names[b] = self._names[b], self._names[a]
            for slot in (a, b):
                if self._names[slot]:
                    self._sessions[self._names[slot]] = slot

    def _columns(self) -> tuple[NDArray[Any], ...]:
        """Arrays with one entry a slot and column, (slots, width, ...) each."""
        return self.tokens, self.logp, self.version, self.topk_ids, self.topk_logp

    def copy(self, source: NDArray[np.int64], target: NDArray[np.int64], length: int) -> None:
        """Copy keys and values between slots."""
        self._decoder.move(self._tensor(source), self._tensor(target), length)

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _most_slots(self, width: int) -> int:
        return max(1, self._cache_bytes // (width * max(1, self._decoder.token_bytes)))

    def _take_slot(self) -> int | None:
        free = np.flatnonzero(~self.rows["held"])
        if not len(free):
            count = len(self.rows)
            most = self._most_slots(self.width)
            if count < most:
                self._resize(min(most, max(8, 2 * count)), self.width)
            elif not self._evict_idle():
                return None
            free = np.flatnonzero(~self.rows["held"])
        return int(free[0])

    def _evict_idle(self) -> bool:
        """Free the slot of the session that has been idle longest; False when none is idle."""
        idle = self.rows["held"] & ~self.rows["active"]
        if not idle.any():
            return False
        oldest = int(np.where(idle, self.rows["used"], np.iinfo(np.int64).max).argmin())
        self.forget(self._names[oldest])
        self.num_evicted += 1
        return True

    def _preempt(self, slot: int) -> Request:
        request = self.requests[slot]
        assert request is not None
        known = int(self.rows["known"][slot])
        request.ids = self.tokens[slot, :known].copy()
        request.logp = self.logp[slot, request.prompt : known].copy()
        request.version = self.version[slot, request.prompt : known].copy()
        if self.topk_ids.shape[2]:
            sampled = (slot, slice(request.prompt, known))
            request.topk = (self.topk_ids[sampled].copy(), self.topk_logp[sampled].copy())
        self.retire(slot)
        self.forget(request.session)
        self.num_preempted += 1
        return request

    def _resize(self, slots: int, width: int) -> None:
        self._decoder.reserve(slots, width)
        kept, columns = min(slots, len(self.rows)), min(width, self.width)

        def grown(old: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
            new = np.zeros((*shape, *old.shape[len(shape) :]), old.dtype)
            area = (slice(kept), slice(columns))[: len(shape)]
            new[area] = old[area]
            return new

        self.rows = grown(self.rows, (slots,))
        self.tokens, self.logp, self.version, self.topk_ids, self.topk_logp = (
            grown(old, (slots, width)) for old in self._columns()
        )
        self.requests = (self.requests + [None] * slots)[:slots]
        self._names = (self._names + [""] * slots)[:slots]
        self.width = width
