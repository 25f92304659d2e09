"""Weights and adapters on their way to an engine in another process: files in shared memory.

The folder belongs to this process. It goes when the process closes it, and what a killed process
left behind goes when the next one opens its own.
"""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from turngym.errors import WeightSyncError

__all__ = ["Handover", "adapter_config"]

_PREFIX = "turngym-handover-"
_SHARED_MEMORY = Path("/dev/shm")


class Handover:
    """A folder that an engine reads from.

    Args:
        parent: where it is made; the engine must see it under the same path. None = shared memory.

    Raises:
        WeightSyncError: it cannot be made.
    """

    def __init__(self, parent: Path | None = None) -> None:
        in_memory = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        parent = in_memory if parent is None else parent
        try:
            _remove_orphans(parent)
            self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            # Locked before it has the name by which others look for it.
            self._lock = os.open(self.folder / "new", os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            (self.folder / "new").rename(self.folder / "owner")
        except OSError as error:
            raise WeightSyncError(
                f"cannot hand weights over in {parent}: {error.strerror or error}; choose a "
                "folder that the engine can read too with engine.folder"
            ) from error

    @contextlib.contextmanager
    def weights(self, named: Iterable[tuple[str, Any]], version: int) -> Iterator[Path]:
        """Yield a safetensors file of the tensors; it is gone afterwards.

        Raises:
            WeightSyncError: it cannot be written.
        """
        path = self.folder / f"weights-{version}.safetensors"
        try:
            self._write(path, named)
            yield path
        finally:
            path.unlink(missing_ok=True)

    def adapter(
        self, named: Iterable[tuple[str, Any]], version: int, *, alpha: float | None = None
    ) -> Path:
        """Write the adapters of a peft model as a folder in peft's format.

        Args:
            named: adapter tensors under peft's names.
            version: optimizer steps they have seen.
            alpha: numerator of their scale; None = twice the rank.

        Raises:
            WeightSyncError: it cannot be written, or a tensor is no adapter's.
        """
        tensors = {name.replace(".default.", "."): tensor for name, tensor in named}
        folder = self.folder / f"adapter-{version}"
        config = adapter_config({name: tuple(one.shape) for name, one in tensors.items()}, alpha)
        try:
            folder.mkdir()
            self._write(folder / "adapter_model.safetensors", tensors.items())
            (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise _unwritten(folder, error) from error
        except WeightSyncError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def drop(self, folder: Path) -> None:
        """Remove what `adapter` wrote."""
        shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @staticmethod
    def _write(path: Path, named: Iterable[tuple[str, Any]]) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in named}
        try:
            save_file(_unshared(tensors), path)
        except (OSError, SafetensorError) as error:
            path.unlink(missing_ok=True)
            raise _unwritten(path, error) from error


def adapter_config(shapes: Mapping[str, tuple[int, ...]], alpha: float | None) -> dict[str, Any]:
    """Return peft's description of adapters with these names and shapes.

    Raises:
        WeightSyncError: a name is no adapter's, or their ranks differ.
    """
    ranks = {shape[0] for name, shape in shapes.items() if name.endswith(".lora_A.weight")}
    strange = [n for n in shapes if not n.endswith((".lora_A.weight", ".lora_B.weight"))]
    if strange or len(ranks) != 1:
        what = f"{strange[0]!r} is no adapter's tensor" if strange else f"ranks {sorted(ranks)}"
        raise WeightSyncError(f"adapters must be lora_A and lora_B of one rank; {what}")
    (rank,) = ranks
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank if alpha is None else alpha,
        "target_modules": sorted({name.split(".")[-3] for name in shapes}),
        "bias": "none",
        "base_model_name_or_path": None,
    }


def _unshared(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out names of memory that another name has brought: tied weights travel once."""
    seen: set[int] = set()
    kept = {}
    for name, tensor in tensors.items():
        if tensor.data_ptr() not in seen or not tensor.numel():
            kept[name] = tensor
        seen.add(tensor.data_ptr())
    return kept


def _unwritten(path: Path, error: Exception) -> WeightSyncError:
    cause = getattr(error, "strerror", None) or error
    return WeightSyncError(
        f"cannot write {path}: {cause}; the engine keeps the weights it has. Free space there, or "
        "choose another folder with engine.folder"
    )


def _remove_orphans(parent: Path) -> None:
    """Remove folders whose owners are dead: a living one holds the lock."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder / "owner", os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
