"""Is the engine sampling from the trainer's weights? The canary finds out after every sync."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from turngym.agents.base import Policy, Sampling
from turngym.agents.model import policy_logprobs
from turngym.errors import WeightSyncError

__all__ = ["Canary"]


class Canary:
    """Samples a fixed short completion and scores it with the trainer; both must agree.

    The public `Policy` protocol is all it needs, so it watches every engine alike.

    Args:
        prompt_ids: context to sample from.
        sampling: temperature and stop tokens of the run.
        tolerance: largest difference of a token's log-probability; 1e-4 in fp32, more in bf16.
        tokens: length of the completion.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        tolerance: float = 1e-4,
        tokens: int = 16,
    ) -> None:
        self._prompt = np.asarray(prompt_ids, np.int32)
        self._sampling = Sampling(temperature=sampling.temperature, max_tokens=tokens)
        self._tolerance = tolerance

    async def measure(self, policy: Policy, model: Any, *, version: int) -> float:
        """Return the largest difference, in nats.

        Raises:
            WeightSyncError: versions or log-probabilities differ; both values are named.
        """
        if policy.version != version:
            raise WeightSyncError(
                f"the engine serves policy version {policy.version}, the trainer is at {version}"
            )
        session = "canary"
        completion = await policy.generate(
            self._prompt.tolist(), self._sampling, seed=version, version=version, session=session
        )
        policy.release(session)
        row = np.concatenate([self._prompt, completion.ids])
        positions = np.arange(len(self._prompt), len(row))
        with torch.no_grad():
            ours = policy_logprobs(
                model, [row], [positions], temperature=self._sampling.temperature or 1.0
            ).logp.cpu()
        theirs = torch.from_numpy(completion.logp.copy())
        worst = int((ours - theirs).abs().argmax())
        gap = float((ours - theirs).abs()[worst])
        if not gap <= self._tolerance:
            raise WeightSyncError(
                f"after syncing version {version} the canary's token {worst} has log-probability "
                f"{float(theirs[worst]):.6f} in the engine and {float(ours[worst]):.6f} in the "
                f"trainer (allowed difference {self._tolerance:g}): the weights are not the same"
            )
        return gap

    def check(self, policy: Policy, model: Any, *, version: int) -> float:
        """`measure` for code without an event loop."""
        return asyncio.run(self.measure(policy, model, version=version))
