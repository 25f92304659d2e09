"""Cutting a batch into forward passes; results never depend on where the cuts are."""

from collections.abc import Callable, Sequence

from turngym.rl.collate import Context

__all__ = ["micro_batches"]


def micro_batches(
    contexts: Sequence[Context],
    chosen: Sequence[int],
    *,
    max_tokens: int,
    whole: Callable[[Context], int] | None = None,
) -> list[list[int]]:
    """Group contexts of similar length into passes of at most `max_tokens`, padding included.

    Args:
        contexts: of the batch.
        chosen: indices of those to run.
        max_tokens: bound on rows times the longest row; a unit longer than it runs alone.
        whole: key of contexts that must share a pass (the loss needs whole rows or groups); None =
            each may go anywhere.

    Returns:
        Indices of contexts, pass by pass, longest first.
    """
    units: dict[int, list[int]] = {}
    for index in chosen:
        units.setdefault(whole(contexts[index]) if whole else index, []).append(index)

    def longest(unit: Sequence[int]) -> int:
        return max(len(contexts[index].ids) for index in unit)

    passes: list[list[int]] = []
    width = 0
    for unit in sorted(units.values(), key=longest, reverse=True):
        if passes and (len(passes[-1]) + len(unit)) * width <= max_tokens:
            passes[-1].extend(unit)
        else:
            passes.append(list(unit))
            width = longest(unit)
    return passes
