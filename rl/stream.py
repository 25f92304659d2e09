"""Which task comes next: every pass over the tasks is one seeded permutation of all of them."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turngym.errors import ConfigError

__all__ = ["TaskStream"]


@dataclass
class TaskStream:
    """An endless, resumable stream of task ordinals; no task twice in one pass.

    Task `i` has the ordinal `pass * num_tasks + i`, so that another pass draws other samples of it.

    Args:
        num_tasks: tasks in the set.
        seed: of the permutations.
        position: tasks drawn so far; the whole state.
    """

    num_tasks: int
    seed: int
    position: int = 0

    def __post_init__(self) -> None:
        if self.num_tasks < 1:
            raise ConfigError("the environment has no task in this split; nothing can be trained")
        self._epoch = -1
        self._order: list[int] = []

    def take(self, count: int) -> list[int]:
        """Draw the next `count` ordinals."""
        drawn = []
        for _ in range(count):
            epoch, offset = divmod(self.position, self.num_tasks)
            if epoch != self._epoch:
                self._epoch, self._order = epoch, list(range(self.num_tasks))
                random.Random(f"{self.seed}/{epoch}").shuffle(self._order)
            drawn.append(epoch * self.num_tasks + self._order[offset])
            self.position += 1
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """Position in the stream."""
        return {"position": self.position, "num_tasks": self.num_tasks, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            ConfigError: the tasks or the seed are not those of the saved run.
        """
        if (state["num_tasks"], state["seed"]) != (self.num_tasks, self.seed):
            raise ConfigError(
                f"the checkpoint has {state['num_tasks']} tasks and seed {state['seed']}, this run "
                f"{self.num_tasks} and {self.seed}; resume with the settings it was made with"
            )
        self.position = state["position"]
