from typing import Any

import pytest

from turngym.errors import ConfigError
from turngym.rl.config import Stages, TrainConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"staleness": -1}, "staleness must not be negative, got -1"),
        ({"staleness": 2, "deterministic": True}, "deterministic runs need staleness=0, got 2"),
        (
            {"staleness": 1, "stages": Stages(temperature=((3, 0.5),))},
            r"stages\.temperature needs staleness=0, got 1",
        ),
    ],
)
def test_a_staleness_that_cannot_hold_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**settings)


def test_a_run_is_synchronous_and_samples_in_process_by_default() -> None:
    config = TrainConfig()
    assert (config.staleness, config.engine.kind) == (0, "hf")
