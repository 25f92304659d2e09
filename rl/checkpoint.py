"""Checkpoints: everything a bit-equal resume needs, written so that a crash leaves the old one.

A checkpoint is a folder `checkpoints/step-000040/` with the model (or its adapters) in Hugging Face
form, `learner.pt` (optimizer, critic, reference, random state), `state.json` (step, position in the
task stream, tasks in flight), `replay/`, where the algorithm replays, and `waiting/`, trajectories
that had finished and not trained, where rollouts run ahead.
It appears under its name only when complete.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from turngym.agents.store import TrajectoryStore
from turngym.errors import CheckpointError
from turngym.tracking import write_json
from turngym.types import Trajectory

__all__ = ["Checkpoint", "latest", "load_weights", "save", "saving"]

_PREFIX = "step-"
_REPLAY = "replay"
_WAITING = "waiting"
_FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What `latest` and `read` return."""

    folder: Path
    step: int
    state: Mapping[str, Any]
    """`state.json`."""

    learner: Mapping[str, Any]
    """Optimizer, critic, reference and random state."""

    @property
    def replay(self) -> Iterable[Trajectory]:
        """Trajectories kept for replay, read one by one."""
        return TrajectoryStore(self.folder / _REPLAY)

    @property
    def waiting(self) -> Iterable[Trajectory]:
        """Trajectories that had finished and not trained, read one by one."""
        return TrajectoryStore(self.folder / _WAITING)


def save(
    run: Path,
    *,
    step: int,
    model: Any,
    tokenizer: Any,
    learner: Mapping[str, Any],
    state: Mapping[str, Any],
    replay: Sequence[Trajectory] = (),
    waiting: Sequence[Trajectory] = (),
    keep: int = 2,
) -> Path:
    """Write `checkpoints/step-N`; older ones beyond `keep` are removed afterwards.

    Raises:
        CheckpointError: the disk is full or the folder cannot be written; the previous checkpoint
            is untouched.
    """
    root = run / "checkpoints"
    target = root / f"{_PREFIX}{step:06d}"
    partial = root / f".{target.name}.{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        rng = {"torch_rng": torch.get_rng_state()}
        torch.save(dict(learner) | rng, partial / "learner.pt")
        TrajectoryStore(partial / _REPLAY).append(replay)
        TrajectoryStore(partial / _WAITING).append(waiting)
        write_json(partial / "state.json", dict(state) | {"step": step, "format": _FORMAT})
        if target.exists():
            shutil.rmtree(target)
        os.replace(partial, target)
    except Exception as error:  # torch and safetensors raise their own kinds on a full disk
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"cannot write checkpoint {target}: {error}; earlier checkpoints are untouched, "
            "free space or choose another run folder, then resume"
        ) from error
    for old in _folders(root)[:-keep] if keep > 0 else []:
        shutil.rmtree(old)
    return target


@contextlib.contextmanager
def saving(folder: Path) -> Iterator[None]:
    """Turn what goes wrong while a model is saved into a `CheckpointError` naming the folder."""
    try:
        yield
    except Exception as error:  # torch and safetensors raise their own kinds on a full disk
        raise CheckpointError(
            f"cannot write {folder}: {error}; free space or choose another run folder"
        ) from error


def _folders(root: Path) -> list[Path]:
    return sorted(p for p in root.glob(f"{_PREFIX}*") if (p / "state.json").exists())


def latest(run: Path) -> Checkpoint | None:
    """Read the newest complete checkpoint of a run folder; None when there is none.

    Raises:
        CheckpointError: it cannot be read, or another version wrote it.
    """
    folders = _folders(run / "checkpoints")
    if not folders:
        return None
    folder = folders[-1]
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        learner = torch.load(folder / "learner.pt", weights_only=True)
    except Exception as error:  # unpickling raises many kinds
        cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        raise CheckpointError(
            f"cannot read checkpoint {folder}: {cause}; remove it to resume from the one before"
        ) from error
    if state.get("format") != _FORMAT:
        raise CheckpointError(
            f"checkpoint {folder} has format {state.get('format')}, this version reads {_FORMAT}"
        )
    return Checkpoint(folder=folder, step=state["step"], state=state, learner=learner)


def load_weights(model: Any, folder: Path) -> None:
    """Put a checkpoint's weights (or adapters) into a model that is already built.

    Raises:
        CheckpointError: names or shapes differ from the model's.
    """
    from safetensors.torch import load_file

    adapter = folder / "adapter_model.safetensors"
    try:
        if adapter.exists():
            from peft import set_peft_model_state_dict

            set_peft_model_state_dict(model, load_file(adapter))
            return
        saved: dict[str, torch.Tensor] = {}
        for shard in sorted(folder.glob("model*.safetensors")):
            saved |= load_file(shard)
        missing, unexpected = model.load_state_dict(saved, strict=False)
        tied = set(getattr(model, "_tied_weights_keys", None) or ())
        if unexpected or set(missing) - tied:
            raise CheckpointError(f"missing {sorted(set(missing) - tied)}, unexpected {unexpected}")
    except (RuntimeError, OSError) as error:
        raise CheckpointError(f"checkpoint {folder} does not fit the model: {error}") from error
    model.tie_weights()
