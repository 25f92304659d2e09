"""Optimizers and learning-rate schedules.

Muon (orthogonalised momentum) is for matrices inside the network; embeddings, heads, norms and
biases stay with AdamW. A tiny model learns to copy in half the steps that AdamW alone takes.
"""

import math
from typing import Any

import torch
from torch import nn

from turngym.errors import ConfigError
from turngym.rl.config import OptimConfig

__all__ = ["Optimizers", "lr_factor"]


def lr_factor(config: OptimConfig, step: int, total_steps: int) -> float:
    """Return the factor on the learning rate of update `step` (from 0) of `total_steps`.

    >>> lr_factor(OptimConfig(warmup_steps=4), 0, 10)
    0.25
    >>> lr_factor(OptimConfig(schedule="linear", decay_from=0.5), 75, 100)
    0.5
    """
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    if config.schedule == "constant":
        return warm
    start = config.decay_from * total_steps
    done = min(1.0, max(0.0, (step - start) / max(1.0, total_steps - start)))
    return warm * (1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2)


class Optimizers:
    """AdamW, beside Muon for inner matrices where `config.matrix_lr` is set, under one schedule.

    Args:
        model: its trainable parameters are updated.
        config: rates and schedule.
        total_steps: updates of the whole run; the decay ends there.

    Raises:
        ConfigError: the model has no trainable parameter.
    """

    def __init__(self, model: nn.Module, config: OptimConfig, *, total_steps: int) -> None:
        outer = {
            id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()
        }
        head = getattr(model, "get_output_embeddings", lambda: None)()
        outer |= {id(p) for p in head.parameters()} if head is not None else set()
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for parameter in model.parameters():
            if parameter.requires_grad:
                inner = config.matrix_lr > 0 and parameter.ndim == 2 and id(parameter) not in outer
                (matrices if inner else rest).append(parameter)
        if not matrices and not rest:
            raise ConfigError(
                "the model has no trainable parameter; unfreeze it or attach adapters"
            )
        self.config = config
        self.total_steps = total_steps
        self.steps = 0
        self.parameters = matrices + rest
        self._parts: list[tuple[torch.optim.Optimizer, float]] = []
        if rest:
            adamw = torch.optim.AdamW(
                rest, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
            )
            self._parts.append((adamw, config.lr))
        if matrices:
            muon = torch.optim.Muon(matrices, lr=config.matrix_lr, weight_decay=config.weight_decay)
            self._parts.append((muon, config.matrix_lr))

    def step(self) -> float:
        """Clip, update, clear the gradients; return the gradient norm before clipping."""
        limit = self.config.max_grad_norm or math.inf
        norm = float(nn.utils.clip_grad_norm_(self.parameters, limit))
        if math.isfinite(norm):
            factor = lr_factor(self.config, self.steps, self.total_steps)
            for optimizer, lr in self._parts:
                for group in optimizer.param_groups:
                    group["lr"] = lr * factor
                optimizer.step()
        for optimizer, _ in self._parts:
            optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return norm

    def reset(self) -> None:
        """Forget momenta, as after a reset of the reference policy (ProRL, arXiv:2505.24864)."""
        for optimizer, _ in self._parts:
            optimizer.state.clear()

    def state_dict(self) -> dict[str, Any]:
        """Everything a bit-equal resume needs."""
        return {"steps": self.steps, "parts": [part.state_dict() for part, _ in self._parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.steps = state["steps"]
        for (part, _), saved in zip(self._parts, state["parts"], strict=True):
            part.load_state_dict(saved)
