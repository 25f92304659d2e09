"""Unknown is an error: keyword arguments are checked by name, with a suggestion."""

import functools
import inspect
from collections.abc import Iterable
from difflib import get_close_matches

from turngym.errors import ConfigError

__all__ = ["did_you_mean", "refuse_unknown"]


def refuse_unknown(cls: type, given: Iterable[str]) -> None:
    """Check argument names against a constructor's.

    Raises:
        ConfigError: a name that the constructor does not take.
    """
    known = _keywords(cls)
    if known is None:
        return
    for name in given:
        if name not in known:
            raise ConfigError(
                f"{cls.__name__} takes no argument {name!r}{did_you_mean(name, known)}; "
                f"it takes: {', '.join(known) or 'none'}"
            )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the closest known name, or nothing.

    >>> did_you_mean("max_turn", ["split", "max_turns"])
    "; did you mean 'max_turns'?"
    """
    close = get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


@functools.cache
def _keywords(cls: type) -> tuple[str, ...] | None:
    """Names of the arguments a constructor takes; None when it takes any."""
    parameters = list(
        inspect.signature(inspect.getattr_static(cls, "__init__")).parameters.values()
    )[1:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return tuple(parameter.name for parameter in parameters)
