"""The dialogue of an episode in the making, and its token record: append-only, one row a token."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from turngym.types import Action, FinishReason, Message, Observation

__all__ = ["Dialogue", "SharedPrompts", "TokenRecord", "Tools", "Transcript", "TurnRenderer"]

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of the tools, OpenAI shape."""

Piece = tuple[NDArray[np.int32], NDArray[np.int8]]
"""Token ids and their roles, both (n,)."""


class TurnRenderer(Protocol):
    """What agents need of `turngym.agents.renderer.Renderer`."""

    @property
    def append_only(self) -> bool:
        """A dialogue is rendered by appending; otherwise each turn needs a fresh context."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant turn."""
        ...

    def start(self, messages: Sequence[Message], tools: Tools) -> Piece:
        """Render a whole context, generation prompt included."""
        ...

    def extend(
        self, history: Sequence[Message], new: Sequence[Message], tools: Tools, *, last_id: int
    ) -> Piece:
        """Render the suffix for new messages, from the end of the assistant turn on."""
        ...

    def parse(
        self,
        ids: NDArray[np.int32],
        tools: Tools | None = None,
        *,
        finish_reason: FinishReason | None = None,
    ) -> Action:
        """Read a completion; never raises."""
        ...

    def roles(self, ids: NDArray[np.int32]) -> NDArray[np.int8]:
        """REASONING or ACTION for each token of a completion."""
        ...

    def close_reasoning(self, ids: NDArray[np.int32], text: str) -> NDArray[np.int32] | None:
        """Return the ids of `text` when a completion breaks off while reasoning, else None."""
        ...

    def encode_action(self, action: Message) -> NDArray[np.int32]:
        """Write an action as a completion, stop token included."""
        ...


class _Block(NamedTuple):
    """Consecutive rows of the record."""

    ids: NDArray[np.int32]
    role: NDArray[np.int8]
    turn: int
    segment: int
    logp: NDArray[np.float32] | None
    version_spans: Sequence[tuple[int, int]]
    extra: Mapping[str, NDArray[Any]]


