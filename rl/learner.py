"""From groups of trajectories to updated weights, whatever the algorithm.

    batch -> passes without gradient (old, reference, values, pre-pass) -> credit -> plan
          -> micro-batches: log-probabilities, loss, backward -> optimizer step

Every normaliser is in the plan, so how rows are cut into micro-batches, or dealt to processes,
changes nothing.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from turngym.rl.algorithm import BoundAlgorithm
from turngym.rl.axes import NegativeEntropy
from turngym.rl.batch import Batch, Context
from turngym.rl.config import OptimConfig
from turngym.rl.critic import Critic
from turngym.rl.metrics import Metric, merge
from turngym.rl.micro import micro_batches
from turngym.rl.mismatch import joined, mismatch, staleness
from turngym.rl.objectives import objective
from turngym.rl.optim import Optimizers
from turngym.rl.parallel import Ranks
from turngym.rl.plan import Credit, Plan, assign, plan
from turngym.rl.reference import Reference
from turngym.rl.regularizers import adapt
from turngym.rl.scorer import Column, Scorer
from turngym.rl.state import AlgorithmState
from turngym.rl.terms import KL, ValueLoss
from turngym.types import Group, Trajectory

__all__ = ["Learner"]

Scored = list[tuple[Tensor, Tensor]]
"""Flat indices and detached log-probabilities, pass by pass."""


class Learner:
    """Holds the policy's weights and improves them.

    Args:
        model: a causal LM or a peft model around one; updated in place.
        bound: the algorithm.
        config: optimizer steps, sizes of passes.
        total_steps: optimizer steps of the whole run, for the schedule.
        temperature: at which the policy samples; every log-probability is taken at it.
        seed: of the split into optimizer steps.
        reference: the policy that KL terms and DPO compare with, where the algorithm has any.
        critic: where the algorithm reads values.
        ranks: the processes that train together.
    """

    def __init__(
        self,
        model: Any,
        bound: BoundAlgorithm,
        config: OptimConfig,
        *,
        total_steps: int,
        temperature: float = 1.0,
        seed: int = 0,
        reference: Reference | None = None,
        critic: Critic | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.model = model
        self.bound = bound
        self.config = config
        self.state = AlgorithmState()
        self.version = 0
        self.critic = critic
        self.optimizers = Optimizers(model, config, total_steps=total_steps)
        self._seed = seed
        self._reference = reference
        self._ranks = ranks or Ranks()
        self._scorer = Scorer(config.micro_tokens, temperature, self._ranks)

    @property
    def temperature(self) -> float:
        """At which the policy samples; set it before the batch that was sampled at another."""
        return self._scorer.temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        self._scorer.temperature = value

    def update(
        self, groups: Sequence[Group], *, greedy: Mapping[str, Trajectory] | None = None
    ) -> dict[str, float]:
        """Train on one generation batch.

        Args:
            groups: complete groups.
            greedy: one greedy rollout by group id, where the algorithm needs it.

        Returns:
            Metrics over all optimizer steps of the batch.
        """
        batch = self._annotate(
            Batch.from_groups(groups, greedy=greedy, anchors=self.bound.needs_anchors)
        )
        credit = assign(self.bound, batch, self.state)
        metrics = staleness(batch, self.version) | credit.variety(batch)
        if self.critic is not None:
            metrics |= self.critic.fit(self.bound, batch, credit, self._critic_steps(batch))
        before = self.version
        found, planned, first = self._improve(batch, credit)
        metrics |= found
        if batch.logp_old is not None:
            everything = torch.arange(batch.num_tokens)
            metrics |= mismatch(batch, everything, batch.logp_old, version=before)
        else:
            here = [(index, logp.cpu()) for index, logp in first]
            metrics |= mismatch(batch, *joined(self._ranks.gather(here)), version=before)
        self.state = adapt(
            self.bound,
            planned.state,
            kl=metrics.get("train/kl"),
            entropy=metrics.get("train/entropy"),
            count=batch.num_rows,
        )
        return metrics | self._reset_reference(before)

    def _improve(self, batch: Batch, credit: Credit) -> tuple[dict[str, float], Plan, Scored]:
        """Take all optimizer steps; return metrics, the last plan, the first step's scores."""
        parts: list[Mapping[str, Metric]] = []
        norms: list[float] = []
        moving = 0
        planned: Plan | None = None
        first: Scored = []
        for epoch in range(self.config.epochs):
            step = self._deal(batch, self.config.minibatches, f"{epoch}")
            if not self.bound.needs_prepass:
                planned = plan(self.bound, batch, step=step, credit=credit)
            for number in range(int(step.max()) + 1):
                rows = step == number
                if self.bound.needs_prepass:
                    batch, planned = self._plan_step(batch, credit, rows)
                assert planned is not None
                scored: Scored = []
                rows = rows & planned.moving_rows(batch)
                moving += int(rows.sum())
                parts += self._accumulate(batch, planned, rows, scored)
                first = first if norms else scored
                norms.append(self.optimizers.step())
                self.version += 1
        assert planned is not None
        metrics = merge(self._ranks.gather(parts), steps=len(norms))
        metrics["train/grad_norm"] = float(torch.tensor(norms).max())
        metrics["train/moving_rows"] = moving / self.config.epochs
        return metrics, planned, first

    def pretrain_critic(self, groups: Sequence[Group]) -> dict[str, float]:
        """Fit the critic to the returns of a generation batch; the policy stays as it is."""
        if self.critic is None:
            return {}
        batch = self._annotate(Batch.from_groups(groups))
        return self.critic.pretrain(self.bound, batch, self._critic_steps(batch))

    @property
    def pretraining_left(self) -> int:
        """Critic steps to take before the policy may move."""
        term = self.bound.algorithm.term(ValueLoss)
        if self.critic is None or term is None:
            return 0
        return max(0, term.pretrain_steps - self.critic.steps)

    def _critic_steps(self, batch: Batch) -> Iterator[Tensor]:
        """The critic takes `ValueLoss.updates` steps for each of the policy's, over one batch."""
        term = self.bound.algorithm.term(ValueLoss) or ValueLoss()
        assert self.critic is not None
        for epoch in range(self.config.epochs):
            name = f"critic/{self.critic.steps}/{epoch}"
            yield self._deal(batch, self.config.minibatches * term.updates, name)

    def _reset_reference(self, before: int) -> dict[str, float]:
        """Make the policy the reference when a multiple of `KL.reset_steps` was reached."""
        kl = self.bound.algorithm.term(KL)
        if kl is None or kl.reset_steps is None or self._reference is None:
            return {}
        is_due = self.version // kl.reset_steps > before // kl.reset_steps
        if is_due:
            self._reference.reset()
            self.optimizers.reset()
        return {"train/reference_reset": float(is_due)}

    def _plan_step(self, batch: Batch, credit: Credit, rows: Tensor) -> tuple[Batch, Plan]:
        """Take statistics of the current policy over one optimizer batch, then plan it."""
        contexts = [i for i, context in enumerate(batch.contexts) if rows[context.row]]
        names: tuple[Column, ...] = ("logp", "entropy")
        names = names if self.bound.needs_batch_entropy else names[:1]
        found = self._scorer.columns(self.model, batch, contexts, *names)
        batch = replace(batch, logp_current=found["logp"], entropy=found.get("entropy"))
        step = torch.where(rows, 0, -1)
        return batch, plan(self.bound, batch, step=step, credit=credit)

    def _deal(self, batch: Batch, parts: int, name: str) -> Tensor:
        """Deal whole groups to optimizer steps; rows when there are fewer groups than steps."""
        rng = random.Random(f"{self._seed}/{self.state.step}/{name}")
        by_group = batch.num_groups >= parts or self.bound.unit == "group"
        count = batch.num_groups if by_group else batch.num_rows
        order = list(range(count))
        rng.shuffle(order)
        steps = min(parts, count)
        of_unit = torch.empty(count, dtype=torch.int64)
        of_unit[order] = torch.arange(count) * steps // count
        return of_unit[batch.group] if by_group else of_unit

    def _accumulate(
        self, batch: Batch, planned: Plan, rows: Tensor, scored: Scored
    ) -> list[Mapping[str, Metric]]:
        chosen = [i for i, context in enumerate(batch.contexts) if rows[context.row]]
        parts: list[Mapping[str, Metric]] = []
        for part in self._ranks.share(self._passes(batch, chosen)):
            index = batch.tokens_of(part)
            found = self._scorer.forward(
                self.model,
                batch,
                part,
                with_entropy=self.bound.needs_entropy,
                topk_ids=_topk_ids(self.bound, batch, index),
            )
            loss, metrics = objective(
                self.bound,
                batch,
                planned,
                index,
                found.logp,
                entropy=found.entropy,
                topk_logp=found.topk,
            )
            loss.backward()  # type: ignore[no-untyped-call]
            parts.append(metrics)
            scored.append((index, found.logp.detach()))
        self._ranks.sum_gradients(self.optimizers.parameters)
        return parts

    def _passes(self, batch: Batch, chosen: Sequence[int]) -> list[list[int]]:
        whole: Callable[[Context], int] | None = None
        if self.bound.unit == "group":
            whole = lambda context: int(batch.group[context.row])  # noqa: E731
        elif self.bound.unit == "row":
            whole = lambda context: context.row  # noqa: E731
        limit = self.config.micro_tokens
        return micro_batches(batch.contexts, chosen, max_tokens=limit, whole=whole)

    def _annotate(self, batch: Batch) -> Batch:
        """Add the columns that the algorithm reads, all in one pass without gradient a model."""
        everything = range(len(batch.contexts))
        bound = self.bound
        names: list[Column] = ["logp"] if bound.needs_old_logp else []
        if any(isinstance(item, NegativeEntropy) for item in bound.algorithm.reward.shaping):
            names.append("entropy")
        if bound.needs_certainty:
            names.append("certainty")
        if names:
            found = self._scorer.columns(self.model, batch, everything, *names)
            batch = replace(
                batch,
                logp_old=found.get("logp"),
                entropy=found.get("entropy"),
                certainty=found.get("certainty"),
            )
        if bound.needs_ref and self._reference is not None:
            with self._reference.active() as model:
                reference = self._scorer.columns(model, batch, everything, "logp")
            batch = replace(batch, logp_ref=reference["logp"])
        return batch if self.critic is None else self.critic.annotate(bound, batch)

    def state_dict(self) -> dict[str, Any]:
        """Everything besides the policy's weights that a bit-equal resume needs."""
        return {
            "optimizers": self.optimizers.state_dict(),
            "state": asdict(self.state),
            "version": self.version,
            "reference": {} if self._reference is None else self._reference.state_dict(),
            "critic": None if self.critic is None else self.critic.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.optimizers.load_state_dict(state["optimizers"])
        self.state = AlgorithmState(**state["state"])
        self.version = state["version"]
        if self._reference is not None:
            self._reference.load_state_dict(state["reference"])
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])


def _topk_ids(bound: BoundAlgorithm, batch: Batch, index: Tensor) -> Tensor | None:
    return batch.topk_ids[index] if bound.needs_topk and batch.topk_ids is not None else None
