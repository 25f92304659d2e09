import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from turngym.sandboxes import check_sandbox
from turngym.sandboxes.checking.contract import CHECKS

ROOT = Path(__file__).resolve().parents[2]
AS_USER = ROOT / "tests" / "support" / "as_user.py"
SUITE = """
import json, sys, warnings
warnings.simplefilter("ignore")
{setup}
from turngym.sandboxes import check_sandbox
report = check_sandbox("local", attacks=sys.argv[1] or None, isolation={isolation!r})
bad = [[row.name, row.verdict, row.detail] for row in report.failed]
untold = [row.name for row in report.rows if row.detail.startswith("too busy a machine")]
json.dump({{"level": report.guarantees.level, "bad": bad, "rows": len(report.rows),
           "passed": report.count("pass") + len(untold), "untold": len(untold)}}, sys.stdout)
"""
WITHOUT_NAMESPACES = "from turngym.sandboxes.inside.seccomp import install; install()"

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")


def suite(
    shared: Path, *, user: int | None = None, setup: str = "", isolation: str = "auto"
) -> dict[str, Any]:
    """Run the whole suite in another process; the report as plain data."""
    command = [sys.executable, "-c", SUITE.format(setup=setup, isolation=isolation)]
    if user is not None:
        command = [sys.executable, str(AS_USER), str(user), *command]
    if os.geteuid() == 0:
        command = ["nice", "-n", "-15", *command]  # a busy machine then disturbs less
    command.append(str(shared / "cases" / "sandbox" / "attacks.jsonl"))
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(command, capture_output=True, text=True, cwd="/", env=env)
    assert run.returncode == 0, run.stderr[-3000:]
    found = dict(json.loads(run.stdout))
    assert found["untold"] < 20
    return found


def test_the_local_backend_keeps_the_contract() -> None:
    report = check_sandbox("local", only=CHECKS, preload=())
    assert report.ok, report.table()
    assert report.count("pass") == len(CHECKS)
    assert report.table().startswith("sandbox local, level namespaces: ")


@pytest.mark.slow
def test_no_program_gets_out_of_the_local_backend(shared: Path) -> None:
    found = suite(shared, isolation="strict")
    assert (found["level"], found["bad"]) == ("namespaces", [])
    assert found["passed"] == found["rows"]


@needs_root
@pytest.mark.slow
def test_no_program_gets_out_when_an_ordinary_user_runs_it(shared: Path) -> None:
    found = suite(shared, user=12345, isolation="strict")
    assert (found["level"], found["bad"]) == ("namespaces", [])
    assert found["passed"] == found["rows"]


@needs_root
@pytest.mark.slow
@pytest.mark.parametrize("user", [0, 12345])
def test_no_program_gets_out_where_namespaces_are_forbidden(shared: Path, user: int) -> None:
    found = suite(shared, user=user, setup=WITHOUT_NAMESPACES)
    assert (found["level"], found["bad"]) == ("landlock", [])
    assert found["passed"] > 150


def test_without_confinement_the_suite_reports_breaches() -> None:
    report = check_sandbox("local", isolation="none", preload=())
    assert not report.ok
    breached = {row.name for row in report.breached}
    assert breached >= {
        "loopback_tcp",
        "loopback_udp",
        "unix_socket",
        "abstract_socket",
        "reads_the_host_file",
        "reads_it_through_a_link",
        "sees_the_host_process",
        "capabilities_and_flags",
    }
