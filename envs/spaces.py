"""Gymnasium spaces of chat messages.

`MessageSpace` holds one message, `DialogueSpace` a tuple of them, `TextSpace` any text. They
contain what the type allows (any Unicode, any content parts), sample short honest text, and go
through Gymnasium's vector environments as plain objects.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import gymnasium
import numpy as np

from turngym.types import Message, Observation

__all__ = ["DialogueSpace", "MessageSpace", "TextSpace"]

Role = str

_ROLES = ("system", "user", "assistant", "tool")
_WORDS = ("yes", "no", "42", "the answer is 7", "I do not know", "naïve 你好 🙂")


class MessageSpace(gymnasium.Space[Message]):
    """All chat messages, or all of one role."""

    def __init__(
        self,
        role: Role | None = None,
        *,
        seed: int | np.random.Generator | None = None,
    ) -> None:
        super().__init__(None, None, seed)
        if role is not None and role not in _ROLES:
            raise ValueError(f"role must be one of {_ROLES} or None, got {role!r}")
        self.role = role

    @property
    def is_np_flattenable(self) -> bool:
        """Messages are no arrays."""
        return False

    def sample(self, mask: Any = None, probability: Any = None) -> Message:
        """Return a message with a few words and no tool calls; masks are not supported."""
        _refuse_masks(mask, probability)
        role: Any = self.role or str(self.np_random.choice(_ROLES))
        message: Message = {"role": role, "content": str(self.np_random.choice(_WORDS))}
        if role == "tool":
            message["tool_call_id"] = "call_0"
        return message

    def contains(self, x: Any) -> bool:
        """Tell whether `x` has the shape of a message, with the role asked for."""
        if not isinstance(x, Mapping) or x.get("role") not in _ROLES:
            return False
        if self.role is not None and x["role"] != self.role:
            return False
        return (
            _is_content(x.get("content"))
            and all(isinstance(x.get(key, ""), str) for key in _TEXT_KEYS)
            and _all(_is_call, x.get("tool_calls", ()))
            and _all(_is_invalid_call, x.get("invalid_tool_calls", ()))
        )

    def to_jsonable(self, sample_n: Iterable[Message]) -> list[Any]:
        """Return plain copies that `json.dumps` takes."""
        return [_plain(message) for message in sample_n]

    def from_jsonable(self, sample_n: list[Any]) -> list[Message]:
        """Return the messages of `to_jsonable`."""
        return [_message(entry) for entry in sample_n]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MessageSpace) and self.role == other.role

    def __repr__(self) -> str:
        return f"MessageSpace({self.role!r})" if self.role else "MessageSpace()"


class DialogueSpace(gymnasium.Space[Observation]):
    """Tuples of chat messages, the empty one included."""

    def __init__(self, *, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(None, None, seed)
        self._message = MessageSpace()

    @property
    def is_np_flattenable(self) -> bool:
        """Messages are no arrays."""
        return False

    def seed(self, seed: Any = None) -> Any:
        """Seed this space and the messages it samples."""
        result = super().seed(seed)
        self._message.seed(int(self.np_random.integers(2**31)))
        return result

    def sample(self, mask: Any = None, probability: Any = None) -> Observation:
        """Return one or two messages; masks are not supported."""
        _refuse_masks(mask, probability)
        return tuple(self._message.sample() for _ in range(int(self.np_random.integers(1, 3))))

    def contains(self, x: Any) -> bool:
        """Tell whether `x` is a tuple of messages."""
        return isinstance(x, tuple) and all(self._message.contains(item) for item in x)

    def to_jsonable(self, sample_n: Iterable[Observation]) -> list[Any]:
        """Return plain copies that `json.dumps` takes."""
        return [self._message.to_jsonable(messages) for messages in sample_n]

    def from_jsonable(self, sample_n: list[Any]) -> list[Observation]:
        """Return the observations of `to_jsonable`."""
        return [tuple(self._message.from_jsonable(messages)) for messages in sample_n]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DialogueSpace)

    def __repr__(self) -> str:
        return "DialogueSpace()"


class TextSpace(gymnasium.Space[str]):
    """Any text, where Gymnasium's `Text` needs a character set and a length."""

    def __init__(self, *, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(None, None, seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Text is no array."""
        return False

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Return a few words; masks are not supported."""
        _refuse_masks(mask, probability)
        return str(self.np_random.choice(_WORDS))

    def contains(self, x: Any) -> bool:
        """Tell whether `x` is a string."""
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextSpace)

    def __repr__(self) -> str:
        return "TextSpace()"


_TEXT_KEYS = ("reasoning_content", "tool_call_id", "name")


def _refuse_masks(mask: Any, probability: Any) -> None:
    if mask is not None or probability is not None:
        raise ValueError("spaces of messages sample without a mask; pass None")


def _is_content(content: Any) -> bool:
    if isinstance(content, list):
        return all(isinstance(part, Mapping) for part in content)
    return isinstance(content, str)


def _all(test: Callable[[Any], bool], items: Any) -> bool:
    return isinstance(items, (list, tuple)) and all(test(item) for item in items)


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return (
        isinstance(function, Mapping)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), Mapping)
    )


def _is_invalid_call(call: Any) -> bool:
    return (
        isinstance(call, Mapping)
        and isinstance(call.get("text"), str)
        and isinstance(call.get("error"), str)
    )


def _plain(message: Mapping[str, Any]) -> Any:
    """Copy a message; the spans of unread calls become lists, as in JSON."""
    copy = dict(message)
    if "invalid_tool_calls" in copy:
        copy["invalid_tool_calls"] = [
            {**call, "span": list(call["span"])} if "span" in call else dict(call)
            for call in copy["invalid_tool_calls"]
        ]
    return copy


def _message(entry: Any) -> Message:
    copy = dict(entry)
    if "invalid_tool_calls" in copy:
        copy["invalid_tool_calls"] = [
            {**call, "span": tuple(call["span"])} if "span" in call else dict(call)
            for call in copy["invalid_tool_calls"]
        ]
    return copy  # type: ignore[return-value]
