import json
import math
from pathlib import Path
from typing import Any

import pytest

from turngym.errors import ConfigError, TurngymError
from turngym.tracking import JsonlTracker, Many, make_tracker, write_json


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_one_line_a_step_and_null_for_what_is_not_finite(tmp_path: Path) -> None:
    tracker = make_tracker(tmp_path / "run")
    tracker.config({"seed": 3})
    tracker.log({"a": 1.5, "b": math.nan, "c": math.inf}, 1)
    assert lines(tmp_path / "run") == [{"step": 1, "a": 1.5, "b": None, "c": None}]
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"seed": 3}
    tracker.close()


def test_a_resume_keeps_earlier_steps_and_drops_torn_lines(tmp_path: Path) -> None:
    first = JsonlTracker(tmp_path)
    for step in (1, 2, 3):
        first.log({"a": step}, step)
    first.close()
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 4, "a"')
    second = JsonlTracker(tmp_path, resume_step=3)
    second.log({"a": 30}, 3)
    second.close()
    assert [(line["step"], line["a"]) for line in lines(tmp_path)] == [(1, 1), (2, 2), (3, 30)]


def test_a_run_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    with pytest.raises(TurngymError, match="cannot write the run folder"):
        JsonlTracker(taken / "run")
    with pytest.raises(TurngymError, match="free space or choose another run folder"):
        write_json(taken / "config.json", {})


def test_unknown_trackers_are_refused_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        make_tracker(tmp_path, ["tensorbord"])


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    tracker = make_tracker(tmp_path, ["tensorboard"])
    tracker.log({"reward/mean": 0.25}, 7)
    tracker.close()
    (path,) = (tmp_path / "events").iterdir()
    found = [
        (event.step, value.tag, value.tensor.float_val[0])
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
    ]
    assert found == [(7, "reward/mean", 0.25)]


def test_many_trackers_get_the_same(tmp_path: Path) -> None:
    both = Many([JsonlTracker(tmp_path / "a"), JsonlTracker(tmp_path / "b")])
    both.config({})
    both.log({"x": 1}, 1)
    both.close()
    assert lines(tmp_path / "a") == lines(tmp_path / "b") == [{"step": 1, "x": 1}]
