"""The examples of environments and the code on their page run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("01_play.py", "tool     42"),
        ("02_register_env.py", "{'correct': 1.0}"),
        ("03_train_own_env.py", "trained model:"),
    ],
)
def test_an_example_runs(name: str, last: str) -> None:
    printed = run(f"import runpy; runpy.run_path('examples/{name}', run_name='__main__')")
    assert last in printed


@pytest.mark.slow
def test_the_code_on_the_page_about_environments_runs() -> None:
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    printed = run("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    assert printed == "What is 50 times 32?\ncalc\n"
