import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("agents", "envs", "rewards", "rl", "sandboxes")


@pytest.mark.parametrize("name", PACKAGES)
def test_the_umbrella_links_to_every_package(name: str) -> None:
    link = ROOT / "src" / "turngym" / name
    assert link.resolve() == ROOT / name, f"{link} should be a link to ../../{name}"


def test_no_source_file_is_loaded_under_two_names() -> None:
    names: dict[Path, str] = {}
    for name, module in sorted(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "/").resolve()
        if any(file.is_relative_to(ROOT / package) for package in PACKAGES):
            assert names.setdefault(file, name) == name


def test_importing_turngym_stays_light() -> None:
    code = (
        "import sys, turngym; heavy = {'torch', 'transformers', 'vllm', 'docker', 'e2b', 'sympy'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_modules_and_functions_stay_small() -> None:
    import ast

    long: list[str] = []
    for package in (*PACKAGES, "src/turngym/cli"):
        for file in sorted((ROOT / package).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            if (lines := text.count("\n")) > 400:
                long.append(f"{file.relative_to(ROOT)}: {lines} lines")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    size = (node.end_lineno or node.lineno) - node.lineno
                    if size > 60:
                        long.append(f"{file.relative_to(ROOT)}:{node.lineno} {node.name}: {size}")
    assert not long
