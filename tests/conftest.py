import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def pytest_configure() -> None:
    """Heed Ctrl-C, which a shell has its background jobs ignore, and whatever they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared cases, data and goldens; tests that need it skip where it is absent."""
    folder = Path(os.environ.get("TURNGYM_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no shared cases at {folder}; set TURNGYM_SHARED to their folder")
    return folder


FIRST_IN_LINE = -15


@pytest.fixture(scope="module")
def first_in_line() -> Iterator[None]:
    """Put this process, and what it starts, before others, so that a busy machine disturbs less.

    Only root may; for others nothing changes.
    """
    before = os.getpriority(os.PRIO_PROCESS, 0)
    if os.geteuid() == 0:
        os.setpriority(os.PRIO_PROCESS, 0, FIRST_IN_LINE)
    yield
    if os.geteuid() == 0:
        os.setpriority(os.PRIO_PROCESS, 0, before)
