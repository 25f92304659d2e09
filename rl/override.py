"""Variants from plain settings, as recipes and flags give them; no torch here."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from turngym.errors import ConfigError
from turngym.rl.algorithm import Algorithm
from turngym.rl.axes import KeepInGroup, Shaping
from turngym.rl.estimators import Estimator
from turngym.rl.terms import Regularizer, TokenRule
from turngym.rl.trust_region import TrustRegion

__all__ = ["override"]

_BASES: dict[str, type[Any]] = {
    "advantage": Estimator,
    "trust_region": TrustRegion,
    "tokens": TokenRule,
    "regularize": Regularizer,
    "shaping": Shaping,
    "keep_in_group": KeepInGroup,
}


def override(algorithm: Algorithm, settings: Mapping[str, Any]) -> Algorithm:
    """Change an algorithm by dotted paths; everything is checked once, at the end.

    A path names a field (`trust_region.low`, `selection.keep_groups`), swaps a value for one of
    another kind (`trust_region`: `"SoftGate"`), or names an entry of a list by its kind:
    `regularize.KL.coef` changes or adds it, `regularize.KL`: None removes it.

    Args:
        algorithm: where to start, a preset for instance.
        settings: values by path; lists become tuples.

    Raises:
        ConfigError: a path that does not exist (with a suggestion), or a combination that is
            refused.
    """
    tree: dict[str, Any] = {}
    for path, value in settings.items():
        node = tree
        *parents, last = path.split(".")
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{path!r} changes a field of what another setting replaces")
        if isinstance(value, Mapping):
            node.setdefault(last, {}).update(value)
        else:
            node[last] = value
    return _changed(algorithm, tree, "algorithm")  # type: ignore[no-any-return]


def _changed(value: Any, changes: Mapping[str, Any], path: str) -> Any:
    """Return a dataclass with some fields changed, by a tree of changes."""
    names = [field.name for field in dataclasses.fields(value)]
    found: dict[str, Any] = {}
    for name, change in changes.items():
        where = f"{path}.{name}"
        if name not in names:
            raise ConfigError(f"{where} does not exist{_hint(name, names)}")
        old = getattr(value, name)
        if isinstance(change, Mapping) and name in ("tokens", "regularize", "shaping"):
            found[name] = _entries(old, change, _BASES[name], where)
        elif isinstance(change, Mapping) and dataclasses.is_dataclass(old):
            found[name] = _changed(old, change, where)
        elif isinstance(change, Mapping) and name != "weights":
            raise ConfigError(f"{where} is {old!r} and has no fields; name a kind first")
        elif isinstance(change, str) and name in _BASES:
            found[name] = _kind(change, _BASES[name], where)()
        else:
            found[name] = _plain(change, old, where)
    try:
        return dataclasses.replace(value, **found)
    except TypeError as error:
        raise ConfigError(f"{path}: {error}") from error


def _entries(old: tuple[Any, ...], changes: Mapping[str, Any], base: type[Any], path: str) -> Any:
    entries = {type(entry).__name__: entry for entry in old}
    for name, change in changes.items():
        kind = _kind(name, base, path)
        if change is None:
            entries.pop(kind.__name__, None)
        else:
            entry = entries.get(kind.__name__) or kind()
            fields = change if isinstance(change, Mapping) else {}
            entries[kind.__name__] = _changed(entry, fields, f"{path}.{kind.__name__}")
    return tuple(entries.values())


def _kind(name: str, base: type[Any], path: str) -> type[Any]:
    kinds = {kind.__name__: kind for kind in base.__subclasses__()}
    if name not in kinds:
        raise ConfigError(f"{path} has no kind {name!r}{_hint(name, list(kinds))}")
    return kinds[name]


def _plain(value: Any, old: Any, path: str) -> Any:
    if isinstance(value, list):
        return tuple(value)
    if isinstance(old, bool) and not isinstance(value, bool):
        raise ConfigError(f"{path} must be true or false, got {value!r}")
    if isinstance(old, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(old, (int, float)) and isinstance(value, str):
        raise ConfigError(f"{path} must be a number, got {value!r}")
    return value


def _hint(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"
