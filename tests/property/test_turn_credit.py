"""Group advantages over turns against a loop over members, turns and components."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turngym.rl.algorithm import RunFacts
from turngym.rl.axes import Reward
from turngym.rl.estimators import GroupAdvantage
from turngym.rl.padded import batch_from_padded
from turngym.rl.plan import plan
from turngym.rl.presets import PRESETS
from turngym.types import RewardSpec

FEW = settings(max_examples=25, deadline=None, derandomize=True)
EPS = 1e-6
WEIGHTS = {"correct": 1.0, "tool": 0.5}


class Members:
    """Groups of 1 to 4 members with 1 to 3 turns of one token each; components may abstain."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        sizes = rng.integers(1, 5, 3)
        self.group = rng.permutation(np.repeat(np.arange(3), sizes))
        self.turns = rng.integers(1, 4, len(self.group))
        self.correct = rng.choice([0.0, 1.0, math.nan], len(self.group), p=[0.4, 0.4, 0.2])
        self.tool = [
            rng.choice([0.0, 0.5, 1.0], n) * (math.nan if rng.random() < 0.2 else 1.0)
            for n in self.turns
        ]

    def to_go(self, name: str, row: int, gamma: float) -> list[float] | None:
        """Discounted rewards from each turn on; None where the component abstained."""
        turns = int(self.turns[row])
        steps = [0.0] * (turns - 1) + [self.correct[row]] if name == "correct" else self.tool[row]
        if all(math.isnan(value) for value in steps[-1:]):
            return None
        return [sum(gamma ** (j - k) * steps[j] for j in range(k, turns)) for k in range(turns)]

    def advantages(self, gamma: float, *, mean: bool, apart: bool) -> list[list[float]]:
        """Of each turn of each member: summed raw, or normalised apart and then summed."""
        total = [np.zeros(n) for n in self.turns]
        rows = range(len(self.group))
        known = {row: any(self.to_go(n, row, gamma) for n in WEIGHTS) for row in rows}
        for g in set(self.group.tolist()):
            members = [row for row in rows if self.group[row] == g and known[row]]
            if len(members) < 2:
                continue
            for name, weight in WEIGHTS.items():
                values = {row: self.to_go(name, row, gamma) for row in members}
                here = {row: value for row, value in values.items() if value is not None}
                if len(here) < 2:
                    continue
                parts = {row: self.minus_others(row, here) for row in here}
                shrink = (len(here) - 1) / len(here)
                spread = math.sqrt(
                    sum(np.mean((shrink * part) ** 2) for part in parts.values()) / (len(here) - 1)
                )
                scale = 1.0 if not apart else (1 / (spread + EPS) if spread > 1e-12 else 0.0)
                for row, part in parts.items():
                    total[row] += weight * part * (shrink if mean else 1.0) * scale
        return [line.tolist() for line in total]

    @staticmethod
    def minus_others(row: int, here: dict[int, list[float]]) -> Any:
        """Minus the mean of the others at that turn; alone there, of the others' whole returns."""
        out = []
        for k, value in enumerate(here[row]):
            others = [line[k] for i, line in here.items() if i != row and len(line) > k]
            whole = [line[0] for i, line in here.items() if i != row]
            out.append(value - float(np.mean(others or whole)))
        return np.array(out)

    def batch(self) -> Any:
        width = int(self.turns.max())
        mask = torch.tensor([[k < n for k in range(width)] for n in self.turns])
        tool = torch.full((len(self.group), width), math.nan, dtype=torch.float64)
        for row, line in enumerate(self.tool):
            tool[row, : len(line)] = torch.tensor(line)
        return batch_from_padded(
            mask=mask,
            group=torch.from_numpy(self.group),
            logp_rollout=torch.zeros(mask.shape, dtype=torch.float64),
            rewards={"correct": torch.from_numpy(self.correct)},
            turn_rewards={"tool": tool},
            turn=torch.arange(width).expand(len(self.group), -1),
        )


@pytest.mark.parametrize("apart", [False, True], ids=["summed", "apart"])
@pytest.mark.parametrize("baseline", ["leave_one_out", "group_mean"])
@given(seed=st.integers(0, 10_000), gamma=st.sampled_from([1.0, 0.9]))
@FEW
def test_turn_credit_is_what_a_loop_over_members_finds(
    baseline: Any, apart: bool, seed: int, gamma: float
) -> None:
    members = Members(seed)
    estimator = GroupAdvantage(
        baseline=baseline,
        unit="turn",
        gamma=gamma,
        scale="group_std" if apart else "none",
        eps=EPS,
    )
    reward = Reward(combine="normalize_then_sum" if apart else "sum")
    algorithm = replace(PRESETS["dr_grpo"], advantage=estimator, reward=reward)
    run = RunFacts(
        rubric={
            "correct": RewardSpec(name="correct"),
            "tool": RewardSpec(name="tool", level="turn", weight=0.5),
        },
        group_size=4,
        max_tokens=3,
    )
    batch = members.batch()
    found = plan(algorithm.bind(run), batch).advantage
    wanted = members.advantages(gamma, mean=baseline == "group_mean", apart=apart)
    flat = torch.tensor([value for line in wanted for value in line], dtype=torch.float64)
    torch.testing.assert_close(found, flat, rtol=1e-9, atol=1e-9)
