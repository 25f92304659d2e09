import subprocess
import sys

import pytest

from turngym.sandboxes.executor import ExitSafeExecutor

AT_EXIT = """
import asyncio, atexit, sys, threading
from turngym.sandboxes.executor import ExitSafeExecutor

loop, threads = asyncio.new_event_loop(), ExitSafeExecutor(2)
def call():
    return loop.run_until_complete(loop.run_in_executor(threads, threading.current_thread)).name
def last():
    print(call() == "MainThread")
    try:
        threads.submit(int, "x").result()
    except ValueError as error:
        print(error)
print(call() == "MainThread", flush=True)
atexit.register(last)
"""


def test_calls_are_made_in_threads_and_at_exit_in_turn() -> None:
    run = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True)
    want = "False\nTrue\ninvalid literal for int() with base 10: 'x'\n"
    assert (run.stdout, run.stderr, run.returncode) == (want, "", 0)


def test_an_error_of_the_call_itself_is_its_result() -> None:
    def fail() -> None:
        raise RuntimeError("mine")

    with ExitSafeExecutor(1) as threads, pytest.raises(RuntimeError, match="mine"):
        threads.submit(fail).result()
