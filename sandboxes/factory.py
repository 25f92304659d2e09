"""Backends by name, their options checked before anything is started."""

import difflib
import importlib
import inspect
from collections.abc import Iterable
from typing import Any, cast

from turngym.errors import ConfigError, MissingDependencyError
from turngym.sandboxes.base import Limits, PoolConfig, Sandbox

__all__ = ["BACKENDS", "create"]

BACKENDS = {
    "local": "turngym.sandboxes.local:LocalSandbox",
    "docker": "turngym.sandboxes.docker:DockerSandbox",
    "e2b": "turngym.sandboxes.e2b:E2BSandbox",
}
"""Where each backend lives; each class has an async `create(*, limits, pool, ...)`."""

_EXTRA_OF = {"docker": "docker", "e2b": "e2b"}
_SHARED_OPTIONS = ("limits", "pool")


async def create(
    backend: str = "local",
    *,
    limits: Limits | None = None,
    pool: PoolConfig | None = None,
    **options: Any,
) -> Sandbox:
    """Start a backend.

    Args:
        backend: one of `BACKENDS`.
        limits: defaults of every session.
        pool: how many sessions are kept and run at once.
        **options: the backend's own settings, checked by name against its `create`.

    Raises:
        ConfigError: the backend or an option does not exist.
        MissingDependencyError: the backend needs an optional package; the message names the extra.
        SandboxUnavailableError: the backend cannot run here, or not as strictly as asked.
    """
    cls = _load(backend)
    allowed = [name for name in inspect.signature(cls.create).parameters if name != "self"]
    own = sorted(set(allowed) - set(_SHARED_OPTIONS))
    for name in options:
        if name not in own:
            hint = _did_you_mean(name, own)
            raise ConfigError(
                f"the {backend!r} sandbox has no option {name!r}{hint}; its options are {own}"
            )
    return cast(
        Sandbox, await cls.create(limits=limits or Limits(), pool=pool or PoolConfig(), **options)
    )


def _load(backend: str) -> Any:
    if backend not in BACKENDS:
        hint = _did_you_mean(backend, BACKENDS)
        raise ConfigError(
            f"there is no sandbox backend {backend!r}{hint}; choose one of {sorted(BACKENDS)}"
        )
    module, _, name = BACKENDS[backend].partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        extra = _EXTRA_OF.get(backend)
        if extra is None or (error.name or "").partition(".")[0] == "turngym":
            raise
        raise MissingDependencyError(
            f"the {backend!r} sandbox needs the package {error.name!r}; "
            f"install it with: pip install 'turngym[{extra}]'"
        ) from error


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
