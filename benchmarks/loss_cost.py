"""Cost of advantages, weights and loss of every preset, given the log-probabilities.

Each preset is timed in turn with GRPO on the same batch, so that a busy machine slows both; the
median of the ratios is printed. The last column is the share of an update of the demo's model, 0.2
million parameters, on the same tokens: one forward and one backward pass. A whole step samples and
steps the optimizer too. CPU seconds, one thread.

    python benchmarks/loss_cost.py
"""

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turngym.agents.model import load_model, policy_logprobs
from turngym.agents.tiny import build_tiny_agent
from turngym.config import merge
from turngym.rl.algorithm import Algorithm, BoundAlgorithm, RunFacts
from turngym.rl.batch import Batch
from turngym.rl.objectives import objective
from turngym.rl.padded import batch_from_padded
from turngym.rl.plan import plan
from turngym.rl.presets import PRESETS
from turngym.types import RewardSpec

GROUPS, SIZE, TURNS, WIDTH, ROUNDS, TOPK = 16, 16, 3, 90, 15, 8
PROMPT, PASS = 24, 64
"""Tokens before the first sampled one; rows of a forward pass."""

ONLY_OUTCOME = ("ngrpo", "passk_grpo")
"""Defined on returns with a bound, or on binary ones."""


def random_batch(generator: torch.Generator) -> Batch:
    """A batch of multi-turn rows with every optional column."""
    rows = GROUPS * SIZE

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    lengths = torch.randint(TURNS, WIDTH, (rows, 1), generator=generator)
    position = torch.arange(WIDTH).expand(rows, -1)
    anchor = -2 * uniform(rows, WIDTH)
    near = {name: anchor - 0.05 * uniform(rows, WIDTH) for name in ("logp_old", "logp_ref")}
    batch = batch_from_padded(
        mask=position < lengths,
        group=torch.arange(GROUPS).repeat_interleave(SIZE),
        logp_rollout=anchor,
        rewards={"correct": (uniform(rows) < 0.5).double()},
        turn_rewards={"tool": uniform(rows, TURNS).double()},
        turn=torch.minimum(position * TURNS // lengths, torch.tensor(TURNS - 1)),
        columns=near
        | {"logp_current": anchor, "entropy": uniform(rows, WIDTH), "values": uniform(rows, WIDTH)},
    )
    return replace(
        batch,
        greedy={name: uniform(rows).double() for name in ("correct", "tool")},
        anchor_state=torch.randint(0, 4, (rows, TURNS), generator=generator),
        topk_logp=-2 - uniform(batch.num_tokens, TOPK),
        topk_ids=torch.randint(0, 99, (batch.num_tokens, TOPK), generator=generator),
        token_ids=torch.randint(0, 99, (batch.num_tokens,), generator=generator),
    )


def bind(algorithm: Algorithm) -> BoundAlgorithm:
    """The algorithm in a run with an outcome and a turn reward."""
    rubric = {
        "correct": RewardSpec(name="correct", low=0.0, high=1.0),
        "tool": RewardSpec(name="tool", level="turn", weight=0.5),
    }
    run = RunFacts(
        rubric=rubric,
        group_size=SIZE,
        max_tokens=WIDTH,
        updates=4,
        has_reference=True,
        has_critic=True,
        topk=TOPK,
    )
    if algorithm.name in ONLY_OUTCOME:
        algorithm = merge(algorithm, {"reward": {"weights": {"tool": 0.0}}})
    return algorithm.bind(run)


def seconds(bound: BoundAlgorithm, batch: Batch) -> float:
    """CPU seconds of plan, loss and its gradient with respect to the log-probabilities."""
    logp = batch.logp_rollout.clone().requires_grad_()
    index = torch.arange(batch.num_tokens)
    entropy = batch.entropy if bound.needs_entropy else None
    topk = batch.topk_logp if bound.needs_topk else None
    start = time.process_time()
    planned = plan(bound, batch)
    loss, _ = objective(bound, batch, planned, index, logp, entropy=entropy, topk_logp=topk)
    loss.backward()  # type: ignore[no-untyped-call]
    return time.process_time() - start


def update_seconds(batch: Batch, model: Any) -> float:
    """CPU seconds of a forward and a backward pass over the batch's tokens and their prompts."""
    rng = np.random.default_rng(0)
    rows, places = [], []
    for length in batch.rows.lengths.tolist():
        rows.append(rng.integers(0, 256, PROMPT + length).astype(np.int32))
        places.append(np.arange(PROMPT, PROMPT + length))
    start = time.process_time()
    for part in range(0, len(rows), PASS):
        here = slice(part, part + PASS)
        policy_logprobs(model, rows[here], places[here]).logp.sum().backward()  # type: ignore[no-untyped-call]
    return time.process_time() - start


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    batch = random_batch(torch.Generator().manual_seed(0))
    bound = {name: bind(algorithm) for name, algorithm in PRESETS.items()}
    ratios: dict[str, list[float]] = {name: [] for name in bound}
    base: list[float] = []
    for _ in range(ROUNDS):
        for name, algorithm in bound.items():
            base.append(seconds(bound["grpo"], batch))
            ratios[name].append(seconds(algorithm, batch) / base[-1])
    with tempfile.TemporaryDirectory() as folder:
        model, _ = load_model(build_tiny_agent(Path(folder) / "model"), device="cpu")
    update = statistics.median(update_seconds(batch, model) for _ in range(3))
    grpo = statistics.median(base)
    print(
        f"{batch.num_tokens} policy tokens, {batch.num_rows} rows, {PROMPT} tokens of prompt each"
    )
    print(f"grpo: {1e3 * grpo:.2f} ms; forward and backward pass: {1e3 * update:.0f} ms")
    for name, found in sorted(ratios.items(), key=lambda item: statistics.median(item[1])):
        ratio = statistics.median(found)
        print(f"{name:24} {ratio:5.2f} x grpo  {100 * ratio * grpo / update:5.2f} % of an update")


if __name__ == "__main__":
    main()
