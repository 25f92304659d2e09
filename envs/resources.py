"""Live objects that environments name by strings: sandboxes, judges, user simulators.

An environment's arguments are plain JSON values, so that its spec can be stored, sent to another
process and made again there. `sandbox="local"` names an object; this module makes it when it is
first needed, shares it between all environments of the process, and closes it at the end.

    resources.provide("sandbox", "big", lambda: SyncSandbox("local", limits=Limits(memory_mb=2048)))
    env = turngym.make("turngym/PythonTool-v0", sandbox="big")
"""

import atexit
import os
import threading
from collections.abc import Callable
from typing import Any

from turngym.envs.arguments import did_you_mean
from turngym.errors import ConfigError
from turngym.sandboxes.factory import BACKENDS
from turngym.sandboxes.sync import SyncSandbox

__all__ = ["close", "get", "provide", "require", "sandbox"]

Key = tuple[str, str]

_lock = threading.RLock()
_makers: dict[Key, Callable[[], Any]] = {}
_live: dict[Key, Any] = {}


def provide(kind: str, name: str, make: Callable[[], Any]) -> None:
    """Say how a named object is made; a later call replaces an earlier one.

    Args:
        kind: what it is, for example `sandbox` or `judge`.
        name: what environments call it.
        make: called once, when it is first needed; its result may have a `close` method.
    """
    with _lock:
        _close_one((kind, name))
        _makers[kind, name] = make


def require(kind: str, name: str) -> None:
    """Check that a name is known, without making the object.

    Raises:
        ConfigError: nothing of the kind has the name.
    """
    if (kind, name) not in _makers:
        known = [other for other_kind, other in _makers if other_kind == kind]
        raise ConfigError(
            f"no {kind} is called {name!r}{did_you_mean(name, known)}; known: "
            f"{', '.join(known) or 'none'}; see turngym.envs.resources.provide"
        )


def get(kind: str, name: str) -> Any:
    """Return the shared object of a name, made on first use.

    Raises:
        ConfigError: nothing of the kind has the name.
    """
    require(kind, name)
    with _lock:
        if (kind, name) not in _live:
            _live[kind, name] = _makers[kind, name]()
        return _live[kind, name]


def sandbox(name: str) -> SyncSandbox:
    """Return the shared sandbox of a name: a backend (`local`, `docker`, `e2b`) or a provided one.

    Raises:
        ConfigError: there is none.
        SandboxUnavailableError: the backend cannot run here.
    """
    found: SyncSandbox = get("sandbox", name)
    return found


def close() -> None:
    """Close every object that was made; the next use makes it anew."""
    with _lock:
        for key in list(_live):
            _close_one(key)


def _close_one(key: Key) -> None:
    found = _live.pop(key, None)
    if found is not None and hasattr(found, "close"):
        found.close()


def _backend_maker(name: str) -> Callable[[], SyncSandbox]:
    return lambda: SyncSandbox(name)


for _name in BACKENDS:
    provide("sandbox", _name, _backend_maker(_name))

atexit.register(close)
# A forked child must not close, nor talk to, what belongs to its parent.
os.register_at_fork(after_in_child=_live.clear)
