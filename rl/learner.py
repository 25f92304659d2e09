"""From groups of trajectories to updated weights, whatever the algorithm.

    batch -> passes without gradient (old, reference, values, pre-pass) -> credit -> plan
          -> micro-batches: log-probabilities, loss, backward -> optimizer step

Every normaliser is in the plan, so how rows are cut into micro-batches, or dealt to processes,
changes nothing.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from turngym.agents.model import policy_logprobs
from turngym.rl.algorithm import BoundAlgorithm
from turngym.rl.batch import Batch, Context
from turngym.rl.config import OptimConfig
from turngym.rl.metrics import Metric, merge
from turngym.rl.micro import micro_batches
from turngym.rl.objectives import objective
from turngym.rl.optim import Optimizers
from turngym.rl.parallel import Ranks
from turngym.rl.plan import Credit, Plan, assign, plan
from turngym.rl.regularizers import adapt
from turngym.rl.state import AlgorithmState
from turngym.types import Group, Trajectory

__all__ = ["Learner"]

Reference = Callable[[], AbstractContextManager[Any]]


class Learner:
    """Holds the policy's weights and improves them.

    Args:
        model: a causal LM or a peft model around one; updated in place.
        bound: the algorithm.
        config: optimizer steps, sizes of passes.
        total_steps: optimizer steps of the whole run, for the schedule.
        temperature: at which the policy samples; every log-probability is taken at it.
        seed: of the split into optimizer steps.
        reference: returns a context in which the model it yields is the reference policy; None =
            there is none.
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
        ranks: Ranks | None = None,
    ) -> None:
        self.model = model
        self.bound = bound
        self.config = config
        self.temperature = temperature
        self.state = AlgorithmState()
        self.version = 0
        self.optimizers = Optimizers(model, config, total_steps=total_steps)
        self._seed = seed
        self._reference = reference
        self._ranks = ranks or Ranks()

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
        parts: list[Mapping[str, Metric]] = []
        norms: list[float] = []
        planned: Plan | None = None
        for epoch in range(self.config.epochs):
            step = self._deal(batch, epoch)
            if not self.bound.needs_prepass:
                planned = plan(self.bound, batch, step=step, credit=credit)
            for number in range(int(step.max()) + 1):
                rows = step == number
                if self.bound.needs_prepass:
                    batch, planned = self._plan_step(batch, credit, rows)
                assert planned is not None
                parts += self._accumulate(batch, planned, rows)
                norms.append(self.optimizers.step())
                self.version += 1
        assert planned is not None
        metrics = merge(self._ranks.gather(parts)) | {"train/grad_norm": max(norms)}
        metrics["train/moving_rows"] = float(planned.moving_rows(batch).sum())
        self.state = adapt(
            self.bound,
            planned.state,
            kl=metrics.get("train/kl"),
            entropy=metrics.get("train/entropy"),
            count=batch.num_rows,
        )
        return metrics

    def _plan_step(self, batch: Batch, credit: Credit, rows: Tensor) -> tuple[Batch, Plan]:
        """Take statistics of the current policy over one optimizer batch, then plan it."""
        contexts = [i for i, context in enumerate(batch.contexts) if rows[context.row]]
        logp, entropy = self._score(batch, contexts, with_entropy=self.bound.needs_batch_entropy)
        batch = replace(batch, logp_current=logp, entropy=entropy)
        step = torch.where(rows, 0, -1)
        return batch, plan(self.bound, batch, step=step, credit=credit)

    def _deal(self, batch: Batch, epoch: int) -> Tensor:
        """Deal whole groups to optimizer steps; rows when there are fewer groups than steps."""
        rng = random.Random(f"{self._seed}/{self.state.step}/{epoch}")
        by_group = batch.num_groups >= self.config.minibatches
        count = batch.num_groups if by_group else batch.num_rows
        order = list(range(count))
        rng.shuffle(order)
        steps = min(self.config.minibatches, count)
        of_unit = torch.empty(count, dtype=torch.int64)
        of_unit[order] = torch.arange(count) * steps // count
        return of_unit[batch.group] if by_group else of_unit

    def _accumulate(self, batch: Batch, planned: Plan, rows: Tensor) -> list[Mapping[str, Metric]]:
        moving = rows & planned.moving_rows(batch)
        chosen = [i for i, context in enumerate(batch.contexts) if moving[context.row]]
        parts: list[Mapping[str, Metric]] = []
        for part in self._ranks.share(self._passes(batch, chosen)):
            index = batch.tokens_of(part)
            scored = policy_logprobs(
                self.model,
                [batch.contexts[i].ids for i in part],
                [batch.contexts[i].positions for i in part],
                temperature=self.temperature,
                with_entropy=self.bound.needs_entropy,
            )
            loss, metrics = objective(
                self.bound, batch, planned, index, scored.logp, entropy=scored.entropy
            )
            loss.backward()  # type: ignore[no-untyped-call]
            parts.append(metrics)
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

    @torch.no_grad()
    def _score(
        self, batch: Batch, chosen: Sequence[int], *, model: Any = None, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Score the sampled tokens of some contexts; tokens of the others stay 0."""
        logp = torch.zeros(batch.num_tokens, dtype=batch.dtype)
        entropy = torch.zeros_like(logp) if with_entropy else None
        limit = self.config.micro_tokens
        for part in self._ranks.share(micro_batches(batch.contexts, chosen, max_tokens=limit)):
            index = batch.tokens_of(part)
            scored = policy_logprobs(
                self.model if model is None else model,
                [batch.contexts[i].ids for i in part],
                [batch.contexts[i].positions for i in part],
                temperature=self.temperature,
                with_entropy=with_entropy,
            )
            logp[index] = scored.logp.to(logp)
            if entropy is not None and scored.entropy is not None:
                entropy[index] = scored.entropy.to(logp)
        return self._ranks.sum(logp), None if entropy is None else self._ranks.sum(entropy)

    def _annotate(self, batch: Batch) -> Batch:
        """Add the columns that the algorithm reads, each by one pass without gradient."""
        everything = range(len(batch.contexts))
        bound = self.bound
        if bound.needs_old_logp or (bound.needs_batch_entropy and not bound.needs_prepass):
            logp, entropy = self._score(batch, everything, with_entropy=bound.needs_batch_entropy)
            batch = replace(batch, logp_old=logp, entropy=entropy)
        if bound.needs_ref and self._reference is not None:
            with self._reference() as model:
                reference, _ = self._score(batch, everything, model=model)
            batch = replace(batch, logp_ref=reference)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Everything besides the weights that a bit-equal resume needs."""
        from dataclasses import asdict

        return {
            "optimizers": self.optimizers.state_dict(),
            "state": asdict(self.state),
            "version": self.version,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.optimizers.load_state_dict(state["optimizers"])
        self.state = AlgorithmState(**state["state"])
        self.version = state["version"]
