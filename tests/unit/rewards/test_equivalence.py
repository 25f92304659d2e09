import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from turngym.errors import RewardError
from turngym.rewards.equivalence import Verdict, accuracy, averify, close, verify

ROOT = Path(__file__).resolve().parents[3]
CASES = Path(os.environ.get("TURNGYM_SHARED", ROOT.parent / "shared")) / "cases" / "math_verify"

# A triple integral, which goes to computer algebra and keeps it busy for half a minute.
SLOW = r"\boxed{\int_0^1 \int_0^1 \int_0^1 e^{xyz} \, dx \, dy \, dz}"


def load() -> list[dict[str, Any]]:
    if not CASES.is_dir():
        return []
    cases = []
    with open(CASES / "shared.jsonl", encoding="utf-8") as lines:
        for line in lines:
            case = json.loads(line)
            for field in ("gold", "prediction"):
                if recipe := case.get(f"{field}_gen"):
                    body = recipe["unit"] * recipe["times"]
                    case[field] = recipe["prefix"] + body + recipe["suffix"]
            cases.append(case)
    return cases


ROWS = load()
COSTLY = [row for row in ROWS if "max_seconds" in row]


@pytest.fixture(scope="module", autouse=True)
def _end_the_workers() -> Iterator[None]:
    yield
    close()


def in_thread(work: Callable[[], Verdict]) -> Verdict:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result()


def run_in(row: dict[str, Any], work: Callable[[], Verdict]) -> Verdict:
    """Score a row from where it says."""
    match row["run_in"]:
        case "thread":
            return in_thread(work)
        case "asyncio_to_thread":
            return asyncio.run(asyncio.to_thread(work))
        case "pool_200":
            with ThreadPoolExecutor(200) as threads:
                verdicts = list(threads.map(lambda _: work(), range(200)))
            assert len({verdict.verdict for verdict in verdicts}) == 1
            return verdicts[-1]
        case "after_timeout":
            assert verify(SLOW, "5", deadline_s=0.3).verdict == "timeout"
            return work()
    return work()


@pytest.mark.skipif(not ROWS, reason="no shared cases; set TURNGYM_SHARED to their folder")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row["id"]))
def test_a_shared_row_gets_its_verdict_in_time(row: dict[str, Any]) -> None:
    def work() -> Verdict:
        return verify(
            row["prediction"],
            row["gold"],
            deadline_s=row.get("max_seconds", 10.0),
            fallback=row.get("needs") == "fallback_extraction",
        )

    verdict = run_in(row, work)
    agrees = (verdict.verdict == "right") == row["expected"]
    if row["contested"] and not agrees:
        pytest.skip(f"contested: got {verdict.verdict} ({verdict.detail})")
    assert agrees, verdict
    assert verdict.verdict != "timeout"
    assert verdict.seconds <= row.get("max_seconds", 10.0) + 0.3


def within_a_second(row: dict[str, Any], verdict: Verdict) -> None:
    assert verdict.seconds <= 1.3, row["id"]
    right = verdict.verdict == "right"
    assert verdict.verdict == "timeout" or right == row["expected"], (row["id"], verdict)


@pytest.mark.skipif(not ROWS, reason="no shared cases; set TURNGYM_SHARED to their folder")
@pytest.mark.parametrize("where", ["main", "thread", "asyncio"])
def test_costly_rows_keep_a_deadline_of_a_second(where: str) -> None:
    async def all_at_once() -> list[Verdict]:
        rows = [COSTLY[k % len(COSTLY)] for k in range(32)]
        calls = [averify(row["prediction"], row["gold"], deadline_s=1.0) for row in rows]
        return list(await asyncio.gather(*calls))

    if where == "asyncio":
        for k, verdict in enumerate(asyncio.run(all_at_once())):
            within_a_second(COSTLY[k % len(COSTLY)], verdict)
    for row in COSTLY if where != "asyncio" else ():

        def work(row: dict[str, Any] = row) -> Verdict:
            return verify(row["prediction"], row["gold"], deadline_s=1.0)

        within_a_second(row, in_thread(work) if where == "thread" else work())
    assert verify(r"\boxed{5}", "5").verdict == "right"


def test_a_verdict_says_why_and_how_long() -> None:
    verdict = verify(r"\boxed{\frac{1}{3}}", "0.5")
    assert verdict.verdict == "wrong"
    assert verdict.detail == "different values"
    assert 0 < verdict.seconds < 5
    assert verify(None, "5").verdict == "no_answer"
    assert verify("64, 27", "27 and 64", extract=False).verdict == "right"


def test_a_case_that_outlives_its_deadline_is_killed_and_the_next_one_scores() -> None:
    verify(r"\boxed{5}", "5")
    start = time.monotonic()
    verdict = verify(SLOW, "5", deadline_s=0.5)
    assert verdict.verdict == "timeout"
    assert time.monotonic() - start < 0.5 + 0.3 + verdict.queued_s
    assert verify(r"\boxed{5}", "5").verdict == "right"


def test_waiting_for_a_worker_does_not_count() -> None:
    async def burst() -> list[Verdict]:
        calls = [averify(SLOW if k < 6 else r"\boxed{5}", "5", deadline_s=0.5) for k in range(32)]
        return list(await asyncio.gather(*calls))

    verdicts = asyncio.run(burst())
    assert [verdict.verdict for verdict in verdicts] == ["timeout"] * 6 + ["right"] * 26
    assert max(verdict.seconds for verdict in verdicts) <= 0.8


