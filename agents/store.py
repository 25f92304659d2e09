"""Trajectories on disk: numbered `.npz` shards and one `index.jsonl` line a trajectory.

A shard is written beside its name and renamed, then the index grows by whole lines: a process
that is killed leaves at worst a torn last line, which readers ignore.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.agents.summary import record
from turngym.errors import CheckpointError, DataError
from turngym.types import Message, Observation, Trajectory, Turn

__all__ = ["TrajectoryStore"]

logger = logging.getLogger(__name__)

SCHEMA = 1

_COLUMNS = ("ids", "logp", "role", "turn", "version", "segment")
_SCALARS = tuple(
    field.name
    for field in fields(Trajectory)
    if field.name not in (*_COLUMNS, "turns", "prompt", "extra")
)


class TrajectoryStore:
    """The trajectories of a run, appended as they come and read one by one.

    Args:
        folder: where they live; made when it is missing.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._index = self.folder / "index.jsonl"
        self._cached: tuple[str, list[Trajectory]] | None = None
        self._next_shard: int | None = None

    def append(
        self, trajectories: Sequence[Trajectory], note: Mapping[str, Any] | None = None
    ) -> None:
        """Write trajectories as one shard.

        Args:
            trajectories: what to write.
            note: added to their index rows, for example `{"step": 12}`; JSON-able.

        Raises:
            CheckpointError: the folder cannot be written (a full disk, say); what was stored
                before is untouched.
            DataError: metadata that is not JSON-able.
        """
        if not trajectories:
            return
        try:
            if self._next_shard is None:
                self._next_shard = self._prepare()
            shard = f"{self._next_shard:06d}.npz"
            text = "".join(
                _dump({"schema": SCHEMA, "shard": shard, "row": row, **record(one), **(note or {})})
                + "\n"
                for row, one in enumerate(trajectories)
            )
            self._write_shard(shard, trajectories)
            self._next_shard += 1
            with self._index.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise CheckpointError(
                f"cannot write trajectories to {self.folder}: {error.strerror or error}; those "
                "stored before are kept; free space, or choose another folder"
            ) from error

    def rows(self) -> list[dict[str, Any]]:
        """Return the index: one record a trajectory, in the order written.

        Raises:
            DataError: a line that is broken (and not the torn last one), or of another schema.
        """
        if not self._index.is_file():
            return []
        found = []
        lines = self._index.read_text(encoding="utf-8", errors="replace").split("\n")
        if lines.pop():
            logger.warning("%s ends with a torn line, which is ignored", self._index)
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                schema = row["schema"]
            except (ValueError, TypeError, KeyError) as error:
                raise DataError(f"{self._index}:{number}: no index row: {line[:80]!r}") from error
            if schema != SCHEMA:
                raise DataError(
                    f"{self._index}:{number}: schema {schema} was written by another version of "
                    f"turngym; this one reads schema {SCHEMA}"
                )
            found.append(row)
        return found

    def load(self, row: Mapping[str, Any]) -> Trajectory:
        """Read the trajectory of an index row.

        Raises:
            DataError: its shard is missing or broken.
        """
        shard, number = str(row["shard"]), int(row["row"])
        if self._cached is None or self._cached[0] != shard:
            self._cached = (shard, _read_shard(self.folder / shard))
        trajectories = self._cached[1]
        if number >= len(trajectories):
            raise DataError(f"{self.folder / shard} has no row {number}")
        return trajectories[number]

    def __iter__(self) -> Iterator[Trajectory]:
        """Read every trajectory, one shard in memory at a time."""
        for row in self.rows():
            yield self.load(row)

    def _write_shard(self, name: str, trajectories: Sequence[Trajectory]) -> None:
        arrays = _pack(trajectories)
        partial = self.folder / f"{name}.partial"
        try:
            with partial.open("wb") as file:
                np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
            partial.replace(self.folder / name)
        finally:
            partial.unlink(missing_ok=True)

    def _prepare(self) -> int:
        """Make the folder, cut off a torn line, and return the first free shard number."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._index.is_file():
            with self._index.open("rb+") as file:
                whole = file.read().rfind(b"\n") + 1
                if whole < file.seek(0, os.SEEK_END):
                    logger.warning("%s ends with a torn line, which is cut off", self._index)
                    file.truncate(whole)
        numbers = (path.stem for path in self.folder.glob("*.npz"))
        return 1 + max((int(number) for number in numbers if number.isdigit()), default=0)


def _pack(trajectories: Sequence[Trajectory]) -> dict[str, NDArray[Any]]:
    """Columns end to end, where each begins, and everything else as JSON."""
    arrays: dict[str, NDArray[Any]] = {
        name: np.concatenate([getattr(one, name) for one in trajectories]) for name in _COLUMNS
    }
    arrays["offsets"] = np.cumsum([0, *(len(one.ids) for one in trajectories)])
    for row, one in enumerate(trajectories):
        for name, column in one.extra.items():
            arrays[f"extra/{row}/{name}"] = column
    text = _dump([_plain(one) for one in trajectories])
    arrays["json"] = np.frombuffer(text.encode(), np.uint8)
    return arrays


def _dump(value: object) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise DataError(f"trajectories hold something that is not JSON-able: {error}") from error


def _plain(trajectory: Trajectory) -> dict[str, Any]:
    plain = {name: getattr(trajectory, name) for name in _SCALARS}
    plain["prompt"] = trajectory.prompt
    plain["turns"] = [
        {field.name: getattr(turn, field.name) for field in fields(Turn)}
        for turn in trajectory.turns
    ]
    return plain


def _read_shard(path: Path) -> list[Trajectory]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        parts = json.loads(arrays["json"].tobytes())
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} is missing or broken: {type(error).__name__}: {error}") from error
    offsets = arrays["offsets"].tolist()
    return [
        _restore(part, row, slice(offsets[row], offsets[row + 1]), arrays)
        for row, part in enumerate(parts)
    ]


def _restore(
    part: dict[str, Any], row: int, rows: slice, arrays: Mapping[str, NDArray[Any]]
) -> Trajectory:
    prefix = f"extra/{row}/"
    turns = tuple(
        Turn(
            **turn
            | {
                "message": _message(turn["message"]),
                "observation": _observation(turn["observation"]),
            }
        )
        for turn in part["turns"]
    )
    columns: dict[str, Any] = {name: arrays[name][rows].copy() for name in _COLUMNS}
    return Trajectory(
        **part | columns | {"turns": turns, "prompt": _observation(part["prompt"])},
        extra={
            name.removeprefix(prefix): column
            for name, column in arrays.items()
            if name.startswith(prefix)
        },
    )


def _observation(messages: list[Message]) -> Observation:
    return tuple(_message(message) for message in messages)


def _message(message: Message) -> Message:
    for call in message.get("invalid_tool_calls", ()):
        start, end = call["span"]
        call["span"] = (start, end)
    return message
