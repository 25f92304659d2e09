"""From groups of trajectories to the columns of a `Batch`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turngym.errors import TrajectoryError
from turngym.types import Group, Trajectory, is_world_fault

NAN = float("nan")


class Context(NamedTuple):
    """One forward pass: a contiguous context of one row, and which of its tokens were sampled."""

    row: int
    ids: NDArray[np.int32]
    """Every token of the context, (T,)."""

    positions: NDArray[np.int64]
    """Places in `ids` of the sampled tokens, at least 1, increasing, (n,)."""

    start: int
    """Flat index of the first sampled token; the others follow."""


def collate(
    groups: Sequence[Group],
    *,
    greedy: Mapping[str, Trajectory] | None = None,
    anchors: bool = False,
) -> dict[str, Any]:
    """Build the columns of `Batch.from_groups`, by name."""
    rows = [(p, trajectory) for p, group in enumerate(groups) for trajectory in group.trajectories]
    contexts: list[Context] = []
    for row, (_, trajectory) in enumerate(rows):
        _check_trainable(trajectory)
        for ids, positions in _segments(trajectory):
            start = contexts[-1].start + len(contexts[-1].positions) if contexts else 0
            contexts.append(Context(row, ids, positions, start))
    trajectories = [trajectory for _, trajectory in rows]
    num_turns = [len(trajectory.turns) for trajectory in trajectories]
    width = max(1, *num_turns) if num_turns else 1
    outcome, by_turn = _reward_names(groups)
    return {
        "row": torch.from_numpy(
            np.repeat(np.arange(len(rows)), [t.num_sampled for t in trajectories])
        ),
        "turn": _column(trajectories, "turn", np.int64),
        "role": _column(trajectories, "role", np.int8),
        "logp_rollout": torch.nan_to_num(_column(trajectories, "logp", np.float32), nan=0.0),
        "version": _column(trajectories, "version", np.int64),
        "group": torch.tensor([p for p, _ in rows], dtype=torch.int64),
        "num_turns": torch.tensor(num_turns, dtype=torch.int64),
        "truncated": torch.tensor([t.truncated for t in trajectories], dtype=torch.bool),
        "demo": torch.tensor([t.source == "demo" for t in trajectories], dtype=torch.bool),
        "rewards": {name: _reals([t.rewards.get(name) for t in trajectories]) for name in outcome},
        "turn_rewards": {
            name: torch.stack([_turn_row(t, name, width) for t in trajectories]) for name in by_turn
        },
        "contexts": tuple(contexts),
        "task_ids": tuple(group.task_id for group in groups),
        "greedy": _greedy(groups, greedy, (*outcome, *by_turn)) if greedy else {},
        "anchor_state": _anchor_states(rows, width) if anchors else None,
        "answers": tuple(_answer(t) for t in trajectories),
        "bucket": _buckets(trajectories),
        "spans": _spans(trajectories),
        "token_ids": _column(trajectories, "ids", np.int64),
        "topk_ids": _extra(trajectories, "topk_ids", np.int64),
        "topk_logp": _extra(trajectories, "topk_logp", np.float32),
    }


def _check_trainable(trajectory: Trajectory) -> None:
    where = f"sample {trajectory.sample} of task {trajectory.task_id!r}"
    if is_world_fault(trajectory.status):
        raise TrajectoryError(
            f"{where} ended with {trajectory.status!r}; drop its group before training"
        )
    if trajectory.turns and not trajectory.has_tokens:
        raise TrajectoryError(
            f"{where} is a message-level record without tokens; roll out with a token-level policy"
        )


def _segments(trajectory: Trajectory) -> list[tuple[NDArray[np.int32], NDArray[np.int64]]]:
    parts = []
    bounds = np.flatnonzero(np.diff(trajectory.segment)) + 1
    for ids, sampled in zip(
        np.split(trajectory.ids, bounds), np.split(trajectory.sampled, bounds), strict=True
    ):
        positions = np.flatnonzero(sampled).astype(np.int64)
        if not len(positions):
            continue
        if positions[0] == 0:
            raise TrajectoryError(
                f"sample {trajectory.sample} of task {trajectory.task_id!r}: the first token of a "
                "context is sampled, so that nothing predicts it; start with a prompt"
            )
        parts.append((ids, positions))
    return parts


def _column(trajectories: Sequence[Trajectory], name: str, dtype: type) -> Tensor:
    parts = [getattr(t, name)[t.sampled].astype(dtype) for t in trajectories]
    return torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, dtype))


def _extra(trajectories: Sequence[Trajectory], name: str, dtype: type) -> Tensor | None:
    spoke = [t for t in trajectories if t.num_sampled]
    if not spoke or not all(name in t.extra for t in spoke):
        return None
    return torch.from_numpy(np.concatenate([t.extra[name][t.sampled].astype(dtype) for t in spoke]))


def _answer(trajectory: Trajectory) -> str | None:
    """The final answer: as the record or the last turn names it, else the last message's text."""
    if not trajectory.turns or not trajectory.terminated:
        return trajectory.metadata.get("answer")
    last = trajectory.turns[-1]
    said = last.message.get("content") if not last.message.get("tool_calls") else None
    named = trajectory.metadata.get("answer", last.info.get("answer", said))
    return None if named is None else str(named).strip() or None


