"""Every registered environment passes Gymnasium's checker and ours."""

from collections.abc import Iterator

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check_env

import turngym
from turngym.envs import resources

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
