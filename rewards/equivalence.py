r"""Mathematical equivalence of a response and a gold answer, in killable worker processes.

    verify(r"… so the answer is \boxed{\frac12}", "0.5").verdict        "right"
    await averify(response, gold, deadline_s=1.0)                       from asyncio

The verdict is the same from the main thread, any other thread, asyncio and a forked process.
Grading cannot hang the caller: a call that outlives its deadline is killed with its process.
"""

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from turngym.errors import RewardError
from turngym.rewards.workers import Outcome, WorkerPool

__all__ = ["Verdict", "accuracy", "averify", "close", "configure", "verify"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a response is right, and how long it took to tell."""

    verdict: Literal["right", "wrong", "no_answer", "timeout", "error"]
    """`no_answer`: nothing outside the reasoning states a complete answer. `timeout`: the worker
    ran out of time or memory. `error`: gold cannot be checked, or the grader itself failed."""

    seconds: float = 0.0
    """From the worker's start on the case to its end."""

    queued_s: float = 0.0
    """From the call to the worker's start on it."""

    detail: str = ""
    """The reason, for people."""


_TARGET = "turngym.rewards.maths.worker:grade"
_PROBE: Mapping[str, Any] = {"prediction": r"\boxed{\frac{1}{2}}", "gold": "0.5"}
_pool: WorkerPool | None = None
_lock = threading.Lock()


def _after_fork() -> None:
    """Another thread may have held the lock when this process was forked."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def configure(
    *, size: int | None = None, memory_mb: int = 1024, recycle_after: int = 5_000
) -> None:
    """Replace the worker pool of this process.

    Args:
        size: workers at most; as many as CPUs, at most 8, when None.
        memory_mb: memory a worker may take on top of its imports.
        recycle_after: verdicts after which a worker is replaced.

    Raises:
        ConfigError: a limit that is not positive.
    """
    global _pool
    fresh = _new_pool(size, memory_mb, recycle_after)
    with _lock:
        _pool, old = fresh, _pool
    if old is not None:
        old.close()


def _new_pool(
    size: int | None = None, memory_mb: int = 1024, recycle_after: int = 5_000
) -> WorkerPool:
    return WorkerPool(
        _TARGET,
        size=size if size is not None else min(8, len(os.sched_getaffinity(0))),
        memory_mb=memory_mb,
        recycle_after=recycle_after,
        probe=_PROBE,
    )


def close() -> None:
    """End the workers; the next verdict starts new ones."""
    if _pool is not None:
        _pool.close()


def _default() -> WorkerPool:
    global _pool
    with _lock:
        if _pool is None:
            _pool = _new_pool()
        return _pool


def verify(
    prediction: str | None,
    gold: str,
    *,
    deadline_s: float = 5.0,
    extract: bool = True,
    fallback: bool = False,
) -> Verdict:
    r"""Compare a response with the gold answer; blocks until there is a verdict.

    Args:
        prediction: the response, reasoning included, or just the answer when `extract` is false.
        gold: the gold answer, bare, boxed or after `####`.
        deadline_s: seconds a worker may spend on the case; waiting for a worker does not count.
        extract: look for the answer's mark: the last complete `\boxed{…}`, `<answer>` or `####`
            outside the reasoning (see `turngym.rewards.extract`).
        fallback: without a mark, accept "the answer is …".

    Raises:
        ConfigError: a deadline that is not positive.
        TypeError: gold is not text.
    """
    arguments = _arguments(prediction, gold, extract, fallback)
    try:
        return _verdict(_default().run(arguments, deadline_s=deadline_s))
    except RewardError as error:
        return Verdict(verdict="error", detail=str(error))


async def averify(
    prediction: str | None,
    gold: str,
    *,
    deadline_s: float = 5.0,
    extract: bool = True,
    fallback: bool = False,
) -> Verdict:
    """Compare a response with the gold answer without blocking the event loop; see `verify`."""
    arguments = _arguments(prediction, gold, extract, fallback)
    try:
        return _verdict(await _default().arun(arguments, deadline_s=deadline_s))
    except RewardError as error:
        return Verdict(verdict="error", detail=str(error))


def _arguments(prediction: str | None, gold: str, extract: bool, fallback: bool) -> dict[str, Any]:
    if not isinstance(gold, str):
        raise TypeError(f"gold must be text, got {type(gold).__name__}; pass str(gold)")
    return {"prediction": prediction, "gold": gold, "extract": extract, "fallback": fallback}


def _verdict(outcome: Outcome) -> Verdict:
    times = {"seconds": outcome.seconds, "queued_s": outcome.queued_s}
    if outcome.status == "done":
        verdict, detail = outcome.result
        return Verdict(verdict=verdict, detail=detail, **times)
    if outcome.status == "error":
        return Verdict(verdict="error", detail=outcome.detail, **times)
    return Verdict(verdict="timeout", detail=outcome.detail, **times)


def accuracy(verdict: Verdict, *, timeout: float | None = None) -> float | None:
    """Turn a verdict into a reward: 1 for right, 0 for wrong and for no answer.

    Args:
        verdict: what `verify` returned.
        timeout: reward of an answer that could not be checked in time; None abstains.

    Raises:
        RewardError: the verdict is an error, which is nobody's wrong answer.

    >>> accuracy(Verdict(verdict="right")), accuracy(Verdict(verdict="no_answer"))
    (1.0, 0.0)
    """
    match verdict.verdict:
        case "right":
            return 1.0
        case "wrong" | "no_answer":
            return 0.0
        case "timeout":
            return timeout
    raise RewardError(f"no verdict: {verdict.detail}")
