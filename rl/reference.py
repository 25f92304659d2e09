"""The reference policy that KL terms and DPO compare with.

A frozen copy of the model or, with adapters, the model with its adapters off. A reset (ProRL,
arXiv:2505.24864) makes the current policy the reference; with adapters that takes a copy of them,
which is lent to the model while the reference is evaluated.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from turngym.agents.model import adapters_disabled
from turngym.errors import ConfigError

__all__ = ["AdaptersOff", "FrozenCopy", "Reference"]


class Reference(Protocol):
    """What the learner needs of a reference policy."""

    def active(self) -> contextlib.AbstractContextManager[nn.Module]:
        """Run the block with the model it yields as the reference."""
        ...

    def reset(self) -> None:
        """Make the current policy the reference."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return what a resume needs; empty before the first reset."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        ...


class FrozenCopy:
    """A second model, for policies whose weights are all trained.

    Args:
        model: the policy; copied now.
        mix: share of the current policy that a reset puts in, see `KL.reset_mix`.
    """

    def __init__(self, model: nn.Module, *, mix: float = 1.0) -> None:
        self._policy = model
        self._mix = mix
        self._model = copy.deepcopy(model).requires_grad_(False)
        self._was_reset = False

    @contextlib.contextmanager
    def active(self) -> Iterator[nn.Module]:
        """Yield the copy."""
        yield self._model

    @torch.no_grad()
    def reset(self) -> None:
        """Move to the policy's current weights, by the share `mix` of the way."""
        current = dict(self._policy.named_parameters())
        for name, parameter in self._model.named_parameters():
            parameter.lerp_(current[name].detach(), self._mix)
        self._was_reset = True

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights, once they are no longer those the run began with."""
        return dict(self._model.state_dict()) if self._was_reset else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over weights."""
        if state:
            self._model.load_state_dict(dict(state))
            self._was_reset = True


class AdaptersOff:
    """The policy without its adapters; after a reset, with adapters frozen at that moment.

    Args:
        model: a peft model.
        mix: share of the current policy that a reset puts in, see `KL.reset_mix`.

    Raises:
        ConfigError: `mix` is not 1: a mixture of two adapters has twice their rank.
    """

    def __init__(self, model: nn.Module, *, mix: float = 1.0) -> None:
        if mix != 1.0:
            raise ConfigError(
                f"adapters cannot be mixed into the reference, got KL.reset_mix={mix:g}; set it to "
                "1, or train all weights (model.lora_rank=0)"
            )
        self._model = model
        self._frozen: dict[str, Tensor] = {}

    def _trained(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self._model.named_parameters() if p.requires_grad}

    @contextlib.contextmanager
    def active(self) -> Iterator[nn.Module]:
        """Yield the model while it is the reference."""
        if not self._frozen:
            with adapters_disabled(self._model):
                yield self._model
            return
        current = {name: parameter.data for name, parameter in self._trained().items()}
        # Data are swapped, not copied over: the sampler watches for changed weights.
        self._lend(self._frozen)
        try:
            yield self._model
        finally:
            self._lend(current)

    def _lend(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self._trained().items():
            parameter.data = tensors[name]

    def reset(self) -> None:
        """Copy the current adapters."""
        with torch.no_grad():
            self._frozen = {name: p.detach().clone() for name, p in self._trained().items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the frozen adapters; none before the first reset."""
        return dict(self._frozen)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over frozen adapters."""
        places = self._trained()
        self._frozen = {name: tensor.to(places[name].device) for name, tensor in state.items()}
