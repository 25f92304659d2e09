"""What `TurnEnv` keeps of a running episode, and how it is copied."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from turngym.rewards.base import TurnView
from turngym.types import Message, Observation, Status, Task

__all__ = ["Episode", "Snapshot", "as_messages", "final_answer"]


@dataclass(slots=True)
class Episode:
    """What `TurnEnv` itself keeps of the running episode."""

    task: Task
    turns: tuple[TurnView, ...] = ()
    unreadable: int = 0
    told: list[dict[str, Any]] = field(default_factory=list)
    stop_reason: Status | None = None
    outcome: dict[str, float | None] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """One moment of an episode, to be restored any number of times. Made by `TurnEnv.snapshot`."""

    env_type: type
    episode: Episode
    state: Any
    random_state: Mapping[str, Any]
    live: Any

    def close(self) -> None:
        """Give up what it keeps alive (a forked interpreter); it cannot be restored afterwards."""
        if hasattr(self.live, "close"):
            self.live.close()


def as_messages(value: str | Sequence[Message]) -> Observation:
    """Copy messages, so that nobody who keeps them can change a later episode."""
    if isinstance(value, str):
        return ({"role": "user", "content": value},)
    return tuple(cast(Message, dict(message)) for message in value)


def final_answer(turn: TurnView) -> str | None:
    """Return the visible text of an action without calls; content parts are joined."""
    if turn.tool_calls or turn.invalid_tool_calls:
        return None
    content = turn.message["content"]
    if isinstance(content, list):
        texts = (part.get("text", "") for part in content if part.get("type") == "text")
        content = "\n".join(texts)
    return content if content.strip() else None
