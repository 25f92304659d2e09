"""The command line: `turngym COMMAND ...`. Commands are imported when called, so help is quick."""

import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence

from turngym.config import fail, suggest
from turngym.errors import ConfigError, DataError, EnvNotFoundError, TurngymError

__all__ = ["COMMANDS", "in_flags", "main"]

COMMANDS = {
    "train": "improve an agent by reinforcement learning",
    "eval": "measure a policy on an environment's tasks",
    "rollout": "collect episodes into a folder",
    "play": "be the agent yourself",
    "envs": "list environments, or show one",
    "algorithms": "list algorithms, or show one",
    "bench": "check how far a sandbox backend can be trusted",
}

USAGE = """usage: turngym COMMAND ...

{commands}

`turngym COMMAND --help` lists a command's settings. A recipe (`@file.toml`) gives settings that
flags override, for example: turngym train @recipes/calculator.toml --seed 1
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command; exit status 0 = done, 1 = failed, 2 = wrong usage, 130 = interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS)) + 2
        lines = "\n".join(f"  {name:<{width}}{text}" for name, text in COMMANDS.items())
        print(USAGE.format(commands=lines), end="")
        raise SystemExit(0 if arguments else 2)
    if arguments[0] in ("-V", "--version"):
        import turngym

        print(f"turngym {turngym.__version__}")
        raise SystemExit(0)
    name, *rest = arguments
    prog = f"turngym {name}"
    if name not in COMMANDS:
        fail(f"unknown command {name!r}{suggest(name, list(COMMANDS))}", prog="turngym")
    command = importlib.import_module(f"turngym.cli.{name}")
    flags: Mapping[str, str] = getattr(command, "FLAGS", {})
    try:
        command.run(rest)
    except (ConfigError, DataError, EnvNotFoundError) as error:
        fail(in_flags(str(error), flags), prog=prog)
    except TurngymError as error:
        sys.stderr.write(f"{prog}: {type(error).__name__}: {in_flags(str(error), flags)}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        sys.stderr.write(f"{prog}: interrupted\n")
        raise SystemExit(130) from None
    except BrokenPipeError:  # `turngym envs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None


def in_flags(text: str, flags: Mapping[str, str]) -> str:
    """Let a message of the library speak of flags.

    >>> in_flags("on_rewrite must be 'append'; choose on_rewrite='x'", {"on_rewrite": "--rewrite"})
    "--rewrite must be 'append'; choose --rewrite x"
    """
    for name, flag in flags.items():
        text = re.sub(rf"\b{name}=(['\"]?)([^\s'\",;]+)\1", rf"{flag} \2", text)
        text = re.sub(rf"\b{name}\b", flag, text)
    return text
