import json
import os
import runpy
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from turngym.rl.algorithm import Algorithm, BoundAlgorithm, RunFacts
from turngym.rl.batch import Batch
from turngym.rl.objectives import objective
from turngym.rl.padded import batch_from_padded, unflatten
from turngym.rl.plan import Plan, plan
from turngym.rl.returns import Returns, returns_of
from turngym.types import RewardSpec, TokenRole

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-6
DRAWN = (0, 1, 2)
"""Seeds of further goldens of the same form, see `tests/support/drawn_goldens.py`."""


@dataclass(frozen=True)
class Golden:
    """One goldens file: its fixture as batches, its sections as plain data."""

    data: dict[str, Any]

    def __getitem__(self, section: str) -> dict[str, Any]:
        found: dict[str, Any] = self.data[section]
        return found

    def column(self, name: str) -> Tensor:
        return self.column_of(self["fixture"][name])

    def column_of(self, values: Any) -> Tensor:
        """Nested lists as an array, NaN for null."""
        return torch.tensor(known(values), dtype=torch.float64)

    @cached_property
    def mask(self) -> Tensor:
        return self.column("mask").bool()

    @cached_property
    def width(self) -> int:
        return self.mask.shape[1]

    @cached_property
    def group_size(self) -> int:
        return int(torch.bincount(self.column("group").long()).max())

    def batch(self, rewards: str | dict[str, Tensor], **changes: Any) -> Batch:
        components = {"r": self.column(rewards)} if isinstance(rewards, str) else rewards
        role = torch.where(self.column("role") > 0, TokenRole.ACTION, TokenRole.REASONING)
        named = ("logp_old", "logp_ref", "entropy", "values")
        batch = batch_from_padded(
            mask=self.mask,
            group=self.column("group").long(),
            logp_rollout=self.column("logp_rollout"),
            rewards=components,
            turn=self.column("turn").long(),
            role=role,
            truncated=self.column("truncated").bool(),
            turn_rewards=changes.pop("turn_rewards", None),
            columns={name: self.column(name) for name in named}
            | {"logp_current": self.column("logp_new")},
        )
        return replace(batch, **changes)

    def returns(self, algorithm: Algorithm, batch: Batch) -> Returns:
        return returns_of(self.bind(algorithm, batch), batch)

    def bind(self, algorithm: Algorithm, batch: Batch, **facts: Any) -> BoundAlgorithm:
        levels: dict[str, Any] = dict.fromkeys(batch.rewards, "outcome")
        levels |= dict.fromkeys(batch.turn_rewards, "turn")
        rubric = {
            name: RewardSpec(name=name, level=level, low=None, high=1.0)
            for name, level in levels.items()
        }
        run = RunFacts(
            rubric=rubric,
            group_size=self.group_size,
            max_tokens=self.width,
            updates=1 if batch.logp_old is None else 2,
            has_reference=True,
            has_critic=True,
            topk=4,
            **facts,
        )
        return algorithm.bind(run)

    def plan(self, algorithm: Algorithm, batch: Batch) -> Plan:
        return plan(self.bind(algorithm, batch), batch)

    def advantage(self, algorithm: Algorithm, batch: Batch) -> Tensor:
        """Of every token, (B, T), 0 outside the mask."""
        return unflatten(self.plan(algorithm, batch).advantage, self.mask)

    def loss(self, algorithm: Algorithm, batch: Batch) -> tuple[float, Tensor]:
        """Loss and gradient with respect to logp_new, (B, T)."""
        logp = self.column("logp_new")[self.mask].requires_grad_()
        bound = self.bind(algorithm, batch)
        entropy = batch.entropy if bound.needs_entropy else None
        loss, _ = objective(
            bound,
            batch,
            plan(bound, batch),
            torch.arange(batch.num_tokens),
            logp,
            entropy=entropy,
        )
        loss.backward()  # type: ignore[no-untyped-call]
        assert logp.grad is not None
        return loss.item(), unflatten(logp.grad, self.mask)

    def by_row(self, values: Any) -> Tensor:
        """One value a row, painted on its policy tokens."""
        return torch.tensor(values, dtype=torch.float64).unsqueeze(-1) * self.mask


def known(values: Any) -> Any:
    if isinstance(values, list):
        return [known(value) for value in values]
    return float("nan") if values is None else values


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "goldens" / "goldens.json").read_text("utf-8"))
    return found


@cache
def drawn(seed: int) -> dict[str, Any]:
    script = ROOT / "tests" / "support" / "drawn_goldens.py"
    found: dict[str, Any] = runpy.run_path(str(script))["goldens"](seed)
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test for the file and for the drawn goldens, one a key where it asks for keys."""
    if "golden" not in metafunc.fixturenames:
        return
    folder = Path(os.environ.get("TURNGYM_SHARED", ROOT.parent / "shared"))
    only_file = metafunc.definition.get_closest_marker("only_file") is not None
    sources: list[str | int] = ["file", *(() if only_file else DRAWN)]
    for name, section in (("loss_key", "losses"), ("advantage_key", "advantages")):
        if name in metafunc.fixturenames:
            pairs = [
                (source, key) for source in sources for key in keys_of(source, section, folder)
            ]
            metafunc.parametrize(("golden", name), pairs, indirect=["golden"])
            return
    metafunc.parametrize("golden", sources, indirect=True)


def keys_of(source: str | int, section: str, folder: Path) -> list[str]:
    if isinstance(source, int):
        return sorted(drawn(source)[section])
    return sorted(read(folder)[section]) if folder.is_dir() else ["absent"]


@pytest.fixture(scope="session")
def golden(request: pytest.FixtureRequest) -> Golden:
    if isinstance(request.param, int):
        return Golden(drawn(request.param))
    return Golden(read(request.getfixturevalue("shared")))


@pytest.fixture(scope="session")
def close() -> Any:
    """Compare numbers or nested lists at the goldens' tolerance."""

    def check(found: Any, wanted: Any) -> None:
        found = torch.as_tensor(found, dtype=torch.float64)
        wanted = torch.as_tensor(wanted, dtype=torch.float64)
        torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)

    return check
