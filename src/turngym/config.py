"""Recipes: a frozen dataclass filled from TOML files and command-line flags.

One definition serves the API, the file and the command line. Flags override files, later files
override earlier ones, and unknown keys are errors with a suggestion.
"""

import dataclasses
import difflib
import json
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from turngym.errors import ConfigError

__all__ = ["dump", "load", "merge", "parse_flags", "read_toml", "suggest"]

T = TypeVar("T")


def suggest(name: str, known: Sequence[str]) -> str:
    """Return "; did you mean 'x'?" or a list of what is known, for an error message."""
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(sorted(known)) or 'none'}"


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        ConfigError: the file is missing or is not TOML; names the file and the place.
    """
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"recipe {path} does not exist (current folder: {Path.cwd()})") from None
    except OSError as error:
        raise ConfigError(f"recipe {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path} is not valid TOML: {error}") from None


def merge(default: T, values: Mapping[str, Any], *, where: str = "") -> T:
    """Return `default` (a dataclass) with the values of a nested mapping put in.

    Args:
        default: a dataclass instance; nested dataclasses are merged, not replaced.
        values: plain data, for example of a TOML file.
        where: dotted path so far, for messages.

    Raises:
        ConfigError: an unknown key, or a value of the wrong type; names the key and the rule.
    """
    names = [field.name for field in dataclasses.fields(typing.cast(Any, default))]
    hints = typing.get_type_hints(type(default))
    changes: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{where}{key}"
        name = key.replace("-", "_")
        if name not in names:
            raise ConfigError(f"unknown setting {path!r}{suggest(name, names)}")
        current = getattr(default, name)
        inner = None
        if isinstance(value, Mapping) and dataclasses.is_dataclass(current):
            inner = _untagged(value, type(current))
        if inner is not None:
            changes[name] = merge(current, inner, where=f"{path}.")
        else:
            changes[name] = _coerce(value, hints[name], path)
    return typing.cast(T, dataclasses.replace(typing.cast(Any, default), **changes))


def _untagged(value: Mapping[str, Any], kind: type) -> Mapping[str, Any] | None:
    """Return a table without the name of its class; None = it is a table of another class.

    Where a class has a field `kind` of its own, its tables carry no name.
    """
    if "kind" in (field.name for field in dataclasses.fields(kind)):
        return value
    if value.get("kind", kind.__name__) != kind.__name__:
        return None
    return {key: item for key, item in value.items() if key != "kind"}


def _coerce(value: Any, hint: Any, path: str) -> Any:
    members = typing.get_args(hint) if _is_union(hint) else (hint,)
    if isinstance(value, Mapping):
        for member in members:
            if isinstance(member, type) and dataclasses.is_dataclass(member):
                return _build(value, member, path)
    if isinstance(value, list):
        for member in members:
            items = typing.get_args(member)
            if typing.get_origin(member) is tuple and dataclasses.is_dataclass(items[0]):
                kind = typing.cast(type, items[0])
                return tuple(_build(v, kind, f"{path}[{i}]") for i, v in enumerate(value))
    return _validate(value, hint, path)


def _build(value: Any, base: type, path: str) -> Any:
    """Make a dataclass from a table; `kind` names which, where the setting has a choice."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"setting {path!r} must be a table, got {value!r}")
    kinds = {kind.__name__: kind for kind in _concrete(base)}
    values = dict(value)
    name = values.pop("kind", base.__name__)
    if name not in kinds:
        raise ConfigError(
            f"setting {path!r}: unknown kind {name!r}{suggest(str(name), list(kinds))}"
        )
    kind = kinds[name]
    try:
        return merge(kind(), values, where=f"{path}.")
    except TypeError:  # some field has no default: all of them must be given
        required = [f.name for f in dataclasses.fields(kind)]
        missing = [f for f in required if f not in values]
        raise ConfigError(f"setting {path!r}: {name} needs {', '.join(missing)}") from None


