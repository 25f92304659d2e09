from pathlib import Path
from typing import Any

import pytest

from turngym.agents.model import load_model
from turngym.agents.rollout import DemoAgent
from turngym.errors import ConfigError
from turngym.rl.config import OptimConfig, SftConfig
from turngym.rl.sft import cold_start


@pytest.fixture
def demos(world: Any) -> Any:
    return world.engine(1, DemoAgent.factory(world.renderer)).run(range(24))


def test_imitation_lowers_the_loss(demos: Any, model: Any) -> None:
    losses = []
    config = SftConfig(steps=25, batch_size=12, optim=OptimConfig(lr=1e-2))
    last = cold_start(model, demos, config, seed=0, report=lambda _, loss: losses.append(loss))
    assert losses[-1] == last < 0.6 * losses[0]


def test_how_a_step_is_cut_into_passes_changes_nothing(demos: Any, tiny: Path, kit: Any) -> None:
    found = []
    for micro_tokens in (100, 10**6):
        model: Any = load_model(tiny, device="cpu")[0]
        optim = OptimConfig(lr=1e-3, micro_tokens=micro_tokens)
        loss = cold_start(model, demos, SftConfig(steps=1, batch_size=24, optim=optim), seed=0)
        found.append((loss, kit.weights(model)))
    (one, first), (other, second) = found
    assert one == pytest.approx(other, rel=1e-5)
    # The first Adam step is the sign of the gradient: compare where it is not noise.
    assert float((first - second).abs().median()) < 1e-6


def test_every_demonstration_is_seen_before_any_comes_again(demos: Any, model: Any) -> None:
    from turngym.rl.sft import _Shuffled

    order = _Shuffled(7, seed=1)
    drawn = [order.take(3) for _ in range(7)]
    flat = [item for part in drawn for item in part]
    assert [sorted(flat[k : k + 7]) for k in (0, 7, 14)] == [list(range(7))] * 3
    assert flat[:7] != flat[7:14]


def test_too_few_demonstrations_are_refused(demos: Any, model: Any) -> None:
    with pytest.raises(ConfigError, match="24 demonstrations cannot fill a batch of 30"):
        cold_start(model, demos, SftConfig(steps=1, batch_size=30), seed=0)
