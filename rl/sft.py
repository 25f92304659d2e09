"""Cold start: imitation of demonstrations, so that there is something for RL to amplify.

RL strengthens what a policy already samples now and then; a small model samples neither the format
nor the skill of copying. Train until the skill is there: what is missing afterwards stays missing.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from turngym.agents.model import policy_logprobs
from turngym.errors import ConfigError
from turngym.rl.batch import Batch, Context
from turngym.rl.config import SftConfig
from turngym.rl.micro import micro_batches
from turngym.rl.optim import Optimizers
from turngym.types import Group

__all__ = ["cold_start"]

Report = Callable[[int, float], None]


@dataclass
class _Shuffled:
    """Endless passes over a number of items, each pass in another seeded order."""

    count: int
    seed: int

    def __post_init__(self) -> None:
        self._order: list[int] = []
        self._passes = 0

    def take(self, count: int) -> list[int]:
        while len(self._order) < count:
            order = list(range(self.count))
            random.Random(f"{self.seed}/{self._passes}").shuffle(order)
            self._order += order
            self._passes += 1
        drawn, self._order = self._order[:count], self._order[count:]
        return drawn


def cold_start(
    model: Any,
    demos: Sequence[Group],
    config: SftConfig,
    *,
    seed: int,
    report: Report | None = None,
) -> float:
    """Fit a model to the demonstrator's tokens; the loss is their mean negative log-likelihood.

    Args:
        model: a causal LM; its trainable parameters are updated in place.
        demos: demonstrations, as rolled out with `DemoAgent`.
        config: steps, batch size, optimizer.
        seed: of the order of the demonstrations.
        report: called after every step with (steps done, loss in nats a token).

    Returns:
        The loss of the last step.

    Raises:
        ConfigError: there are fewer demonstrations than a batch holds.
    """
    batch = Batch.from_groups(demos)
    if batch.num_rows < config.batch_size:
        raise ConfigError(
            f"{batch.num_rows} demonstrations cannot fill a batch of {config.batch_size}; "
            "collect more (sft.demos) or lower sft.batch_size"
        )
    of_row: dict[int, list[int]] = {}
    for index, context in enumerate(batch.contexts):
        of_row.setdefault(context.row, []).append(index)
    optimizers = Optimizers(model, config.optim, total_steps=config.steps)
    order = _Shuffled(batch.num_rows, seed)
    loss = float("nan")
    for step in range(config.steps):
        rows = order.take(config.batch_size)
        loss = _accumulate(model, batch.contexts, [i for row in rows for i in of_row[row]], config)
        optimizers.step()
        if report is not None:
            report(step + 1, loss)
    return loss


def _accumulate(
    model: Any, contexts: Sequence[Context], chosen: Sequence[int], config: SftConfig
) -> float:
    total = sum(len(contexts[index].positions) for index in chosen)
    loss = 0.0
    for part in micro_batches(contexts, chosen, max_tokens=config.optim.micro_tokens):
        rows = [contexts[index].ids for index in part]
        positions = [contexts[index].positions for index in part]
        share = -policy_logprobs(model, rows, positions).logp.sum() / total
        share.backward()  # type: ignore[no-untyped-call]
        loss += float(share.detach())
    return loss