class TokenRecord:
    """Collects token columns in the order the sampler sees and emits them.

    `context` is what the sampler sees next; a new segment starts it afresh while the columns go on
    growing. Nothing is ever removed or re-tokenised.
    """

    def __init__(self) -> None:
        self.context: list[int] = []
        self.segment = -1
        self._blocks: list[_Block] = []
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def start_segment(self) -> None:
        """Begin a new context."""
        self.segment += 1
        self.context = []

    def add(
        self,
        ids: NDArray[np.int32],
        role: NDArray[np.int8],
        *,
        turn: int,
        logp: NDArray[np.float32] | None = None,
        version_spans: Sequence[tuple[int, int]] = (),
        extra: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        """Append tokens.

        Args:
            ids: the tokens, (n,).
            role: `TokenRole` of each, (n,).
            turn: turn they belong to, -1 for the first prompt.
            logp: the sampler's log-probabilities, (n,); None when no policy sampled them.
            version_spans: (policy version, number of tokens) in order; empty when none did.
            extra: further columns by name, (n, ...); tokens without one are 0 there.
        """
        self.context.extend(ids.tolist())
        self._rows += len(ids)
        spans = version_spans or ((-1, len(ids)),)
        self._blocks.append(_Block(ids, role, turn, self.segment, logp, spans, extra or {}))

    def columns(self) -> dict[str, Any]:
        """Return the columns of a `Trajectory`; empty when nothing was recorded."""
        if not self._blocks:
            return {}
        lengths = [len(block.ids) for block in self._blocks]
        spans = np.array([span for block in self._blocks for span in block.version_spans], np.int32)
        logp = np.full(self._rows, np.nan, np.float32)
        start = 0
        for block, length in zip(self._blocks, lengths, strict=True):
            if block.logp is not None:
                logp[start : start + length] = block.logp
            start += length
        return {
            "extra": self._extra(lengths),
            "ids": np.concatenate([block.ids for block in self._blocks], dtype=np.int32),
            "logp": logp,
            "role": np.concatenate([block.role for block in self._blocks], dtype=np.int8),
            "turn": np.repeat(np.array([b.turn for b in self._blocks], np.int16), lengths),
            "version": np.repeat(spans[:, 0], spans[:, 1]),
            "segment": np.repeat(np.array([b.segment for b in self._blocks], np.int16), lengths),
        }

    def _extra(self, lengths: Sequence[int]) -> dict[str, NDArray[Any]]:
        columns: dict[str, NDArray[Any]] = {}
        start = 0
        for block, length in zip(self._blocks, lengths, strict=True):
            for name, part in block.extra.items():
                if name not in columns:
                    columns[name] = np.zeros((self._rows, *part.shape[1:]), part.dtype)
                columns[name][start : start + length] = part
            start += length
        return columns


class Dialogue:
    """The messages and tools of an episode so far, for agents that record no tokens."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.tools: Tools = ()

    def begin(self, prompt: Observation, tools: Tools) -> None:
        """Take the first observation."""
        self.messages, self.tools = list(prompt), tools

    def observe(self, action: Action, observation: Observation, tools: Tools | None) -> None:
        """Take an action and the environment's answer; `tools` only when they changed."""
        self.messages.extend((action, *observation))
        if tools is not None:
            self.tools = tools

    @property
    def has_room(self) -> bool:
        """The next completion may have at least one token."""
        return True

    def columns(self) -> dict[str, Any]:
        """Return the token columns recorded so far."""
        return {}


class SharedPrompts:
    """Renders first contexts once for all who begin with the same messages: a group, mostly.

    Args:
        renderer: messages to tokens.
        size: contexts kept; those used longest ago go first.
    """

    def __init__(self, renderer: TurnRenderer, size: int = 256) -> None:
        self._renderer = renderer
        self._size = size
        self._pieces: dict[str, Piece] = {}

    def start(self, messages: Sequence[Message], tools: Tools) -> Piece:
        """Render a whole context, generation prompt included."""
        key = repr((messages, tools))
        piece = self._pieces.pop(key, None) or self._renderer.start(messages, tools)
        self._pieces[key] = piece
        if len(self._pieces) > self._size:
            del self._pieces[next(iter(self._pieces))]
        return piece


class Transcript:
    """A dialogue with its exact token record.

    An answer of the environment is rendered at once but recorded only when the policy is asked to
    go on from it, so that the record holds what the sampler saw and nothing else.

    Args:
        renderer: messages to tokens.
        prompts: the same for first contexts.
        max_context: most tokens of a context, completion included; None = no limit.
    """

    def __init__(
        self, renderer: TurnRenderer, prompts: SharedPrompts, max_context: int | None
    ) -> None:
        self.record = TokenRecord()
        self._renderer = renderer
        self._prompts = prompts
        self._max_context = max_context
        self.tools: Tools = ()
        self._messages: list[Message] = []
        self._pending: Piece | None = None
        self._is_fresh = False

    def begin(self, prompt: Observation, tools: Tools) -> None:
        """Take the first observation."""
        self._messages, self.tools = list(prompt), tools
        self.record.start_segment()
        self.record.add(*self._prompts.start(self._messages, tools), turn=-1)

    def observe(self, action: Action, observation: Observation, tools: Tools | None) -> None:
        """Take an action and the environment's answer; `tools` only when they changed.

        Tools stand at the head of a context, so new ones need a fresh one, as does a template
        that rewrites history.
        """
        self._messages.append(action)
        self._is_fresh = tools is not None or not self._renderer.append_only
        if tools is not None:
            self.tools = tools
        if self._is_fresh:
            self._pending = self._renderer.start([*self._messages, *observation], self.tools)
        else:
            self._pending = self._renderer.extend(
                self._messages, observation, self.tools, last_id=self.record.context[-1]
            )
        self._messages.extend(observation)

    @property
    def room(self) -> int | None:
        """Tokens the next completion may have; None = no limit."""
        if self._max_context is None:
            return None
        used = 0 if self._is_fresh else len(self.record.context)
        if self._pending is not None:
            used += len(self._pending[0])
        return self._max_context - used

    @property
    def has_room(self) -> bool:
        """The next completion may have at least one token."""
        return self.room is None or self.room > 0

    def flush(self, turn: int) -> None:
        """Record what the sampler is about to see for a turn."""
        if self._pending is None:
            return
        if self._is_fresh:
            self.record.start_segment()
        self.record.add(*self._pending, turn=turn - 1)
        self._pending, self._is_fresh = None, False

    def columns(self) -> dict[str, Any]:
        """Return the token columns recorded so far."""
        return self.record.columns()
