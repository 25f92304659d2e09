import math

import pytest
import torch
from torch import nn

from turngym.errors import ConfigError
from turngym.rl.config import OptimConfig
from turngym.rl.optim import Optimizers, lr_factor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(torch.tanh(self.inner(self.embed(ids))))
        return found


def lose(net: Net) -> float:
    loss = nn.functional.cross_entropy(net(torch.arange(5)), torch.arange(5))
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 1.0, 0.75, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 1.0, (1 + math.cos(math.pi / 4)) / 2, 0.1464466]),
    ],
)
def test_the_rate_warms_up_and_decays_from_its_fraction_on(
    schedule: str, expected: list[float]
) -> None:
    config = OptimConfig(warmup_steps=2, schedule=schedule, decay_from=0.5)  # type: ignore[arg-type]
    found = [lr_factor(config, step, 8) for step in (0, 1, 2, 4, 5, 7)]
    assert found == pytest.approx(expected)


def test_muon_takes_inner_matrices_and_adamw_the_rest() -> None:
    net = Net()
    optimizers = Optimizers(net, OptimConfig(lr=1e-3, matrix_lr=0.01), total_steps=9)
    (adamw, _), (muon, _) = optimizers._parts
    assert [id(p) for p in muon.param_groups[0]["params"]] == [id(net.inner.weight)]
    others = {id(net.embed.weight), id(net.inner.bias), id(net.head.weight)}
    assert {id(p) for p in adamw.param_groups[0]["params"]} == others


def test_gradients_are_clipped_and_cleared_and_their_norm_is_reported() -> None:
    net = Net()
    optimizers = Optimizers(net, OptimConfig(lr=1e-3, max_grad_norm=1e-3), total_steps=9)
    lose(net)
    expected = math.sqrt(
        sum(float(p.grad.square().sum()) for p in net.parameters() if p.grad is not None)
    )
    assert optimizers.step() == pytest.approx(expected)
    assert all(p.grad is None for p in net.parameters())
    assert optimizers.steps == 1


def test_a_gradient_that_is_not_finite_moves_nothing() -> None:
    net = Net()
    optimizers = Optimizers(net, OptimConfig(lr=1e-3), total_steps=9)
    before = [p.detach().clone() for p in net.parameters()]
    lose(net)
    net.inner.weight.grad = torch.full_like(net.inner.weight, math.nan)
    assert math.isnan(optimizers.step())
    assert all(torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))
    lose(net)
    assert math.isfinite(optimizers.step())
    assert any(not torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))


def test_training_lowers_the_loss_and_a_reset_forgets_momenta() -> None:
    net = Net()
    optimizers = Optimizers(net, OptimConfig(lr=0.02, matrix_lr=0.05), total_steps=60)
    losses = []
    for _ in range(60):
        losses.append(lose(net))
        optimizers.step()
    assert losses[-1] < 0.2 * losses[0]
    optimizers.reset()
    assert all(not part.state for part, _ in optimizers._parts)


def test_frozen_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="no trainable parameter"):
        Optimizers(Net().requires_grad_(False), OptimConfig(), total_steps=1)
    with pytest.raises(ConfigError, match=r"optim\.minibatches must be at least 1"):
        OptimConfig(minibatches=0)
