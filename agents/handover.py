"""Weights and adapters on their way to an engine in another process: files in shared memory.

The folder belongs to this process. It goes when the process closes it, and what a killed process
left behind goes when the next one opens its own.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from turngym.agents.vllm_weights import scratch_root, write_adapter, write_weights
from turngym.errors import WeightSyncError

__all__ = ["Handover"]

Named = Sequence[tuple[str, Any]]

_PREFIX = "turngym-handover-"


class Handover:
    """A folder that an engine reads from.

    Args:
        parent: where it is made; the engine must see it under the same path. None = shared memory.

    Raises:
        WeightSyncError: it cannot be made.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or Path(scratch_root() or tempfile.gettempdir())
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
    def weights(self, named: Named, version: int) -> Iterator[Path]:
        """Yield a safetensors file of the tensors; it is gone afterwards.

        Raises:
            WeightSyncError: it cannot be written.
        """
        path = self.folder / f"weights-{version}.safetensors"
        try:
            write_weights(path, named)
            yield path
        finally:
            path.unlink(missing_ok=True)

    def adapter(self, named: Named, version: int, *, rank: int, alpha: float) -> Path:
        """Write the adapters of a peft model as a folder in peft's format.

        Args:
            named: adapter tensors under peft's names.
            version: optimizer steps they have seen.
            rank: of the adapters.
            alpha: numerator of their scale.

        Raises:
            WeightSyncError: it cannot be written.
        """
        folder = self.folder / f"adapter-{version}"
        shutil.rmtree(folder, ignore_errors=True)  # of an update that was refused
        try:
            folder.mkdir()
            write_adapter(folder, named, rank=rank, alpha=alpha)
        except (OSError, WeightSyncError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, WeightSyncError):
                raise
            raise WeightSyncError(f"cannot write adapters to {folder}: {error}") from error
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
