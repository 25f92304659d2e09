"""Settings that change during training: temperature, the length a policy may reach."""

from collections.abc import Sequence
from dataclasses import dataclass

from turngym.errors import ConfigError

__all__ = ["Linear", "Stages"]


@dataclass(frozen=True, slots=True)
class Stages:
    """Piecewise constant: staged context lengths, for instance.

    >>> Stages([(0, 8192), (100, 16384)]).at(99)
    8192
    """

    stages: Sequence[tuple[int, float]]
    """(first step, value), steps increasing from 0."""

    def __post_init__(self) -> None:
        steps = [step for step, _ in self.stages]
        if not steps or steps[0] != 0 or steps != sorted(set(steps)):
            raise ConfigError(f"stages need increasing first steps from 0, got {steps}")

    def at(self, step: int) -> float:
        """Value at an optimizer step."""
        return next(value for first, value in reversed(self.stages) if step >= first)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """From `start` to `end` over `steps`, then constant.

    >>> Linear(start=1.0, end=0.5, steps=10).at(5)
    0.75
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps must be at least 1, got {self.steps}")

    def at(self, step: int) -> float:
        """Value at an optimizer step."""
        share = min(step / self.steps, 1.0)
        return self.start + (self.end - self.start) * share
