import signal
import subprocess
import sys
import time
import uuid

import pytest

from turngym.sandboxes.checking.leaks import gone_within

SCRIPT = """
import sys, warnings
from turngym.sandboxes import SandboxDegradedWarning, SyncSandbox
warnings.simplefilter("ignore", SandboxDegradedWarning)
_, isolation, mark, end = sys.argv
make = lambda: SyncSandbox("local", preload=(), isolation=isolation, env={"MARK": mark})
sandbox = make()
session = sandbox.session()
assert session.execute("6 * 7").result == "42"
print("open", flush=True)
exec(end)
"""
ENDS = {"pass": 0, "sys.exit(3)": 3, "raise KeyboardInterrupt": -signal.SIGINT}
BUSY = ["session.execute('while True: pass', 600)", "[make() for _ in range(200)]"]


def run(isolation: str, end: str, *, interrupt: bool) -> tuple[int, str]:
    """Code and stderr of a process that ends with an open sandbox, which must leave nothing."""
    mark = f"turngym-test-{uuid.uuid4().hex}"
    command = [sys.executable, "-W", "default", "-c", SCRIPT, isolation, mark, end]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        if interrupt:
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert gone_within(mark, 2.0) == {}
    return process.returncode, said.decode()


def only_interrupted(said: str) -> bool:
    return said.count("Traceback") == 1 and said.endswith("\nKeyboardInterrupt\n")


@pytest.mark.parametrize("isolation", ["auto", "none"])
@pytest.mark.parametrize("end", ENDS)
def test_a_process_may_end_without_closing_its_sandbox(isolation: str, end: str) -> None:
    code, said = run(isolation, end, interrupt=False)
    assert code == ENDS[end]
    assert only_interrupted(said) if code < 0 else said == ""


@pytest.mark.parametrize("end", BUSY)
def test_an_interrupt_ends_a_process_amid_a_cell_or_a_start(end: str) -> None:
    code, said = run("auto", end, interrupt=True)
    assert code == -signal.SIGINT
    assert only_interrupted(said), said
