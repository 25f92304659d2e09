"""Every registered environment passes Gymnasium's checker and ours, and pays honesty best."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check_env

import turngym
from turngym.envs import make_call, resources
from turngym.types import Action

IDS = [env_id for env_id in turngym.envs.env_ids() if env_id.startswith("turngym/")]


@pytest.fixture(scope="module", autouse=True)
def _resources() -> Iterator[None]:
    yield
    resources.close()


@pytest.mark.parametrize("env_id", IDS)
def test_gymnasiums_checker_passes(env_id: str) -> None:
    env = gymnasium.make(env_id)
    gymnasium_check_env(env)
    env.close()


@pytest.mark.slow
@pytest.mark.parametrize("env_id", IDS)
def test_our_checker_passes(env_id: str) -> None:
    turngym.check_env(env_id)


VALID_CALLS: dict[str, Callable[[Any], tuple[str, dict[str, Any]]]] = {
    "turngym/Calculator-v0": lambda task: ("calc", {"expr": "1+1"}),
    "turngym/Lookup-v0": lambda task: ("get", {"key": next(iter(task.metadata["store"]))}),
    "turngym/MathQA-v0": lambda task: ("python", {"code": "print(1)"}),
    "turngym/PythonTool-v0": lambda task: ("python", {"code": "print(1)"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("env_id", IDS)
def test_spamming_valid_calls_pays_less_than_honest_work(env_id: str) -> None:
    kwargs = {"python": True} if env_id == "turngym/MathQA-v0" else {}
    env = turngym.make(env_id, max_turns=6, **kwargs)
    honest = spammed = 0.0
    for seed in range(4):
        rng, ended = random.Random(seed), False
        env.reset(seed=seed)
        while not ended:
            _, gained, terminated, truncated, _ = env.step(
                env.get_wrapper_attr("demonstrate")(rng, {})
            )
            honest += float(gained)
            ended = terminated or truncated
        assert terminated
        env.reset(seed=seed)
        name, arguments = VALID_CALLS[env_id](env.get_wrapper_attr("task"))
        call = make_call(name, arguments, turn=0)
        for turn in range(6):
            _, gained, _, truncated, info = env.step(
                Action(role="assistant", content="", tool_calls=[call])
            )
            assert info["results"][0].ok
            # The first call may be a right one; none after it is worth anything.
            assert float(gained) <= 0 or turn == 0
            spammed += float(gained)
        assert truncated
    assert spammed <= 0 < honest
    env.close()


def test_every_environment_has_a_spammer() -> None:
    assert set(IDS) == VALID_CALLS.keys()
