"""Settings of the backend, and where things are in a sandbox."""

import errno
import posixpath
from dataclasses import dataclass

from turngym.errors import ConfigError

__all__ = ["PROGRAM", "WORKSPACE", "Options", "inside"]

WORKSPACE = "/workspace"
PROGRAM = "/tmp/turngym"
"""Folder of a one-shot program, apart from `/workspace` so that neither sees the other's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of the backend, checked where they enter."""

    template: str
    lifetime_s: int
    request_timeout_s: float
    allow_internet: bool

    def __post_init__(self) -> None:
        if self.lifetime_s < 15:
            raise ConfigError(
                "lifetime_s must be at least 15, so that the renewal can keep up, "
                f"got {self.lifetime_s}"
            )
        if self.request_timeout_s <= 0:
            raise ConfigError(f"request_timeout_s must be positive, got {self.request_timeout_s}")

    @property
    def round_trip_s(self) -> float:
        """Allowance for the network in what the other backends measure by `Limits.grace_s`."""
        return min(2.0, self.request_timeout_s)


def inside(path: str) -> str:
    """Resolve a path against `/workspace`.

    Raises:
        PermissionError: it leads out of there.
    """
    full = posixpath.normpath(posixpath.join(WORKSPACE, path))
    if not full.startswith(WORKSPACE + "/"):
        raise PermissionError(errno.EPERM, f"path must name a file below {WORKSPACE}", path)
    return full
