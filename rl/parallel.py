"""Several processes that train together, through accelerate; one alone by default.

Each process rolls out its share of the tasks; all see all groups and make the same plan; each runs
its share of the forward passes; gradients are summed. Weights of tokens come from the plan, so the
sum is the gradient of the whole batch, whatever the number of processes.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

__all__ = ["Ranks"]

T = TypeVar("T")


class Ranks:
    """This process among those started together (`accelerate launch`, `torchrun`).

    Args:
        accelerator: an `accelerate.Accelerator`; None = one process.
    """

    def __init__(self, accelerator: Any = None) -> None:
        self._accelerator = accelerator
        self.rank: int = 0 if accelerator is None else accelerator.process_index
        self.world: int = 1 if accelerator is None else accelerator.num_processes

    @classmethod
    def from_environment(cls, *, device: str = "auto") -> "Ranks":
        """Join the processes that a launcher started; alone when there is no launcher."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        from accelerate import Accelerator

        return cls(Accelerator(cpu=device == "cpu" or not torch.accelerator.is_available()))

    @property
    def is_main(self) -> bool:
        """The process that writes files and speaks."""
        return self.rank == 0

    @property
    def device(self) -> str | None:
        """Where this process computes; None = its own choice."""
        return None if self._accelerator is None else str(self._accelerator.device)

    def owns(self, number: int) -> bool:
        """Tell whether an item with this number is this process's."""
        return number % self.world == self.rank

    def share(self, items: Sequence[T]) -> list[T]:
        """Return this process's part, dealt in turn."""
        return list(items[self.rank :: self.world])

    def gather(self, items: list[T]) -> list[T]:
        """Return the parts of all processes, put together as `share` took them apart."""
        if self.world == 1:
            return items
        from accelerate.utils import gather_object

        parts: list[list[T]] = gather_object([items])
        longest = max(map(len, parts))
        return [part[i] for i in range(longest) for part in parts if i < len(part)]

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes."""
        if self.world == 1:
            return tensor
        here = tensor.to(self._accelerator.device)
        total: Tensor = self._accelerator.reduce(here, reduction="sum")
        return total.to(tensor.device)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace every gradient by its sum over all processes; a missing one counts as 0."""
        if self.world == 1:
            return
        for parameter in parameters:
            mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = self.sum(mine)

    def wait(self) -> None:
        """Wait until every process is here."""
        if self.world > 1:
            self._accelerator.wait_for_everyone()
