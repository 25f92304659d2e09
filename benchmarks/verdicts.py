"""Maths verdicts a second: killable workers against math-verify called directly.

    python benchmarks/verdicts.py [--pairs 60] [--rounds 5]

Both score the same pairs, one after the other, from the main thread, in alternating rounds; the
ratio is the median over the rounds. `pooled` sends all pairs to the workers at once.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable

from math_verify import parse, verify

from turngym.rewards import equivalence

GOLDS = [
    r"\frac{3}{4}", "70,000", r"2\sqrt{3}", r"\{1, 2, 3\}", "(1, -2)", r"[0, \infty)", "x^2+2x+1",
    r"\frac{1+\sqrt5}{2}", r"3\pi", "12", "-0.5", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
]  # fmt: skip


def pairs(count: int) -> list[tuple[str, str]]:
    """Responses and gold answers; every other response is right."""
    draw = random.Random(0)
    found = []
    for k in range(count):
        gold = draw.choice(GOLDS)
        answer = gold if k % 2 else draw.choice(GOLDS)
        found.append((rf"Step by step, the answer is $\boxed{{ {answer} }}$.", gold))
    return found


def direct(cases: list[tuple[str, str]]) -> None:
    """Score with math-verify as its documentation shows."""
    for response, gold in cases:
        verify(parse(f"${gold}$"), parse(response))


def workers(cases: list[tuple[str, str]]) -> None:
    """Score one by one in worker processes."""
    for response, gold in cases:
        equivalence.verify(response, gold)


def pooled(cases: list[tuple[str, str]]) -> None:
    """Score all at once in worker processes."""

    async def everything() -> None:
        await asyncio.gather(*[equivalence.averify(*case) for case in cases])

    asyncio.run(everything())


def rate(score: Callable[[list[tuple[str, str]]], None], cases: list[tuple[str, str]]) -> float:
    """Verdicts a second."""
    start = time.perf_counter()
    score(cases)
    return len(cases) / (time.perf_counter() - start)


def main() -> None:
    """Print the rates and their ratios."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--pairs", type=int, default=60)
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    cases = pairs(options.pairs)
    for score in (direct, workers, pooled):
        score(cases[:12])
    rounds = [
        {score.__name__: rate(score, cases) for score in (direct, workers, pooled)}
        for _ in range(options.rounds)
    ]
    for name in ("direct", "workers", "pooled"):
        rates = [row[name] for row in rounds]
        ratios = [row[name] / row["direct"] for row in rounds]
        print(
            f"{name:8} {statistics.median(rates):9.0f} verdicts/s   "
            f"{statistics.median(ratios):6.2f} x direct"
        )
    equivalence.close()


if __name__ == "__main__":
    main()
