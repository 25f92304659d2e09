"""`turngym bench sandbox --backend local`: run the contract and hostile programs against it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from turngym.cli.console import out, setup_logging
from turngym.config import parse_flags
from turngym.errors import ConfigError

__all__ = ["run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """Check what a sandbox backend holds back, with a table of every check."""

    what: Annotated[Literal["sandbox"], tyro.conf.Positional] = "sandbox"
    """What to check."""

    backend: str = "local"
    """local, docker or e2b."""

    isolation: Literal["auto", "strict", "none"] | None = None
    """Of the local backend; none shows what the suite finds without confinement."""

    attacks: Path | None = None
    """JSON Lines file with further hostile programs."""


def run(argv: Sequence[str]) -> None:
    """Run the command; exit status 1 when a check failed."""
    setup_logging()
    config = parse_flags(BenchConfig(), argv, prog="turngym bench")
    from turngym.sandboxes import check_sandbox

    if config.attacks is not None and not config.attacks.is_file():
        raise ConfigError(f"--attacks {config.attacks} is no file")
    options = {} if config.isolation is None else {"isolation": config.isolation}
    report = check_sandbox(config.backend, attacks=config.attacks, **options)
    out.print(report.table(), markup=False)
    if not report.ok:
        raise SystemExit(1)
