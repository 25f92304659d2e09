"""How far rollouts may run ahead of training: a rule on numbers, without threads or clocks.

Batches count from 0. A group that is admitted after the weights of `pushed` batches have reached
the sampler has no token of older weights, so it is *due* in batch `pushed + staleness`: training it
later would break the bound. Two rules keep every group's promise without throwing any away:

* **Admission.** Groups admitted and not yet trained never exceed what the batches up to the newest
  due one can hold: (pushed + staleness + 1 - formed) * prompts.
* **Training.** The oldest finished groups train first, and a batch is formed only if the groups it
  leaves can still train in time: the i-th of them in order of need (from 0) no earlier than due in
  the (1 + i // prompts)-th batch from here.

The second can always be met once everything admitted has finished, so nothing waits for ever: the
trainer waits for a straggler only when no other batch may go before it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from turngym.errors import ConfigError

__all__ = ["Admission"]


@dataclass
class Admission:
    """Counts batches and decides who may begin and who may train.

    Args:
        prompts: groups a batch holds.
        staleness: batches trained between the weights a group begins with and its own batch; 0 =
            every batch is sampled with the newest weights.
        formed: batches handed to the trainer so far.
        pushed: batches whose weights the sampler has; `formed` once it is in step.
    """

    prompts: int
    staleness: int
    formed: int = 0
    pushed: int = 0

    def __post_init__(self) -> None:
        if self.prompts < 1 or self.staleness < 0:
            raise ConfigError(
                "prompts must be at least 1 and staleness not negative, got "
                f"{self.prompts} and {self.staleness}"
            )

    @property
    def due(self) -> int:
        """Batch in which a group admitted now has to train at the latest."""
        return self.pushed + self.staleness

    def room(self, outstanding: int, *, left: int | None = None) -> int:
        """Return how many more groups may be admitted.

        Args:
            outstanding: groups admitted, and neither trained nor rejected.
            left: batches that will still be formed; None = no end in sight.
        """
        ahead = self.due + 1 - self.formed
        ahead = ahead if left is None else min(ahead, left)
        return max(0, ahead * self.prompts - outstanding)

    def fits(self, due: Iterable[int]) -> bool:
        """Tell whether groups that the next batch leaves behind can all still train in time.

        Args:
            due: the batch in which each of them is due.
        """
        return all(
            batch >= self.formed + 1 + place // self.prompts
            for place, batch in enumerate(sorted(due))
        )
