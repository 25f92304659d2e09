"""`Batch`: what the learner knows of a generation batch, one entry per sampled token.

Nothing is padded. Flat token columns (N,) run through rows (trajectories) in order, row columns
(B,) say which group a row belongs to and what it earned, and `contexts` hold the ids a forward
pass needs, its sampled tokens in the same order as the flat tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from turngym.errors import TrajectoryError
from turngym.rl.collate import Context, collate
from turngym.rl.segments import Rows
from turngym.types import Group, Trajectory

__all__ = ["Batch", "Context", "Tree"]


class Tree(NamedTuple):
    """Where the tokens of tree rollouts sit."""

    node: Tensor
    """Node of each token, (N,)."""

    parent: Tensor
    """Parent of each node, -1 for roots, parents before children, (nodes,)."""

    leaf: Tensor
    """Leaf in which each row ends, (B,)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """A generation batch as flat token columns and row columns.

    Raises:
        TrajectoryError: at construction, when columns disagree.
    """

    row: Tensor
    """Row of each token, not decreasing, (N,) int64."""

    turn: Tensor
    """Turn of each token in its row, (N,) int64."""

    role: Tensor
    """`TokenRole` of each token, REASONING or ACTION, (N,) int8."""

    logp_rollout: Tensor
    """Log-probability of the sampler; 0 for demonstrations, (N,)."""

    version: Tensor
    """Optimizer steps the sampling weights had seen, -1 for demonstrations, (N,) int64."""

    group: Tensor
    """Group of each row, 0..P-1, (B,) int64."""

    num_turns: Tensor
    """Turns of each row, (B,) int64."""

    truncated: Tensor
    """A limit ended the row, (B,) bool."""

    demo: Tensor
    """The row is a demonstration: no sampler's probabilities, (B,) bool."""

    rewards: Mapping[str, Tensor]
    """Outcome components by name, NaN where one abstained, (B,) float64."""

    turn_rewards: Mapping[str, Tensor] = field(default_factory=dict)
    """Turn components by name, NaN where one abstained or the turn does not exist, (B, K)."""

    contexts: tuple[Context, ...] = ()
    task_ids: tuple[str, ...] = ()
    """Task of each group, (P,)."""

    mask: Tensor | None = None
    """False on sampled tokens that must not train, (N,) bool; None = all train."""

    logp_old: Tensor | None = None
    """Trainer with the weights that sampled, (N,); None = the new policy, detached."""

    logp_ref: Tensor | None = None
    logp_current: Tensor | None = None
    """Current trainer, detached, from a pre-pass, (N,)."""

    entropy: Tensor | None = None
    """Entropy of the current trainer, detached, (N,)."""

    certainty: Tensor | None = None
    """KL(uniform || current trainer), detached, (N,)."""

    values: Tensor | None = None
    """Critic before each token, (N,)."""

    bootstrap: Tensor | None = None
    """Critic after the last token of each row, (B,)."""

    step_values: Tensor | None = None
    """Monte-Carlo value of the state before each turn, (B, K)."""

    greedy: Mapping[str, Tensor] = field(default_factory=dict)
    """What the group's greedy rollout earned, by component, NaN where it abstained, (B,)."""

    anchor_state: Tensor | None = None
    """Number of the state before each turn: equal states of a group share one, (B, K) int64."""

    answers: tuple[str | None, ...] = ()
    """Final answer of each row, for majority votes."""

    bucket: Tensor | None = None
    """Kind of task and role of each row, (B,) int64."""

    spans: Mapping[str, Tensor] = field(default_factory=dict)
    """Tokens of turns that carry `info["span"]`, by name, (N,) bool."""

    topk_logp: Tensor | None = None
    """The sampler's K most likely tokens at each position, (N, K), most likely first."""

    topk_ids: Tensor | None = None
    """Their ids, (N, K)."""

    token_ids: Tensor | None = None
    """Id of each token, (N,)."""

    tree: Tree | None = None

    def __post_init__(self) -> None:
        tokens, rows = len(self.row), len(self.group)
        for name, column in self._columns("N").items():
            self._check(len(column) == tokens, f"column {name!r} needs {tokens} tokens", column)
        for name, column in self._columns("B").items():
            self._check(len(column) == rows, f"column {name!r} needs {rows} rows", column)
        for name in ("row", "turn", "version", "group", "num_turns"):
            column = getattr(self, name)
            self._check(column.dtype == torch.int64, f"column {name!r} must be int64", column)
        flags = {"truncated": self.truncated, "demo": self.demo, **self.spans}
        for name, column in (flags if self.mask is None else flags | {"mask": self.mask}).items():
            self._check(column.dtype == torch.bool, f"column {name!r} must be bool", column)
        self._check(bool((self.row.diff() >= 0).all()), "tokens must be in row order", self.row)
        if tokens:
            low, high = int(self.row[0]), int(self.row[-1])
            self._check(low >= 0 and high < rows, f"rows must lie in 0..{rows - 1}", self.row)
            within = (self.turn >= 0) & (self.turn < self.num_turns[self.row])
            self._check(bool(within.all()), "turns must exist in their row", self.turn)
        self._check(
            bool(torch.isfinite(self.logp_rollout).all()),
            "log-probabilities of the sampler must be finite",
            self.logp_rollout,
        )
        for name, column in (*self.rewards.items(), *self.turn_rewards.items()):
            self._check(
                not bool(torch.isinf(column).any()),
                f"reward {name!r} must be finite, or NaN where it abstained",
                column,
            )
        for name, column in self.turn_rewards.items():
            self._check(
                column.shape[1:] == (self.max_turns,),
                f"turn reward {name!r} needs one column a turn, {self.max_turns}",
                column,
            )
        both = sorted(set(self.rewards) & set(self.turn_rewards))
        self._check(not both, f"rewards {both} are of both levels")

    @staticmethod
    def _check(holds: bool, rule: str, column: Tensor | None = None) -> None:
        if not holds:
            shape = "" if column is None else f", got {tuple(column.shape)} {column.dtype}"
            raise TrajectoryError(f"{rule}{shape}")

    def _columns(self, axis: str) -> dict[str, Tensor]:
        names = {
            "N": "turn role logp_rollout version mask logp_old logp_ref logp_current entropy "
            "certainty values topk_logp topk_ids token_ids",
            "B": "num_turns truncated demo bootstrap step_values anchor_state bucket",
        }[axis]
        named = {name: getattr(self, name) for name in names.split()}
        more = (
            dict(self.spans)
            if axis == "N"
            else {**self.rewards, **self.turn_rewards, **self.greedy}
        )
        return {name: column for name, column in (named | more).items() if column is not None}

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.row)

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.group)

    @cached_property
    def num_groups(self) -> int:
        """P."""
        return int(self.group.max()) + 1 if len(self.group) else 0

    @cached_property
    def max_turns(self) -> int:
        """K."""
        return max(1, int(self.num_turns.max())) if len(self.group) else 1

    @cached_property
    def rows(self) -> Rows:
        """Dense layout of the flat tokens."""
        return Rows(self.row, self.num_rows)

    @cached_property
    def trainable(self) -> Tensor:
        """True on tokens that may train, (N,)."""
        return torch.ones_like(self.row, dtype=torch.bool) if self.mask is None else self.mask

    @property
    def dtype(self) -> torch.dtype:
        """Of the token columns."""
        return self.logp_rollout.dtype

    def tokens_of(self, contexts: Iterable[int]) -> Tensor:
        """Flat indices of the sampled tokens of some contexts, in their order."""
        spans = [
            torch.arange(context.start, context.start + len(context.positions))
            for context in (self.contexts[i] for i in contexts)
        ]
        return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)

    @classmethod
    def from_groups(
        cls,
        groups: Sequence[Group],
        *,
        greedy: Mapping[str, Trajectory] | None = None,
        anchors: bool = False,
    ) -> "Batch":
        """Collect groups of trajectories.

        Args:
            groups: groups in order; rows follow it.
            greedy: one greedy rollout by group id, where the algorithm needs it.
            anchors: number the state before every turn (`BoundAlgorithm.needs_anchors`).

        Raises:
            TrajectoryError: a message-level record, a world fault, or a sampled first token.
        """
        return cls(**collate(groups, greedy=greedy, anchors=anchors))
