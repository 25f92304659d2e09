"""Run code that nobody wrote: one contract, three backends.

    sandbox = await turngym.sandboxes.create("local")
    session = await sandbox.session()
    result = await session.execute("1 + 1")

Everything is imported on first use, so that `import turngym.sandboxes` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turngym.sandboxes.base import (
        Artifact,
        ErrorInfo,
        ExecResult,
        Guarantees,
        Limits,
        PoolConfig,
        Sandbox,
        Session,
    )
    from turngym.sandboxes.check import CheckReport, check_sandbox
    from turngym.sandboxes.echo import EchoSandbox
    from turngym.sandboxes.factory import BACKENDS, create
    from turngym.sandboxes.isolation import SandboxDegradedWarning
    from turngym.sandboxes.sync import SyncSandbox, SyncSession

__all__ = [
    "BACKENDS",
    "Artifact",
    "CheckReport",
    "EchoSandbox",
    "ErrorInfo",
    "ExecResult",
    "Guarantees",
    "Limits",
    "PoolConfig",
    "Sandbox",
    "SandboxDegradedWarning",
    "Session",
    "SyncSandbox",
    "SyncSession",
    "check_sandbox",
    "create",
]

_HOME = {
    "BACKENDS": "factory",
    "CheckReport": "check",
    "EchoSandbox": "echo",
    "SandboxDegradedWarning": "isolation",
    "SyncSandbox": "sync",
    "SyncSession": "sync",
    "check_sandbox": "check",
    "create": "factory",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_HOME.get(name, 'base')}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
