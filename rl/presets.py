"""`PRESETS`: every algorithm as a value, so that the family reads like a table; no torch here.

In formulas rho is the ratio to the anchor, A the advantage, |y| the policy tokens of a row; means
and sums over t run over policy tokens. `docs/algorithms.md` is the same table with its papers.
"""

import difflib
from types import MappingProxyType

from turngym.errors import ConfigError
from turngym.rl.algorithm import Algorithm
from turngym.rl.presets_classic import CLASSIC
from turngym.rl.presets_modern import MODERN

__all__ = ["PRESETS", "preset"]

PRESETS = MappingProxyType({algorithm.name: algorithm for algorithm in (*CLASSIC, *MODERN)})
"""Algorithms by name."""


def preset(name: str) -> Algorithm:
    """Return an algorithm by name.

    Raises:
        ConfigError: no preset has this name.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"no algorithm is called {name!r}{hint}")
    return PRESETS[name]
