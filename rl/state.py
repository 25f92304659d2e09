"""What an algorithm remembers between batches; plain data, so that a checkpoint can hold it."""

from dataclasses import dataclass

__all__ = ["AlgorithmState"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmState:
    """Running numbers of an algorithm; `dataclasses.asdict` of it is JSON-able."""

    step: int = 0
    """Plans made: seeds whatever an algorithm draws."""

    ema: float | None = None
    """Moving average of the return (the `ema` baseline); None before the first batch, read as 0."""

    group_means: tuple[float, ...] = ()
    """Mean returns of the groups seen, the latest last (AdaptiveK)."""

    kl_coef: float | None = None
    """Adapted KL coefficient; None = the algorithm's."""

    entropy_coef: float | None = None
    """Adapted entropy coefficient; None = the algorithm's."""