def _reals(values: Sequence[float | None]) -> Tensor:
    return torch.tensor([NAN if v is None else v for v in values], dtype=torch.float64)


def _turn_row(trajectory: Trajectory, name: str, width: int) -> Tensor:
    values = [turn.rewards.get(name) for turn in trajectory.turns]
    return _reals(values + [None] * (width - len(values)))


def _reward_names(groups: Sequence[Group]) -> tuple[list[str], list[str]]:
    levels = {name: spec.level for group in groups for name, spec in group.rubric.items()}
    outcome = [name for name, level in levels.items() if level == "outcome"]
    return outcome, [name for name, level in levels.items() if level == "turn"]


def _greedy(
    groups: Sequence[Group], greedy: Mapping[str, Trajectory], names: Sequence[str]
) -> dict[str, Tensor]:
    if missing := [group.id for group in groups if group.id not in greedy]:
        raise TrajectoryError(f"groups {missing} have no greedy rollout")

    def earned(trajectory: Trajectory, name: str) -> float | None:
        values = [trajectory.rewards.get(name), *(t.rewards.get(name) for t in trajectory.turns)]
        found = [value for value in values if value is not None]
        return sum(found) if found else None

    return {
        name: _reals(
            [earned(greedy[group.id], name) for group in groups for _ in group.trajectories]
        )
        for name in names
    }


def _anchor_states(rows: Sequence[tuple[int, Trajectory]], width: int) -> Tensor:
    numbers: dict[tuple[int, str], int] = {}
    table = torch.full((len(rows), width), -1, dtype=torch.int64)
    for row, (group, trajectory) in enumerate(rows):
        for k, turn in enumerate(trajectory.turns):
            seen = trajectory.turns[k - 1].observation if k else trajectory.prompt
            state = turn.info.get("anchor", seen)
            key = (group, json.dumps(state, sort_keys=True, default=str))
            table[row, k] = numbers.setdefault(key, len(numbers))
    return table


def _buckets(trajectories: Sequence[Trajectory]) -> Tensor | None:
    """Numbers of the buckets that records, or the infos of their last turns, name."""
    infos = [t.turns[-1].info if t.turns else {} for t in trajectories]
    names = [
        t.metadata.get("bucket", info.get("bucket"))
        for t, info in zip(trajectories, infos, strict=True)
    ]
    if all(name is None for name in names):
        return None
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(str(name), len(numbers)) for name in names])


def _spans(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    names = {turn.info["span"] for t in trajectories for turn in t.turns if turn.info.get("span")}
    spans = {}
    for name in sorted(names):
        parts = []
        for t in trajectories:
            marked = np.array([turn.info.get("span") == name for turn in t.turns], bool)
            parts.append(marked[t.turn[t.sampled]])
        spans[name] = torch.from_numpy(np.concatenate(parts))
    return spans