def test_the_callers_alarm_and_handlers_are_left_alone() -> None:
    def handler(signum: int, frame: object) -> None:
        raise AssertionError("the alarm went off")

    before = signal.signal(signal.SIGALRM, handler)
    child = signal.getsignal(signal.SIGCHLD)
    try:
        signal.alarm(60)  # noqa: TID251 - the caller's own
        verify(SLOW, "5", deadline_s=0.3)
        verify(r"\boxed{5}", "5")
        assert 50 < signal.alarm(0) <= 60  # noqa: TID251 - the caller's own
        assert signal.getsignal(signal.SIGALRM) is handler
        assert signal.getsignal(signal.SIGCHLD) == child
    finally:
        signal.alarm(0)  # noqa: TID251 - the caller's own
        signal.signal(signal.SIGALRM, before)


def descendants(pid: int) -> dict[int, str]:
    """State of every process below another, by pid."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = (int(fields[1]), fields[0])
    found: dict[int, str] = {}
    grown = True
    while grown:
        below = {
            child: state
            for child, (parent, state) in parents.items()
            if (parent == pid or parent in found) and child not in found
        }
        found |= below
        grown = bool(below)
    return found


def test_no_zombie_is_left_after_a_kill() -> None:
    for _ in range(3):
        assert verify(SLOW, "5", deadline_s=0.2).verdict == "timeout"
    assert "Z" not in descendants(os.getpid()).values()


def script(body: str) -> "subprocess.Popen[str]":
    source = "from turngym.rewards.equivalence import *\nimport os, threading, time\n"
    return subprocess.Popen(
        [sys.executable, "-c", source + textwrap.dedent(body)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )


def gone(pids: set[int], within_s: float) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        states = [_state(pid) for pid in pids]
        if all(state in ("", "Z", "X") for state in states):
            return True
        time.sleep(0.02)
    return False


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.mark.parametrize("busy", [False, True])
def test_nothing_outlives_a_caller_that_is_killed(busy: bool) -> None:
    process = script(
        f"""
        print(verify(r"\\boxed{{5}}", "5").verdict, flush=True)
        if {busy}:
            threading.Thread(target=verify, args=({SLOW!r}, "5"), daemon=True).start()
        time.sleep(1)
        print("ready", flush=True)
        time.sleep(60)
        """
    )
    assert process.stdout is not None
    assert [process.stdout.readline().strip() for _ in range(2)] == ["right", "ready"]
    below = set(descendants(process.pid))
    assert len(below) >= 2
    process.kill()
    process.wait()
    process.stdout.close()
    assert gone(below, 5.0)


def test_nothing_is_left_after_a_normal_exit() -> None:
    process = script(
        """
        print(verify(r"\\boxed{5}", "5").verdict, flush=True)
        time.sleep(0.5)
        """
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "right"
    below = set(descendants(process.pid))
    assert process.wait(timeout=30) == 0
    process.stdout.close()
    assert below
    assert gone(below, 5.0)


def test_a_forked_process_gets_the_same_verdicts_from_workers_of_its_own() -> None:
    process = script(
        """
        assert verify(r"\\boxed{5}", "5").verdict == "right"
        pid = os.fork()
        if pid == 0:
            verdicts = [verify(r"\\boxed{5}", gold).verdict for gold in ("5", "6")]
            print("child", *verdicts, flush=True)
            close()
            os._exit(0)
        os.waitpid(pid, 0)
        print("parent", verify(r"\\boxed{5}", "5").verdict, flush=True)
        """
    )
    output, _ = process.communicate(timeout=60)
    assert output.split() == ["child", "right", "wrong", "parent", "right"]


def test_verdicts_are_the_same_from_every_place() -> None:
    cases = [(r"\boxed{0.5}", r"\frac12"), (r"\boxed{3}", "4"), ("none", "4"), ("", "")]

    async def awaited() -> list[str]:
        return [(await averify(*case)).verdict for case in cases]

    def called() -> list[str]:
        return [verify(*case).verdict for case in cases]

    from_thread: list[str] = []
    thread = threading.Thread(target=lambda: from_thread.extend(called()))
    thread.start()
    thread.join()
    expected = ["right", "wrong", "no_answer", "error"]
    assert called() == asyncio.run(awaited()) == from_thread == expected


def test_accuracy_pays_right_answers_only_and_never_turns_a_fault_into_zero() -> None:
    assert accuracy(Verdict(verdict="right")) == 1.0
    assert accuracy(Verdict(verdict="wrong")) == accuracy(Verdict(verdict="no_answer")) == 0.0
    assert accuracy(Verdict(verdict="timeout")) is None
    assert accuracy(Verdict(verdict="timeout"), timeout=0.0) == 0.0
    with pytest.raises(RewardError, match="gold answer is empty"):
        accuracy(verify(r"\boxed{5}", ""))


def test_gold_that_is_no_text_is_refused() -> None:
    with pytest.raises(TypeError, match=r"pass str\(gold\)"):
        verify(r"\boxed{5}", 5)  # type: ignore[arg-type]


def test_importing_the_rewards_brings_no_computer_algebra_into_the_caller() -> None:
    process = script(
        "import sys; print(sorted({'sympy', 'mpmath', 'math_verify'} & {*sys.modules}))"
    )
    assert process.communicate(timeout=60)[0].strip() == "[]"


def test_an_interrupted_call_gives_its_place_back() -> None:
    process = script(
        f"""
        import signal
        from turngym.rewards.equivalence import configure
        configure(size=1)
        verify(r"\\boxed{{5}}", "5")
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            verify({SLOW!r}, "5", deadline_s=30)
        except KeyboardInterrupt:
            print("interrupted", verify(r"\\boxed{{5}}", "5").verdict)
        """
    )
    assert process.communicate(timeout=60)[0].split() == ["interrupted", "right"]


def test_lone_surrogates_reach_the_worker() -> None:
    assert verify("\ud800 \\boxed{5}", "5").verdict == "right"
