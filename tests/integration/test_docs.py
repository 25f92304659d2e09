"""Every Python block of the README and the docs runs; blocks of a page share their names.

Blocks marked `py` need an engine or a key; `>>>` ones are doctests and run as such elsewhere.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [block for block in found if not block.startswith(">>>")]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda p: p.name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks(page)), encoding="utf-8")
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=env,
        cwd=tmp_path,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert not broken


def test_the_example_of_the_main_job_stays_short() -> None:
    lines = (ROOT / "examples" / "03_train_own_env.py").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.strip()]) < 60
