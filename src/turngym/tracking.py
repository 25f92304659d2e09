"""Where a run's numbers go: the run folder always, other trackers on request.

Run folder: `config.json`, `metrics.jsonl`, `trajectories/`, `checkpoints/`, `events/`.
Every metric key is documented in `docs/metrics.md`.
"""

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from turngym.config import suggest
from turngym.errors import ConfigError, MissingDependencyError, TurngymError

__all__ = ["TRACKERS", "JsonlTracker", "Many", "Tracker", "make_tracker", "write_json"]

TRACKERS = ("tensorboard", "trackio", "wandb")


class Tracker(Protocol):
    """Takes a run's configuration and numbers."""

    def config(self, values: Mapping[str, Any]) -> None:
        """Record the resolved configuration, once."""
        ...

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record numbers of one optimizer step."""
        ...

    def close(self) -> None:
        """Flush and finish. Idempotent."""
        ...


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader, or a crash, never sees half of it.

    Raises:
        TurngymError: the disk is full or the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(value, indent=1, sort_keys=False) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # the folder itself may be what is wrong
            temporary.unlink()
        raise TurngymError(
            f"cannot write {path}: {error.strerror}; free space or choose another run folder"
        ) from error


class JsonlTracker:
    """`config.json` and one JSON line a step in `metrics.jsonl`; always on.

    Args:
        folder: the run folder; made when missing.
        resume_step: keep only lines of earlier steps (a resumed run writes the later ones again).
    """

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        self.folder = folder
        self._path = folder / "metrics.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            kept = self._lines_before(resume_step) if resume_step is not None else []
            self._path.write_text("".join(kept), encoding="utf-8")
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._full(error) from error

    def _lines_before(self, step: int) -> list[str]:
        if not self._path.exists():
            return []
        kept = []
        for line in self._path.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                if json.loads(line)["step"] < step:
                    kept.append(line)
            except (json.JSONDecodeError, KeyError):
                continue  # a line torn by a crash; its step is trained again
        return kept

    def _full(self, error: OSError) -> TurngymError:
        return TurngymError(
            f"cannot write the run folder {self.folder}: {error.strerror}; "
            "free space or choose another with --run"
        )

    def config(self, values: Mapping[str, Any]) -> None:
        """Write `config.json`."""
        write_json(self.folder / "config.json", dict(values))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one line; a number that is not finite becomes null."""
        values = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        try:
            self._file.write(json.dumps({"step": step} | values) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._full(error) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardTracker:
    """Scalars in `events/`, readable with `tensorboard --logdir RUN`."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise _missing("tensorboard") from error
        self._summary = Summary
        self._writer = EventFileWriter(str(folder / "events"))

    def config(self, values: Mapping[str, Any]) -> None:
        """TensorBoard has no place for a configuration; `config.json` holds it."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add one event with all scalars."""
        import time

        from tensorboard.compat.proto.event_pb2 import Event

        values = [self._summary.Value(tag=k, simple_value=v) for k, v in metrics.items()]
        summary = self._summary(value=values)
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbTracker:
    """Weights & Biases, or trackio, which keeps its interface."""

    def __init__(self, folder: Path, module: str, project: str) -> None:
        import importlib

        try:
            self._api: Any = importlib.import_module(module)
        except ImportError as error:
            raise _missing(module) from error
        self._folder = folder
        self._project = project
        self._run: Any = None

    def config(self, values: Mapping[str, Any]) -> None:
        """Start the remote run with the configuration."""
        self._run = self._api.init(
            project=self._project, name=self._folder.name, config=dict(values)
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send one step."""
        if self._run is None:
            self.config({})
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the remote run."""
        if self._run is not None:
            self._run.finish()
            self._run = None


class Many:
    """Fans out to several trackers."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def config(self, values: Mapping[str, Any]) -> None:
        """Tell every tracker."""
        for tracker in self._trackers:
            tracker.config(values)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Tell every tracker."""
        for tracker in self._trackers:
            tracker.log(metrics, step)

    def close(self) -> None:
        """Close every tracker."""
        for tracker in self._trackers:
            tracker.close()


def make_tracker(
    folder: Path, names: Sequence[str] = (), *, resume_step: int | None = None
) -> Tracker:
    """Return the trackers of a run: the run folder's JSON lines plus those named.

    Raises:
        ConfigError: an unknown name.
        MissingDependencyError: a tracker's package is not installed; names the extra.
    """
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"unknown tracker {name!r}{suggest(name, TRACKERS)}")
    trackers: list[Tracker] = [JsonlTracker(folder, resume_step=resume_step)]
    for name in names:
        if name == "tensorboard":
            trackers.append(TensorBoardTracker(folder))
        else:
            trackers.append(WandbTracker(folder, name, project="turngym"))
    return Many(trackers)


def _missing(name: str) -> MissingDependencyError:
    return MissingDependencyError(
        f"tracker {name!r} needs a package that is not installed; "
        f'install it with: pip install "turngym[{name}]"'
    )
