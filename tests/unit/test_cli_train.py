from pathlib import Path

import pytest

from turngym.cli.train import parse
from turngym.errors import ConfigError
from turngym.rl.config import TrainConfig
from turngym.rl.observer import Quiet
from turngym.rl.presets import preset
from turngym.rl.session import TrainSession
from turngym.rl.trust_region import Clip

RECIPE = f"@{Path(__file__).resolve().parents[2] / 'recipes' / 'calculator.toml'}"


def test_a_recipe_changes_its_preset_and_the_environment() -> None:
    config, kwargs = parse([RECIPE])
    assert config.algorithm.trust_region == Clip(low=0.2, high=0.28)
    assert config.algorithm.regularize == ()
    assert kwargs == {"notation": "words"}


def test_naming_the_recipes_own_preset_keeps_its_changes() -> None:
    config, _ = parse([RECIPE, "--algorithm", "grpo"])
    assert config.algorithm.trust_region == Clip(low=0.2, high=0.28)


def test_another_preset_leaves_the_changes_out_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config, _ = parse([RECIPE, "--algorithm", "rloo"])
    assert config.algorithm == preset("rloo")
    assert "trust_region" in capsys.readouterr().out


def test_the_label_of_an_algorithm_is_no_flag() -> None:
    with pytest.raises(SystemExit):
        parse([RECIPE, "--algorithm.name", "rloo"])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--trackers", "tensorbord"], "tensorbord"),
        (["--eval.tasks", "0"], "eval.tasks"),
        (["--temperature", "0"], "temperature must be positive"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_written(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse([RECIPE, *flags])
    assert stopped.value.code == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_a_folder_without_a_checkpoint_can_be_started_again(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "base").mkdir()
    TrainSession(TrainConfig(run=tmp_path), {}, Quiet())
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match="already holds a run"):
        TrainSession(TrainConfig(run=tmp_path), {}, Quiet())
