import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared cases, data and goldens; tests that need it skip where it is absent."""
    folder = Path(os.environ.get("TURNGYM_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no shared cases at {folder}; set TURNGYM_SHARED to their folder")
    return folder