def _concrete(base: Any) -> list[Any]:
    """Return the dataclass and those derived from it, a bare base class left out."""
    below = [kind for child in base.__subclasses__() for kind in _concrete(child)]
    return below + ([base] if dataclasses.fields(base) or not below else [])


def _validate(value: Any, hint: Any, path: str) -> Any:
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        inner = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"setting {path!r}{f' ({inner})' if inner else ''}: {first['msg']}, got {value!r}"
        ) from None


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def parse_flags(default: T, argv: Sequence[str], *, prog: str) -> T:
    """Let command-line flags override a dataclass instance.

    Unknown flags end the process with status 2 and a suggestion; `--help` prints the docstring of
    the class and every setting with the value it has now.
    """
    import tyro

    kind = typing.cast(Any, type(default))
    return typing.cast(
        T,
        tyro.cli(
            kind,
            default=default,
            args=list(argv),
            prog=prog,
            config=(tyro.conf.AvoidSubcommands, tyro.conf.SuppressFixed),
            registry=_registry(),
        ),
    )


def _registry() -> Any:
    """Rules for flags: numbers by name are pairs (`--habits guess 0.2 no_think 0.1`), always.

    tyro would offer a flag a name where the default has names, and pairs where it has none.
    """
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    def build(words: list[str]) -> dict[str, float]:
        if len(words) % 2:
            raise ValueError(f"names and numbers must alternate, got {' '.join(words)}")
        return {name: float(value) for name, value in zip(words[::2], words[1::2], strict=True)}

    spec: PrimitiveConstructorSpec[Any] = PrimitiveConstructorSpec(
        nargs="*",
        metavar="[NAME NUMBER ...]",
        instance_from_str=build,
        is_instance=lambda value: isinstance(value, Mapping),
        str_from_instance=lambda value: [w for n, v in value.items() for w in (n, f"{v:g}")],
    )
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def numbers_by_name(info: Any) -> PrimitiveConstructorSpec[Any] | None:
        is_map = typing.get_origin(info.type) in (dict, Mapping)
        return spec if is_map and typing.get_args(info.type) == (str, float) else None

    return registry


def load(
    default: T,
    argv: Sequence[str],
    *,
    prog: str,
    prepare: Callable[[T, dict[str, Any]], T] | None = None,
) -> T:
    """Fill a config from `@recipe.toml` arguments, then from flags.

    Args:
        default: what holds when neither file nor flag says otherwise.
        argv: command-line arguments; each one starting with `@` is a recipe.
        prog: program name for help and errors.
        prepare: called with the config so far and the raw values of the recipes before they are
            merged; lets one setting (an algorithm's name) choose the defaults of others.

    Raises:
        ConfigError: a recipe is missing, broken, or has an unknown key.
    """
    values: dict[str, Any] = {}
    flags: list[str] = []
    for argument in argv:
        if argument.startswith("@"):
            values = _overlay(values, read_toml(argument[1:]))
        else:
            flags.append(argument)
    if prepare is not None:
        default = prepare(default, values)
    return parse_flags(merge(default, values), flags, prog=prog)


def _overlay(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, dict):
            merged[key] = _overlay(below, value)
        else:
            merged[key] = value
    return merged


def dump(config: Any) -> dict[str, Any]:
    """Return a config as JSON-able data; nested dataclasses carry their class under `kind`.

    >>> import dataclasses
    >>> @dataclasses.dataclass(frozen=True)
    ... class Clip:
    ...     low: float = 0.2
    >>> dump(Clip())
    {'kind': 'Clip', 'low': 0.2}
    """
    plain = _plain(config)
    json.dumps(plain)
    return typing.cast(dict[str, Any], plain)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"kind": type(value).__name__} | {
            name: _plain(item) for name, item in fields.items()
        }
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), -float("inf"))):
        return str(value)
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)


def fail(error: object, *, prog: str) -> typing.NoReturn:
    """Print an error the way a command-line program should, and exit with status 2."""
    sys.stderr.write(f"{prog}: {error}\n")
    raise SystemExit(2)
