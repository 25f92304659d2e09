import math
from typing import Any

import pytest
import torch

from turngym.agents.base import Sampling
from turngym.agents.hf_policy import HFPolicy
from turngym.agents.model import load_model
from turngym.errors import WeightSyncError
from turngym.rl.weights import Canary

PROMPT = [4, 8, 15, 16]
CANARY = Canary(PROMPT, Sampling(temperature=0.7))


def stretch(model: Any) -> None:
    """Change the weights so that every log-probability changes."""
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)


def test_an_engine_with_the_trainers_weights_passes(model: Any) -> None:
    with HFPolicy(model, threads=1) as policy:
        assert CANARY.check(policy, model, version=0) < 1e-4
        stretch(model)
        policy.set_version(1)
        assert CANARY.check(policy, model, version=1) < 1e-4


def test_a_skipped_sync_names_both_versions(model: Any) -> None:
    with (
        HFPolicy(model, threads=1) as policy,
        pytest.raises(WeightSyncError, match="policy version 0, the trainer is at 2"),
    ):
        CANARY.check(policy, model, version=2)


def test_other_weights_are_found_out_with_both_numbers(model: Any, tiny: Any) -> None:
    other = load_model(tiny, device="cpu")[0]
    stretch(other)
    with HFPolicy(model, threads=1) as policy, pytest.raises(WeightSyncError) as caught:
        CANARY.check(policy, other, version=0)
    numbers = [float(word) for word in str(caught.value).replace(":", "").split() if word[0] == "-"]
    theirs, ours = numbers
    assert math.isfinite(theirs)
    assert abs(theirs - ours) > 1e-4
