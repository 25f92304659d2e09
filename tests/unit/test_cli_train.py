import logging
from pathlib import Path

import pytest

from turngym.cli import in_flags, main
from turngym.cli.train import FLAGS, parse
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


@pytest.fixture(autouse=True)
def keep_pytests_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turngym.cli.train.setup_logging", lambda: None)


def run_tiny(run: Path, steps: int, *flags: str) -> None:
    limits = ["--prompts", "1", "--rollout.group-size", "2", "--rollout.max-tokens", "4"]
    main(["train", "--run", str(run), "--steps", str(steps), *limits, "--eval.tasks", "2", *flags])


def test_a_resumed_run_shows_the_evaluation_it_began_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_tiny(tmp_path, 1)
    first = capsys.readouterr().out
    run_tiny(tmp_path, 2, "--resume")
    resumed = capsys.readouterr().out
    assert "before: success" not in resumed
    table = next(line for line in resumed.splitlines() if line.startswith("held-back tasks"))
    assert table.split() == ["held-back", "tasks", "before", "after"]
    turns = [
        next(line.split()[1:4] for line in shown.splitlines() if line.startswith("turns "))
        for shown in (first, resumed)
    ]
    assert turns[0] == turns[1]


def test_random_weights_without_a_cold_start_are_pointed_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_tiny(tmp_path, 0)
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("random weights" in line and "sft.steps=900" in line for line in said) == 1


def test_a_message_of_the_library_speaks_of_flags() -> None:
    said = "choose on_rewrite='append' or set on_rewrite=\"error\"; on_rewrite is an option"
    told = "choose --on-rewrite append or set --on-rewrite error; --on-rewrite is an option"
    assert in_flags(said, FLAGS) == told
