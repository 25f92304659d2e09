"""What is asked of the engine for each session."""

import base64
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turngym.errors import ConfigError
from turngym.sandboxes.base import Limits
from turngym.sandboxes.bundle import container_program

__all__ = ["WORKSPACE", "Options"]

WORKSPACE = "/workspace"

_OVERHEAD_MB = 128
"""Memory of init and of the modules it preloads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of the backend, checked where they enter."""

    image: str
    preload: tuple[str, ...]
    cpus: float
    runtime: str | None
    env: Mapping[str, str]

    def __post_init__(self) -> None:
        if self.cpus <= 0:
            raise ConfigError(f"cpus must be positive, got {self.cpus}")
        for name in self.preload:
            if not re.fullmatch(r"[A-Za-z_][\w.]*", name):
                raise ConfigError(f"preload must name modules, got {name!r}")

    def command(self) -> list[str]:
        """Return the command of PID 1: our init, whatever else the image holds."""
        program = _PRELOAD.format(modules=self.preload) + container_program()
        packed = base64.b85encode(zlib.compress(program.encode(), 9)).decode()
        # One argument may have 128 KiB, so the program travels compressed.
        unpack = f"import base64,zlib;exec(zlib.decompress(base64.b85decode({packed!r})))"
        return ["python3", "-I", "-c", unpack]

    def container(self, limits: Limits) -> dict[str, Any]:
        """Return the engine's settings for a session with `limits`."""
        disk = f"{limits.disk_mb}m"
        tmpfs = f"rw,exec,nosuid,nodev,mode=1777,size={disk},nr_inodes={limits.inodes}"
        # Files in a tmpfs are charged as memory.
        memory = f"{limits.memory_mb + 2 * limits.disk_mb + _OVERHEAD_MB}m"
        host = {
            "auto_remove": True,
            "network_mode": "none",
            "read_only": True,
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges"],
            "mem_limit": memory,
            "memswap_limit": memory,
            "pids_limit": limits.processes + 1,
            "nano_cpus": int(self.cpus * 1e9),
            "tmpfs": {WORKSPACE: tmpfs, "/tmp": tmpfs},
            "shm_size": disk,
            "ulimits": [
                {"Name": name, "Soft": value, "Hard": value}
                for name, value in _ulimits(limits).items()
            ],
            "runtime": self.runtime,
        }
        return {
            "host": host,
            "user": "1000:1000",
            "working_dir": WORKSPACE,
            "environment": _ENVIRONMENT | dict(self.env),
            "entrypoint": [],
        }


def _ulimits(limits: Limits) -> dict[str, int]:
    """Limits that the engine must not choose by itself: Podman would ask for more than it may set.

    They hold for init too; a worker lowers its own. `nproc` counts every process of the user id
    on the machine, so it can only be a backstop.
    """
    return {"nofile": max(1024, limits.open_files), "nproc": 4096, "core": 0}


_ENVIRONMENT = {
    "HOME": WORKSPACE,
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    # Workers are forked from init, which therefore must not start threads.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}

_PRELOAD = """\
for name in {modules!r}:
    try:
        __import__(name)
    except ImportError:
        pass
"""
