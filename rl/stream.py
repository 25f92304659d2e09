"""Which task comes next: every pass over the tasks is one seeded permutation of all of them."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Any

from turngym.errors import ConfigError

__all__ = ["MixedStream", "TaskStream"]


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


class MixedStream:
    """Streams of several task sets, dealt in turn in fixed proportions, as evenly as they allow.

    Its ordinals are those of a `MixedSource`. Every group that is drawn trains, so the proportions
    hold for what is trained however slow an environment is: it is never starved, nor do its long
    episodes keep the others from their share.

    Args:
        sizes: tasks of each set.
        weights: share of each, relative to the others.
        seed: of the permutations.

    Raises:
        ConfigError: a set is empty, or a weight is not positive.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        for weight in weights:
            if not 0 < weight < float("inf"):
                raise ConfigError(f"weights of a mix must be positive and finite, got {weight}")
        self.seed = seed
        self.position = 0
        self._streams = [TaskStream(size, seed) for size in sizes]
        self._turns = _round(weights)

    def take(self, count: int) -> list[int]:
        """Draw the next `count` ordinals."""
        drawn = []
        for _ in range(count):
            rounds, turn = divmod(self.position, len(self._turns))
            kind = self._turns[turn]
            stream = self._streams[kind]
            stream.position = rounds * self._turns.count(kind) + self._turns[:turn].count(kind)
            drawn.append(stream.take(1)[0] * len(self._streams) + kind)
            self.position += 1
        return drawn

    def _facts(self) -> dict[str, Any]:
        sizes = [stream.num_tasks for stream in self._streams]
        return {"num_tasks": sizes, "turns": self._turns, "seed": self.seed}

    def state_dict(self) -> dict[str, Any]:
        """Position in the stream."""
        return {"position": self.position, **self._facts()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            ConfigError: the tasks, the proportions or the seed are not those of the saved run.
        """
        saved = {name: value for name, value in state.items() if name != "position"}
        if saved != self._facts():
            raise ConfigError(
                f"the checkpoint has the mix {saved}, this run {self._facts()}; resume with the "
                "settings it was made with"
            )
        self.position = state["position"]


def _round(weights: Sequence[float], *, finest: int = 100) -> list[int]:
    """Return the shortest sequence of places that holds each in proportion, spread evenly.

    Every step goes to the place that is furthest behind its share (smooth weighted round robin).
    """
    least = min(weights)
    parts = [Fraction(weight / least).limit_denominator(finest) for weight in weights]
    unit = lcm(*(part.denominator for part in parts))
    shares = [int(part * unit) for part in parts]
    credit = [0] * len(shares)
    turns = []
    for _ in range(sum(shares)):
        credit = [have + share for have, share in zip(credit, shares, strict=True)]
        chosen = max(range(len(credit)), key=credit.__getitem__)
        credit[chosen] -= sum(shares)
        turns.append(chosen)
    return turns
