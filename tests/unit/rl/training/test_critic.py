import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from turngym.agents.head import decoder_of
from turngym.agents.model import load_model
from turngym.agents.tiny import TinyConfig, build_tiny_agent
from turngym.errors import ConfigError
from turngym.rl.batch import Batch
from turngym.rl.collate import Context
from turngym.rl.config import CriticConfig, OptimConfig
from turngym.rl.critic import Critic, ValueModel, critic_optim
from turngym.rl.estimators import GAE
from turngym.rl.presets import preset
from turngym.rl.terms import ValueLoss

IDS = np.array([5, 9, 2, 7, 7, 3], np.int32)
CONTEXTS = [
    Context(0, IDS, np.array([2, 3, 5]), 0),
    Context(1, IDS[:3], np.array([1]), 3),
]


@pytest.fixture
def values(model: Any) -> ValueModel:
    made = ValueModel.beside(model, CriticConfig())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        made.head.weight.copy_(torch.randn(made.head.weight.shape, generator=generator))
    return made


def last_state(values: ValueModel, ids: Any) -> float:
    """The value after reading exactly these tokens, from a pass over nothing else."""
    state = values.decoder(input_ids=torch.tensor(ids)[None]).last_hidden_state[0, -1]
    return float(values.head(state))


@torch.no_grad()
def test_a_value_is_that_of_the_state_before_its_token(values: ValueModel) -> None:
    found = values(CONTEXTS).tolist()
    prefixes = [IDS[:2], IDS[:3], IDS[:5], IDS[:1]]
    assert found == pytest.approx([last_state(values, p) for p in prefixes], abs=1e-5)


@torch.no_grad()
def test_a_value_depends_on_what_was_read_and_on_nothing_later(values: ValueModel) -> None:
    changed = IDS.copy()
    changed[3] = 11
    before = values(CONTEXTS[:1])
    after = values([CONTEXTS[0]._replace(ids=changed)])
    assert torch.allclose(before[:2], after[:2], atol=1e-6)
    assert abs(float(before[2] - after[2])) > 1e-4


@torch.no_grad()
def test_the_bootstrap_reads_the_last_token_too(values: ValueModel) -> None:
    found = values(CONTEXTS, after_last=True).tolist()
    assert found == pytest.approx([last_state(values, IDS), last_state(values, IDS[:2])], abs=1e-5)


def test_values_begin_at_zero_and_the_decoder_is_a_copy(model: Any) -> None:
    fresh = ValueModel.beside(model, CriticConfig())
    assert fresh(CONTEXTS).tolist() == [0.0] * 4
    fresh(CONTEXTS).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    own = {p.data_ptr() for p in decoder_of(model).parameters()}
    assert own.isdisjoint(p.data_ptr() for p in fresh.parameters())


def test_the_critics_model_must_read_the_policys_tokens(model: Any, tmp_path: Path) -> None:
    small = build_tiny_agent(
        tmp_path / "small",
        TinyConfig(hidden_size=16, layers=1, heads=1, kv_heads=1, mlp_size=16, words=("a b",)),
    )
    with pytest.raises(ConfigError, match="token ids, the policy"):
        ValueModel.beside(model, CriticConfig(path=str(small)))


def test_a_saved_critic_can_become_a_critic_again(tiny: Path, model: Any, tmp_path: Path) -> None:
    other = ValueModel.beside(model, CriticConfig(path=str(tiny)))
    other.save(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    assert torch.load(tmp_path / "value_head.pt", weights_only=True).keys() == {"weight", "bias"}


def test_pretraining_learns_the_returns_and_leaves_the_policy_alone(
    world: Any, model: Any, kit: Any
) -> None:
    vapo = preset("vapo")
    terms = tuple(
        replace(t, pretrain_steps=80) if isinstance(t, ValueLoss) else t for t in vapo.regularize
    )
    bound = world.bind(replace(vapo, regularize=terms))
    groups = world.collector(bound).collect().groups
    learner = kit.make_learner(model, bound, critic_lr=5e-3)
    before = kit.weights(model)
    found = []
    while learner.pretraining_left:
        found.append(learner.pretrain_critic(groups))
    assert len(found) == 40
    assert learner.critic is not None
    assert learner.critic.steps == 80
    assert found[-1]["loss/value"] < 0.5 * found[0]["loss/value"]
    assert max(one["critic/explained_variance"] for one in found) > 0.1
    assert torch.equal(kit.weights(model), before)
    assert learner.version == 0


def test_open_reasoner_zero_takes_twelve_critic_steps_for_each_of_the_policy(
    world: Any, model: Any, kit: Any
) -> None:
    bound = world.bind(preset("open_reasoner_zero"), updates=1)
    learner = kit.make_learner(model, bound, replace(kit.optim, minibatches=1))
    learner.update(world.collector(bound).collect().groups)
    assert learner.critic is not None
    assert (learner.version, learner.critic.steps) == (1, 12)


def test_only_truncated_rows_are_bootstrapped(world: Any, model: Any) -> None:
    ppo = preset("ppo")
    bound = world.bind(replace(ppo, advantage=GAE(bootstrap_truncated=True)))
    groups = world.collector(bound).collect().groups
    batch = Batch.from_groups(groups)
    truncated = torch.zeros(batch.num_rows, dtype=torch.bool)
    truncated[1] = True
    value_model = ValueModel.beside(model, CriticConfig())
    with torch.no_grad():
        value_model.head.bias.fill_(3.0)
    critic = Critic(value_model, OptimConfig())
    found = critic.annotate(bound, replace(batch, truncated=truncated))
    assert found.bootstrap is not None
    assert found.bootstrap.tolist() == [3.0 if flag else 0.0 for flag in truncated.tolist()]
    assert found.values is not None
    assert bool((found.values == 3.0).all())


def test_a_resumed_critic_goes_on_bit_for_bit(world: Any, tiny: Path, kit: Any) -> None:
    bound = world.bind(preset("ppo"))
    collector = world.collector(bound)
    first, second = collector.collect().groups, collector.collect().groups
    learner = kit.make_learner(load_model(tiny, device="cpu")[0], bound)
    learner.update(first)
    again = kit.make_learner(load_model(tiny, device="cpu")[0], bound)
    again.model.load_state_dict(learner.model.state_dict())
    again.load_state_dict(copy.deepcopy(learner.state_dict()))
    for one in (learner, again):
        one.update(second)
    assert torch.equal(kit.weights(learner.critic.model), kit.weights(again.critic.model))
    assert torch.equal(kit.weights(learner.model), kit.weights(again.model))


def test_muon_leaves_the_value_head_to_adamw(model: Any) -> None:
    value_model = ValueModel.beside(model, CriticConfig())
    critic = Critic(value_model, OptimConfig(lr=1e-3, matrix_lr=0.01))
    (adamw, _), (muon, _) = critic.optimizers._parts
    head = id(value_model.head.weight)
    assert head in {id(p) for p in adamw.param_groups[0]["params"]}
    assert head not in {id(p) for p in muon.param_groups[0]["params"]}


def test_the_critics_rate_follows_the_policys_unless_it_is_given() -> None:
    policy = OptimConfig(lr=1e-6, schedule="linear", minibatches=3)
    assert critic_optim(CriticConfig(), policy).lr == pytest.approx(5e-6)
    own = critic_optim(CriticConfig(lr=1e-4, warmup_steps=5), policy)
    assert (own.lr, own.warmup_steps, own.schedule, own.minibatches) == (1e-4, 5, "constant", 3)
