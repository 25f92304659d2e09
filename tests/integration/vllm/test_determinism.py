from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from turngym.agents.config import EngineConfig
from turngym.agents.vllm_policy import VLLMPolicy, open_vllm


@pytest.fixture(scope="module")
def policy(folder: Path) -> Iterator[VLLMPolicy]:
    engine = EngineConfig(kind="vllm", kv_gib=0.5)
    with open_vllm(engine, model_path=folder, deterministic=True) as policy:
        yield policy


def test_trajectories_are_bit_equal_for_concurrency_1_and_64(
    policy: VLLMPolicy, model: nn.Module, play: Any, tools: Any
) -> None:
    policy.push(tools.trainable(model), version=1)
    alone = play(policy, range(8), concurrency=1, deterministic=True)
    crowd = play(policy, range(8), concurrency=64, deterministic=True)
    sampled = 0
    for one_group, other_group in zip(alone, crowd, strict=True):
        for one, other in zip(one_group.trajectories, other_group.trajectories, strict=True):
            assert one.ids.tobytes() == other.ids.tobytes()
            assert one.logp.tobytes() == other.logp.tobytes()
            sampled += one.num_sampled
    assert sampled > 500
    assert tools.worst_gap({1: model}, crowd) <= 1e-5
