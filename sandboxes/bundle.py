"""Pack the modules of `turngym.sandboxes.inside` into one program text.

The program needs no file and no installed turngym: it builds the modules from source it carries,
under their own names, and takes them out of `sys.modules` again once they are linked.
"""

import ast
import base64
import functools
import importlib.util
import json
import zlib
from pathlib import Path
from typing import Any

__all__ = ["container_program", "program"]

_PREFIX = "turngym.sandboxes.inside."

_LOADER = """\
import base64, builtins, json, sys, types, zlib
SOURCES = json.loads(zlib.decompress(base64.b85decode({sources!r})))
for name in ("turngym", "turngym.sandboxes", "turngym.sandboxes.inside", *SOURCES):
    module = sys.modules[name] = types.ModuleType(name)
    # Own builtins: code that patches the builtins module does not reach the driver.
    module.__dict__["__builtins__"] = dict(vars(builtins))
    exec(compile(SOURCES.get(name, ""), "<" + name + ">", "exec"), module.__dict__)
for name in [name for name in sys.modules if name.split(".")[0] == "turngym"]:
    del sys.modules[name]
module.main({config!r})
"""


def program(entry: str, config: dict[str, Any]) -> str:
    """Return a Python program that calls `main(config)` of the module `inside.<entry>`.

    Args:
        entry: name of a module in `turngym.sandboxes.inside`.
        config: literals only, they travel as their `repr`.
    """
    return _LOADER.format(sources=_packed(entry), config=config)


def container_program() -> str:
    """Return the driver of a container, to be run as ``python3 -I -c PROGRAM``.

    How to speak to it is written in `turngym.sandboxes.inside.init`.
    """
    return program("container", {})


@functools.cache
def _packed(entry: str) -> str:
    """The sources as text; packed, since one argument may have 131,072 bytes."""
    return base64.b85encode(zlib.compress(json.dumps(_sources(entry)).encode(), 9)).decode()


def _sources(entry: str) -> dict[str, str]:
    """Sources of `entry` and what it imports from `inside`, dependencies first."""
    folder = Path(str(importlib.util.find_spec(_PREFIX + "frames").origin)).parent  # type: ignore[union-attr]
    found: dict[str, str] = {}

    def visit(name: str) -> None:
        text = (folder / f"{name}.py").read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_PREFIX):
                below = str(node.module).removeprefix(_PREFIX)
                if _PREFIX + below not in found:
                    visit(below)
        found[_PREFIX + name] = text

    visit(entry)
    return found
