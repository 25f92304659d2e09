from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from turngym.types import Group, RewardSpec, TokenRole, Trajectory, Turn

PROMPT, OBSERVATION, ACTION = TokenRole.PROMPT, TokenRole.OBSERVATION, TokenRole.ACTION

RUBRIC = {
    "correct": RewardSpec(name="correct", low=0.0, high=1.0),
    "tool": RewardSpec(name="tool", level="turn", weight=0.5),
}


def make_trajectory(
    turns: Sequence[int] = (2,),
    *,
    correct: float | None = 1.0,
    tool: Sequence[float | None] | None = None,
    observation: int = 1,
    task: str = "t0",
    sample: int = 0,
    new_segment: bool = False,
    **changes: Any,
) -> Trajectory:
    """A prompt of two tokens, then turns of the given lengths, an observation after each."""
    roles, turn_of, segment, spans = [PROMPT, PROMPT], [-1, -1], [0, 0], []
    for k, length in enumerate(turns):
        if k and new_segment:
            roles, turn_of, segment = [*roles, PROMPT], [*turn_of, k - 1], [*segment, k]
        start = len(roles)
        roles += [ACTION] * length + [OBSERVATION] * observation
        turn_of += [k] * (length + observation)
        segment += [k if new_segment else 0] * (length + observation)
        spans.append((start, start + length))
    role = np.array(roles, np.int8)
    sampled = role == ACTION
    infos = changes.pop("infos", [{}] * len(turns))
    fields: dict[str, Any] = {
        "env_id": "test/Fake-v0",
        "task_id": task,
        "group_id": task,
        "seed": 0,
        "status": "completed",
        "ids": np.arange(len(role), dtype=np.int32),
        "logp": np.where(sampled, -0.5, np.nan).astype(np.float32),
        "role": role,
        "turn": np.array(turn_of, np.int16),
        "version": np.where(sampled, 3, -1).astype(np.int32),
        "segment": np.array(segment, np.int16),
        "turns": tuple(
            Turn(
                start=start,
                stop=stop,
                finish_reason="stop",
                message={"role": "assistant", "content": ""},
                observation=({"role": "tool", "content": f"seen {k}"},),
                rewards={} if tool is None else {"tool": tool[k]},
                info=infos[k],
            )
            for k, (start, stop) in enumerate(spans)
        ),
        "rewards": {"correct": correct},
        "prompt": ({"role": "user", "content": task},),
        "sample": sample,
    }
    return Trajectory(**(fields | changes))


def make_group(*trajectories: Trajectory, rubric: Any = None) -> Group:
    first = trajectories[0]
    return Group(
        id=first.group_id,
        task_id=first.task_id,
        env_id=first.env_id,
        trajectories=trajectories,
        rubric=RUBRIC if rubric is None else rubric,
    )


@pytest.fixture(scope="session")
def trajectory() -> Any:
    return make_trajectory


@pytest.fixture(scope="session")
def group() -> Any:
    return make_group
