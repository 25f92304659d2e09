"""Random small batches for every preset, built from rows so that they can be rearranged."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from turngym.rl.algorithm import Algorithm, BoundAlgorithm, RunFacts
from turngym.rl.batch import Batch
from turngym.rl.estimators import GroupAdvantage
from turngym.rl.objectives import objective
from turngym.rl.padded import batch_from_padded
from turngym.rl.plan import Plan, plan
from turngym.types import RewardSpec, TokenRole

TOKEN_COLUMNS = ("logp_rollout", "logp_old", "logp_ref", "logp_new", "entropy", "values")
NAN = float("nan")


@dataclass
class Row:
    """One trajectory: policy tokens in order, by column."""

    group: int
    turns: list[int]
    columns: dict[str, list[float]]
    rewards: dict[str, float]
    turn_rewards: list[float]
    truncated: bool = False
    demo: bool = False
    greedy: float = 0.5
    roles: list[int] = field(default_factory=list)
    topk_old: list[list[float]] = field(default_factory=list)
    topk_new: list[list[float]] = field(default_factory=list)
    anchors: list[int] = field(default_factory=list)
    gaps: set[int] = field(default_factory=set)
    """Token numbers before which an observation token stands in the padded array."""


def random_rows(
    seed: int, *, groups: int = 3, size: int = 4, max_turns: int = 3, with_demo: bool = False
) -> list[Row]:
    rng = np.random.default_rng(seed)
    rows = []
    for group in range(groups):
        for member in range(size):
            num_turns = int(rng.integers(1, max_turns + 1))
            turns = [k for k in range(num_turns) for _ in range(int(rng.integers(1, 4)))]
            n = len(turns)
            base = -rng.exponential(1.0, n) - 0.01
            near = {name: np.minimum(base + rng.normal(0, 0.2, n), -1e-3) for name in TOKEN_COLUMNS}
            near["entropy"] = rng.exponential(1.0, n)
            near["values"] = rng.normal(0.3, 0.3, n)
            top = np.log(rng.dirichlet(np.ones(5), n)[:, :2])
            rows.append(
                Row(
                    group=group,
                    turns=turns,
                    columns={name: values.tolist() for name, values in near.items()},
                    rewards={"correct": float(rng.integers(0, 2)), "style": float(rng.random())},
                    turn_rewards=rng.choice([0.0, 0.5, 1.0], num_turns).tolist(),
                    truncated=bool(rng.random() < 0.15),
                    demo=with_demo and member == 0,
                    greedy=float(rng.random()),
                    roles=rng.choice([TokenRole.REASONING, TokenRole.ACTION], n).tolist(),
                    topk_old=top.tolist(),
                    topk_new=(top + rng.normal(0, 0.1, top.shape)).tolist(),
                    anchors=rng.integers(0, 2, num_turns).tolist(),
                )
            )
    return rows


@dataclass(frozen=True)
class Case:
    """A batch, its algorithm and the place of each row's tokens."""

    bound: BoundAlgorithm
    batch: Batch
    plan: Plan
    logp_new: Tensor
    topk_new: Tensor
    mask: Tensor

    def run(self, index: Tensor | None = None, logp: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Loss and gradient over some tokens, (N,) with zeros elsewhere."""
        index = torch.arange(self.batch.num_tokens) if index is None else index
        leaf = (self.logp_new if logp is None else logp).clone().requires_grad_()
        assert self.batch.entropy is not None
        loss, _ = objective(
            self.bound,
            self.batch,
            self.plan,
            index,
            leaf[index],
            entropy=self.batch.entropy[index] if self.bound.needs_entropy else None,
            topk_logp=self.topk_new[index] if self.bound.needs_topk else None,
        )
        loss.backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        return loss.detach(), leaf.grad

    def per_row(self, values: Tensor) -> list[list[float]]:
        """Token values row by row."""
        lengths = self.batch.rows.lengths.tolist()
        return [part.tolist() for part in torch.split(values, lengths)]


def padded(
    rows: Sequence[Row], column: Callable[[Row], Sequence[Any]], fill: Any
) -> list[list[Any]]:
    """Lay rows out with a hole at every gap, padded to one width."""
    laid = []
    for row in rows:
        cells: list[Any] = []
        for number, value in enumerate(column(row)):
            if number in row.gaps:
                cells.append(fill)
            cells.append(value)
        laid.append(cells)
    width = max(1, *(len(cells) for cells in laid))
    return [cells + [fill] * (width - len(cells)) for cells in laid]


def make_batch(rows: Sequence[Row], *, by_turn: bool, extra_padding: int = 0) -> Batch:
    mask = torch.tensor(padded(rows, lambda row: [True] * len(row.turns), False))
    width = max(len(row.turn_rewards) for row in rows)
    turn_rewards = {
        "tool": torch.tensor(
            [row.turn_rewards + [NAN] * (width - len(row.turn_rewards)) for row in rows],
            dtype=torch.float64,
        )
    }

    def wide(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, (0, extra_padding))

    def token(name: str) -> Tensor:
        cells = padded(rows, lambda row: row.columns[name], NAN)
        return wide(torch.tensor(cells, dtype=torch.float64))

    batch = batch_from_padded(
        mask=wide(mask),
        group=torch.tensor([row.group for row in rows]),
        logp_rollout=token("logp_rollout"),
        rewards={
            name: torch.tensor([row.rewards[name] for row in rows], dtype=torch.float64)
            for name in rows[0].rewards
        },
        turn_rewards=turn_rewards if by_turn else None,
        turn=wide(torch.tensor(padded(rows, lambda row: row.turns, 0))),
        role=wide(torch.tensor(padded(rows, lambda row: row.roles, 0))),
        truncated=torch.tensor([row.truncated for row in rows]),
        demo=torch.tensor([row.demo for row in rows]),
        columns={name: token(name) for name in ("logp_old", "logp_ref", "entropy", "values")}
        | {"logp_current": token("logp_new")},
    )
    anchors = [row.anchors + [-1] * (batch.max_turns - len(row.anchors)) for row in rows]
    names = [*batch.rewards, *batch.turn_rewards]
    return replace(
        batch,
        greedy={n: torch.tensor([r.greedy for r in rows], dtype=torch.float64) for n in names},
        anchor_state=torch.tensor(anchors),
        topk_logp=flat([row.topk_old for row in rows]),
        topk_ids=torch.tensor([[1, 2]] * batch.num_tokens),
        token_ids=torch.arange(batch.num_tokens) % 4,
    )


def flat(parts: Sequence[Sequence[Sequence[float]]]) -> Tensor:
    cells = [cell for part in parts for cell in part]
    return torch.tensor(cells, dtype=torch.float64).reshape(len(cells), -1)


def make_case(
    algorithm: Algorithm, rows: Sequence[Row], *, by_turn: bool = False, extra_padding: int = 0
) -> Case:
    batch = make_batch(rows, by_turn=by_turn, extra_padding=extra_padding)
    # A token keeps its id wherever its row stands.
    ids = [hash((row.group, n)) % 4 for row in rows for n in range(len(row.turns))]
    batch = replace(batch, token_ids=torch.tensor(ids))
    rubric = {
        name: RewardSpec(name=name, low=0.0, high=1.0, weight=0.5 if name == "style" else 1.0)
        for name in batch.rewards
    } | {name: RewardSpec(name=name, level="turn") for name in batch.turn_rewards}
    run = RunFacts(
        rubric=rubric,
        group_size=9,
        max_tokens=16,
        updates=2,
        has_reference=True,
        has_critic=True,
        topk=2,
    )
    advantage = algorithm.advantage
    if by_turn and isinstance(advantage, GroupAdvantage) and advantage.virtual_rewards:
        algorithm = replace(algorithm, advantage=replace(advantage, max_return=4.5))
    bound = algorithm.bind(run)
    cells = padded(rows, lambda row: row.columns["logp_new"], NAN)
    logp = torch.nn.functional.pad(torch.tensor(cells, dtype=torch.float64), (0, extra_padding))
    mask = torch.tensor(padded(rows, lambda row: [True] * len(row.turns), False))
    mask = torch.nn.functional.pad(mask, (0, extra_padding))
    return Case(
        bound=bound,
        batch=batch,
        plan=plan(bound, batch),
        logp_new=logp[mask],
        topk_new=flat([row.topk_new for row in rows]),
        mask=mask,
    )


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Batches this small only lose by threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def build() -> Any:
    return make_case


@pytest.fixture(scope="session")
def draw() -> Any:
    return random_rows
