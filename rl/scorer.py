"""Passes without gradient over a batch: what the current weights think of its sampled tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from turngym.agents.model import LogProbs, policy_logprobs
from turngym.rl.batch import Batch
from turngym.rl.micro import micro_batches
from turngym.rl.parallel import Ranks

__all__ = ["Scorer"]

Column = Literal["logp", "entropy", "certainty"]


@dataclass(slots=True)
class Scorer:
    """Scores contexts of a batch in micro-batches, each process its share.

    Args:
        max_tokens: most tokens of one pass, padding included.
        temperature: at which the policy sampled.
        ranks: the processes that train together.
    """

    max_tokens: int
    temperature: float
    ranks: Ranks

    def forward(self, model: Any, batch: Batch, part: Sequence[int], **options: Any) -> LogProbs:
        """Score the contexts of one pass; options are those of `policy_logprobs`."""
        return policy_logprobs(
            model,
            [batch.contexts[i].ids for i in part],
            [batch.contexts[i].positions for i in part],
            temperature=self.temperature,
            **options,
        )

    @torch.no_grad()
    def columns(
        self, model: Any, batch: Batch, chosen: Sequence[int], *names: Column
    ) -> dict[Column, Tensor]:
        """Score the sampled tokens of some contexts; tokens of the others are 0.

        Args:
            model: the policy, or the reference.
            batch: of N tokens.
            chosen: indices of contexts.
            names: what to return.

        Returns:
            Token columns by name, (N,) each, equal on all processes.
        """
        found = {name: torch.zeros(batch.num_tokens, dtype=batch.dtype) for name in names}
        passes = micro_batches(batch.contexts, chosen, max_tokens=self.max_tokens)
        for part in self.ranks.share(passes):
            index = batch.tokens_of(part)
            scored = self.forward(
                model,
                batch,
                part,
                with_entropy="entropy" in names,
                with_certainty="certainty" in names,
            )
            for name, column in found.items():
                column[index] = getattr(scored, name).to(column)
        return {name: self.ranks.sum(column) for name, column in found.items()}
