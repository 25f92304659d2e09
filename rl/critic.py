"""The critic: a value head on a decoder of its own, for PPO, Open-Reasoner-Zero and VAPO."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from turngym.agents.head import decoder_of, vocab_size
from turngym.agents.model import load_model, states_before
from turngym.errors import ConfigError
from turngym.rl.algorithm import BoundAlgorithm
from turngym.rl.axes import Ratio
from turngym.rl.batch import Batch
from turngym.rl.collate import Context
from turngym.rl.config import CriticConfig, OptimConfig
from turngym.rl.estimators import GAE
from turngym.rl.metrics import Metric, merge
from turngym.rl.micro import micro_batches
from turngym.rl.objectives import value_objective
from turngym.rl.optim import Optimizers
from turngym.rl.parallel import Ranks
from turngym.rl.plan import Credit, Plan, assign, plan
from turngym.rl.terms import ValueLoss

__all__ = ["Critic", "ValueModel", "critic_optim"]

_HEAD_FILE = "value_head.pt"


def critic_optim(config: CriticConfig, policy: OptimConfig) -> OptimConfig:
    """Return the critic's optimizer settings: its own rates, the policy's for the rest."""
    lr = 5 * policy.lr if config.lr is None else config.lr
    matrix_lr = policy.matrix_lr if config.matrix_lr is None else config.matrix_lr
    return replace(
        policy, lr=lr, matrix_lr=matrix_lr, warmup_steps=config.warmup_steps, schedule="constant"
    )


class ValueModel(nn.Module):
    """A decoder and one linear head; its values start at 0.

    Args:
        decoder: ends in hidden states; taken over, not copied.
    """

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        weight = decoder.get_input_embeddings().weight
        self.decoder = decoder
        self.head = nn.Linear(decoder.config.hidden_size, 1, device=weight.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @classmethod
    def beside(cls, policy: Any, config: CriticConfig) -> "ValueModel":
        """Make the critic of a policy: a copy of its decoder, or the model that `config` names.

        Args:
            policy: a causal LM, before any adapter is attached.
            config: which model to start from.

        Raises:
            ConfigError: the critic's model does not read the policy's token ids.
        """
        weight = policy.get_input_embeddings().weight
        if config.path is None:
            return cls(copy.deepcopy(decoder_of(policy)).requires_grad_(True))
        dtype = str(weight.dtype).removeprefix("torch.")
        model, _ = load_model(config.path, dtype=dtype, device=str(weight.device))
        if vocab_size(model) < vocab_size(policy):
            raise ConfigError(
                f"critic.path {config.path!r} knows {vocab_size(model)} token ids, the policy "
                f"{vocab_size(policy)}; choose a model with the policy's tokenizer"
            )
        return cls(decoder_of(model))

    def get_output_embeddings(self) -> nn.Module:
        """The head: an output layer, which Muon leaves to AdamW."""
        return self.head

    def forward(self, contexts: Sequence[Context], *, after_last: bool = False) -> Tensor:
        """Value of the state before each sampled token, (n,) float32, context after context.

        Args:
            contexts: their `positions` say which tokens were sampled.
            after_last: instead, one value a context: of the state after its last sampled token.
        """
        places = [c.positions[-1:] + 1 if after_last else c.positions for c in contexts]
        states = states_before(self.decoder, [context.ids for context in contexts], places)
        value: Tensor = self.head(states.to(self.head.weight.dtype)).squeeze(-1)
        return value.float()

    def save(self, folder: Path) -> None:
        """Write the decoder in Hugging Face form and the head beside it."""
        self.decoder.save_pretrained(folder)
        torch.save(self.head.state_dict(), folder / _HEAD_FILE)


class Critic:
    """Holds the value model and fits it.

    Args:
        model: gives the values; updated in place.
        optim: rates and sizes of its passes; `minibatches` and `epochs` as for the policy.
        ranks: the processes that train together.
    """

    def __init__(self, model: ValueModel, optim: OptimConfig, ranks: Ranks | None = None) -> None:
        self.model = model
        self.config = optim
        self.optimizers = Optimizers(model, optim, total_steps=1)
        self._ranks = ranks or Ranks()

    @property
    def steps(self) -> int:
        """Optimizer steps taken."""
        return self.optimizers.steps

    @torch.no_grad()
    def annotate(self, bound: BoundAlgorithm, batch: Batch) -> Batch:
        """Add the values, and the bootstrap of truncated rows where the estimator asks for it."""
        values = torch.zeros(batch.num_tokens)
        for part in self._passes(batch, range(len(batch.contexts))):
            index = batch.tokens_of(part)
            values[index] = self.model([batch.contexts[i] for i in part]).cpu()
        batch = replace(batch, values=self._ranks.sum(values).to(batch.dtype))
        advantage = bound.algorithm.advantage
        if not (isinstance(advantage, GAE) and advantage.bootstrap_truncated):
            return batch
        last = {c.row: i for i, c in enumerate(batch.contexts) if batch.truncated[c.row]}
        bootstrap = torch.zeros(batch.num_rows)
        for part in self._passes(batch, list(last.values())):
            rows = torch.tensor([batch.contexts[i].row for i in part])
            found = self.model([batch.contexts[i] for i in part], after_last=True)
            bootstrap[rows] = found.cpu()
        return replace(batch, bootstrap=self._ranks.sum(bootstrap).to(batch.dtype))

    def _passes(self, batch: Batch, chosen: Sequence[int]) -> list[list[int]]:
        limit = self.config.micro_tokens
        return self._ranks.share(micro_batches(batch.contexts, chosen, max_tokens=limit))

    def fit(
        self, bound: BoundAlgorithm, batch: Batch, credit: Credit, steps: Iterable[Tensor]
    ) -> dict[str, float]:
        """Regress on the returns in `credit`.

        Args:
            bound: the algorithm.
            batch: with `values`.
            credit: holds the targets.
            steps: for every pass over the batch the optimizer step of each row, (B,) int64 each.

        Returns:
            Metrics, the explained variance of the values before the fit among them.
        """
        bound = value_part(bound)
        parts: list[Mapping[str, Metric]] = []
        norms: list[float] = []
        for step in steps:
            planned = plan(bound, batch, step=step, credit=credit)
            for number in range(int(step.max()) + 1):
                parts += self._accumulate(bound, batch, planned, step == number)
                norms.append(self.optimizers.step())
        return merge(self._ranks.gather(parts), steps=len(norms)) | {
            "critic/grad_norm": float(torch.tensor(norms).max()),
            "critic/explained_variance": explained_variance(batch, credit),
        }

    def _accumulate(
        self, bound: BoundAlgorithm, batch: Batch, planned: Plan, rows: Tensor
    ) -> list[Mapping[str, Metric]]:
        chosen = [i for i, context in enumerate(batch.contexts) if rows[context.row]]
        parts: list[Mapping[str, Metric]] = []
        for part in self._passes(batch, chosen):
            values = self.model([batch.contexts[i] for i in part])
            loss, metrics = value_objective(bound, batch, planned, batch.tokens_of(part), values)
            loss.backward()  # type: ignore[no-untyped-call]
            parts.append(metrics)
        self._ranks.sum_gradients(self.optimizers.parameters)
        return parts

    def pretrain(
        self, bound: BoundAlgorithm, batch: Batch, steps: Iterable[Tensor]
    ) -> dict[str, float]:
        """Regress on Monte-Carlo returns: value pretraining, VAPO, arXiv:2504.05118.

        lambda = 1 makes the targets independent of the values; nothing is clipped.
        """
        free = monte_carlo(bound)
        return self.fit(free, batch, assign(free, batch), steps)

    def state_dict(self) -> dict[str, Any]:
        """Weights and optimizer."""
        return {"model": self.model.state_dict(), "optimizers": self.optimizers.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.model.load_state_dict(state["model"])
        self.optimizers.load_state_dict(state["optimizers"])


def value_part(bound: BoundAlgorithm) -> BoundAlgorithm:
    """Return the algorithm without what only the policy's loss reads."""
    algorithm = bound.algorithm
    kept = tuple(term for term in algorithm.regularize if isinstance(term, ValueLoss))
    bare = replace(
        algorithm, ratio=Ratio(anchor="none"), trust_region=None, tokens=(), regularize=kept
    )
    return replace(bound, algorithm=bare)


def monte_carlo(bound: BoundAlgorithm) -> BoundAlgorithm:
    """Return the algorithm with Monte-Carlo returns as the critic's targets, unclipped."""
    algorithm = bound.algorithm
    advantage = algorithm.advantage
    if not isinstance(advantage, GAE):
        raise ConfigError(f"{algorithm.name} has no critic to pretrain")
    free = tuple(
        replace(term, clip=None) if isinstance(term, ValueLoss) else term
        for term in algorithm.regularize
    )
    targets = replace(advantage, lam_critic=1.0)
    return replace(bound, algorithm=replace(algorithm, advantage=targets, regularize=free))


def explained_variance(batch: Batch, credit: Credit) -> float:
    """1 - var(target - value) / var(target) over the tokens that train; NaN without spread."""
    if batch.values is None or credit.value_targets is None:
        return float("nan")
    kept = credit.mask & credit.live[batch.row]
    targets = credit.value_targets.double()[kept]
    left = targets - batch.values.double()[kept]
    spread = float(targets.var(correction=0)) if len(targets) else 0.0
    return float("nan") if spread <= 0 else 1 - float(left.var(correction=0)) / spread
