"""A renderer without a tokenizer: one token a byte. For tests, benchmarks and dry runs."""

import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from turngym.agents.parsing import parse, to_message
from turngym.agents.transcript import Piece, Tools
from turngym.types import Action, FinishReason, Message, TokenRole

__all__ = ["PlainRenderer"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class PlainRenderer:
    """Writes messages as bytes between control tokens, tool calls in the Hermes dialect.

    Ids 0 to 255 are bytes of UTF-8, `END` closes every message, and one id a role opens it; text
    from outside can therefore never become a control token.

    Args:
        append_only: False makes every turn start a fresh context, as templates do that rewrite
            history.
    """

    END = 256
    ROLES = {"system": 257, "user": 258, "assistant": 259, "tool": 260}  # noqa: RUF012
    vocab_size = 261

    def __init__(self, *, append_only: bool = True) -> None:
        self.append_only = append_only
        self.stop_ids = (self.END,)

    def start(self, messages: Sequence[Message], tools: Tools) -> Piece:
        """Render a whole context: tools, messages, generation prompt."""
        ids = [self.ROLES["system"], *json.dumps(list(tools)).encode(), self.END] if tools else []
        for message in messages:
            ids += self._message(message)
        ids.append(self.ROLES["assistant"])
        return np.array(ids, np.int32), np.full(len(ids), TokenRole.PROMPT, np.int8)

    def extend(
        self, history: Sequence[Message], new: Sequence[Message], tools: Tools, *, last_id: int
    ) -> Piece:
        """Render the suffix for new messages; an unfinished assistant turn is closed first."""
        ids = [] if last_id == self.END else [self.END]
        roles = [TokenRole.GLUE] * len(ids)
        for message in new:
            piece = self._message(message)
            ids += piece
            roles += [TokenRole.OBSERVATION] * len(piece)
        return (
            np.array([*ids, self.ROLES["assistant"]], np.int32),
            np.array([*roles, TokenRole.GLUE], np.int8),
        )

    def parse(
        self,
        ids: NDArray[np.int32],
        tools: Tools | None = None,
        *,
        finish_reason: FinishReason | None = None,
    ) -> Action:
        """Read a completion; never raises."""
        text = self.decode(ids)
        return to_message(parse(text, "hermes", finish_reason=finish_reason or "stop", tools=tools))

    def roles(self, ids: NDArray[np.int32]) -> NDArray[np.int8]:
        """ACTION from the token after an opening tag to the closing tag, REASONING elsewhere."""
        roles = np.full(len(ids), TokenRole.REASONING, np.int8)
        text = bytes(int(i) if i < self.END else 0 for i in ids)
        end = 0
        while (start := text.find(_OPEN.encode(), end)) >= 0:
            found = text.find(_CLOSE.encode(), start)
            end = len(text) if found < 0 else found + len(_CLOSE)
            roles[start + len(_OPEN) : end] = TokenRole.ACTION
        return roles

    def close_reasoning(self, ids: NDArray[np.int32], text: str) -> None:
        """Plain text has no reasoning blocks."""

    def encode_action(self, action: Message) -> NDArray[np.int32]:
        """Write an action as a completion, END included."""
        return np.array([*self.text(action).encode(), self.END], np.int32)

    def encode(self, text: str) -> list[int]:
        """Write a completion given as text, END included."""
        return [*text.encode(), self.END]

    def decode(self, ids: Sequence[int] | NDArray[np.int32]) -> str:
        """Read text; control tokens are left out."""
        return bytes(int(i) for i in ids if i < self.END).decode("utf-8", "replace")

    def text(self, message: Message) -> str:
        """Write a message's content and calls."""
        calls = "".join(
            f"{_OPEN}{json.dumps(call['function'])}{_CLOSE}"
            for call in message.get("tool_calls", ())
        )
        invalid = "".join(call["text"] for call in message.get("invalid_tool_calls", ()))
        return f"{message['content']}{calls}{invalid}"

    def _message(self, message: Message) -> list[int]:
        return [self.ROLES[message["role"]], *self.text(message).encode(), self.END]
