"""A policy that answers sums now right, now wrong, and a model small enough to train in a test."""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from turngym.agents.base import Completion, Sampling
from turngym.agents.config import RolloutConfig
from turngym.agents.model import load_model
from turngym.agents.renderer import Renderer
from turngym.agents.rollout import DemoAgent, EnvSource, RolloutEngine, TokenAgent
from turngym.agents.scripted import ScriptedPolicy
from turngym.agents.tiny import TinyConfig, build_tiny_agent
from turngym.rl.algorithm import Algorithm, BoundAlgorithm, RunFacts
from turngym.rl.axes import AdaptiveK, TopK
from turngym.rl.collector import Collector
from turngym.rl.config import CriticConfig, OptimConfig
from turngym.rl.critic import Critic, ValueModel, critic_optim
from turngym.rl.estimators import PassAtK
from turngym.rl.learner import Learner
from turngym.rl.presets import preset
from turngym.rl.reference import FrozenCopy
from turngym.rl.stream import TaskStream
from turngym.rl.terms import ValueLoss

TOPK = 3
OPTIM = OptimConfig(lr=1e-3, minibatches=2, micro_tokens=600)
_SUM = re.compile(r"What is (\d+) (plus|minus|times) (\d+)\?")
_SIGNS = {"plus": "+", "minus": "-", "times": "*"}


class TopKPolicy(ScriptedPolicy):
    """A script that also makes up likeliest tokens: the sampled one and two others."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, **rest: Any) -> Any:
        found = await super().generate(prompt_ids, sampling, **rest)
        others = [(found.ids + shift) % 256 for shift in range(TOPK)]
        logp = np.log(np.exp(found.logp)[:, None] * np.array([1, 0.1, 0.01]))
        extra = {
            "topk_ids": np.stack(others, axis=1).astype(np.int32),
            "topk_logp": logp.astype(np.float32),
        }
        return Completion(
            ids=found.ids,
            logp=found.logp,
            finish_reason=found.finish_reason,
            version_spans=found.version_spans,
            extra=extra,
        )


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 20,000 parameters, for tests of one or two updates."""
    shape = TinyConfig(hidden_size=32, layers=1, heads=2, kv_heads=1, mlp_size=32)
    return build_tiny_agent(tmp_path_factory.mktemp("tiny") / "model", shape)


@pytest.fixture
def model(tiny: Path) -> Any:
    return load_model(tiny, device="cpu")[0]


@pytest.fixture(scope="session")
def renderer(tiny: Path) -> Renderer:
    return Renderer(load_model(tiny, device="cpu")[1])


class World:
    """Everything a collector needs, with a script in the place of the model.

    Args:
        renderer: of the tiny model.
        skill: how often the script knows the answer.
        size: number of tasks.
    """

    def __init__(self, renderer: Renderer, *, skill: float = 0.5, size: int = 1000) -> None:
        self.renderer = renderer
        self.skill = skill
        kwargs = {"level": 1, "notation": "words", "size": size}
        self.source = EnvSource("turngym/Calculator-v0", kwargs, "train")
        self.engines: list[RolloutEngine] = []
        self.policy = TopKPolicy(self.speak, encode=lambda text: renderer.codec.encode(text).ids)

    def speak(self, context: Sequence[int], turn: int, rng: random.Random) -> str:
        found = _SUM.search(self.renderer.codec.decode(list(context)))
        assert found is not None
        a, word, b = found.groups()
        if turn == 0 and rng.random() < 0.5:
            call = f'{{"name": "calc", "arguments": {{"expr": "{a}{_SIGNS[word]}{b}"}}}}'
            return f"<think>{a}</think><tool_call>{call}</tool_call><|im_end|>"
        right = {"plus": int(a) + int(b), "minus": int(a) - int(b), "times": int(a) * int(b)}[word]
        answer = right if rng.random() < self.skill else right + rng.randint(1, 9)
        thought = "<think>so</think>" if rng.random() < 0.7 else ""
        return f"{thought}<answer>{answer}</answer><|im_end|>"

    def engine(self, group_size: int = 4, agent: Any = None, **more: Any) -> RolloutEngine:
        factory = agent or TokenAgent.factory(self.policy, self.renderer)
        config = RolloutConfig(group_size=group_size, concurrency=16, max_tokens=96)
        engine = RolloutEngine(self.source, factory, config, seed=7, **more)
        self.engines.append(engine)
        return engine

    def bind(
        self, algorithm: Algorithm, *, updates: int = 2, group_size: int = 4
    ) -> BoundAlgorithm:
        return algorithm.bind(
            RunFacts(
                rubric=self.source.reward_specs,
                group_size=group_size,
                max_tokens=96 * 6,
                updates=updates,
                has_reference=True,
                has_critic=True,
                topk=TOPK,
            )
        )

    def collector(self, bound: BoundAlgorithm, *, prompts: int = 3, **more: Any) -> Collector:
        selection = bound.algorithm.selection
        demos = None
        if selection.demonstrations:
            expert = DemoAgent.factory(self.renderer)
            demos = self.engine(selection.demonstrations, expert)
        stream = TaskStream(len(self.source.task_set), seed=1)
        return Collector(
            self.engine(bound.run.group_size),
            stream,
            bound,
            prompts=prompts,
            greedy=self.engine(1) if bound.needs_greedy else None,
            demos=demos,
            **more,
        )

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


@pytest.fixture
def make_world(renderer: Renderer) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(**options: Any) -> World:
        made.append(World(renderer, **options))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()


def fit_for_test(name: str) -> Algorithm:
    """Return a preset with its sizes made small; nothing else is changed."""
    algorithm = preset(name)
    selection, advantage = algorithm.selection, algorithm.advantage
    kept = selection.keep_in_group
    if isinstance(kept, TopK):
        selection = replace(selection, keep_in_group=replace(kept, k=3))
    if isinstance(kept, AdaptiveK):
        selection = replace(selection, keep_in_group=replace(kept, ks=(3, 3, 2, 2), warmup=2))
    if isinstance(advantage, PassAtK):
        advantage = replace(advantage, k=2)
    terms = tuple(
        replace(term, pretrain_steps=min(3, term.pretrain_steps))
        if isinstance(term, ValueLoss)
        else term
        for term in algorithm.regularize
    )
    return replace(algorithm, selection=selection, advantage=advantage, regularize=terms)


def make_learner(
    model: Any, bound: BoundAlgorithm, optim: OptimConfig = OPTIM, *, critic_lr: float = 1e-3
) -> Learner:
    critic = None
    if bound.needs_values:
        config = CriticConfig(lr=critic_lr)
        critic = Critic(ValueModel.beside(model, config), critic_optim(config, optim))
    reference = FrozenCopy(model) if bound.needs_ref else None
    return Learner(model, bound, optim, total_steps=8, reference=reference, critic=critic)


def weights(model: torch.nn.Module) -> torch.Tensor:
    """All trainable weights in one vector, copied."""
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad]).clone()


_METRICS = Path(__file__).resolve().parents[4] / "docs" / "metrics.md"


def is_documented(key: str) -> bool:
    """`docs/metrics.md` has a row for the key; NAME stands for anything."""
    rows = [line for line in _METRICS.read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    known = [name for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    patterns = [re.escape(name).replace("NAME", "[^/]+") for name in known]
    return any(re.fullmatch(pattern, key) for pattern in patterns)


@pytest.fixture
def kit() -> SimpleNamespace:
    """The helpers above: tests cannot import from a conftest."""
    return SimpleNamespace(
        fit_for_test=fit_for_test,
        is_documented=is_documented,
        make_learner=make_learner,
        optim=OPTIM,
        weights=weights,
    )
