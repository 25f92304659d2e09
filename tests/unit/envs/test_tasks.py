import gzip
import json
import random
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngym.envs.tasks import SPLITS, Draft, TaskSet, split_of
from turngym.errors import ConfigError, DataError, MissingDependencyError
from turngym.types import Task


def draw(rng: random.Random) -> Draft:
    number = rng.randint(0, 500)
    return Draft(prompt=f"{number}?", answer=number)


def write(path: Path, *rows: Any) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_generated_tasks_depend_on_seed_split_and_ordinal_alone() -> None:
    tasks = TaskSet.generate(draw, split="train", size=100)
    again = TaskSet.generate(draw, split="train", size=50)
    assert [tasks[i] for i in range(50)] == list(again)
    other = TaskSet.generate(draw, split="train", size=50, seed=1)
    assert [task.prompt for task in other] != [task.prompt for task in again]
    assert other[3].id == "train-1/3"


def test_splits_of_generated_tasks_never_share_a_problem() -> None:
    prompts = {
        split: {
            task.prompt
            for seed in (0, 1)
            for task in TaskSet.generate(draw, split=split, size=400, seed=seed)
        }
        for split in SPLITS
    }
    assert all(len(found) > 20 for found in prompts.values())
    assert not prompts["train"] & prompts["eval"]
    assert not prompts["train"] & prompts["test"]
    assert not prompts["eval"] & prompts["test"]


def test_about_a_tenth_of_all_problems_is_held_back_for_each_of_eval_and_test() -> None:
    # Binomial(5000, 0.1): the bounds are seven standard deviations away.
    counts = dict.fromkeys(SPLITS, 0)
    for number in range(5000):
        counts[split_of(str(number))] += 1
    assert 350 < counts["test"] < 650
    assert 350 < counts["eval"] < 650


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 60))
@settings(deadline=None, max_examples=30)
def test_views_keep_ids_and_find_them(seed: int, size: int, count: int) -> None:
    tasks = TaskSet.generate(draw, split="train", size=size)
    view = tasks.shuffle(seed).head(count)
    assert len(view) == min(size, count)
    assert len({task.id for task in view}) == len(view)
    for task in view:
        assert view.by_id(task.id) == task
    assert sorted(task.id for task in tasks.shuffle(seed)) == sorted(task.id for task in tasks)
    assert list(tasks.shuffle(seed)) == list(tasks.shuffle(seed))


def test_an_id_outside_a_view_is_unknown_there() -> None:
    tasks = TaskSet.generate(draw, split="train", size=10)
    assert tasks.by_id("train/7").id == "train/7"
    for view, task_id in ((tasks.head(5), "train/7"), (tasks, "train/10"), (tasks, "test/1")):
        with pytest.raises(DataError, match=task_id):
            view.by_id(task_id)


def test_slices_are_task_sets() -> None:
    tasks = TaskSet.generate(draw, split="train", size=10)
    assert [task.id for task in tasks[2:5]] == ["train/2", "train/3", "train/4"]
    assert tasks[-1].id == "train/9"


def test_tasks_given_one_by_one_need_unique_ids() -> None:
    with pytest.raises(DataError, match="ordinals 0 and 2"):
        TaskSet([Task(id="a"), Task(id="b"), Task(id="a")])


def test_no_tasks_is_an_error() -> None:
    with pytest.raises(DataError, match="no tasks"):
        TaskSet([])
    with pytest.raises(DataError, match="no tasks"):
        TaskSet([Task(id="a")]).head(0)
    with pytest.raises(ConfigError, match="size 0"):
        TaskSet.generate(draw, split="train", size=0)


def test_an_unknown_split_is_an_error() -> None:
    with pytest.raises(ConfigError, match="train, eval, test"):
        TaskSet.generate(draw, split="dev", size=1)


def test_jsonl_rows_become_tasks_with_the_rest_as_metadata(tmp_path: Path) -> None:
    file = write(
        tmp_path / "t.jsonl",
        {"id": 3, "question": "1+1?", "answer": "2", "solution": "easy"},
        "",
        {"question": "你好?", "answer": 0},
    )
    tasks = TaskSet.from_jsonl(file)
    assert tasks[0] == Task(id="3", prompt="1+1?", answer="2", metadata={"solution": "easy"})
    assert (tasks[1].id, tasks[1].prompt, tasks[1].answer) == ("t/3", "你好?", 0)


def test_gzipped_files_and_other_field_names_are_read(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl.gz"
    with gzip.open(file, "wt", encoding="utf-8") as stream:
        stream.write(json.dumps({"q": "1?", "gold": "1", "key": "one"}) + "\n")
    tasks = TaskSet.from_jsonl(file, prompt="q", answer="gold", task_id="key")
    assert tasks[0] == Task(id="one", prompt="1?", answer="1")


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", {"question": "a", "answer": "1"})
    assert len(TaskSet.from_jsonl(file)) == 1
    write(file, {"question": "a", "answer": "1"}, {"question": "b", "answer": "2"})
    assert len(TaskSet.from_jsonl(file)) == 2


GOOD = {"id": "x", "question": "1?", "answer": "1"}


@pytest.mark.parametrize(
    ("seventh", "message"),
    [
        ('{"question": "1?", ', "t.jsonl:7: not JSON"),
        ("[" * 100_000, "t.jsonl:7: not JSON"),
        ('{"question": "1?", "answer":', "t.jsonl:7: not JSON: Expecting value at column 29"),
        ('{"question": "1?", "answer": NaN}', "t.jsonl:7: field 'answer' must be finite, got nan"),
        ('{"question": "1?", "answer": -Infinity}', "must be finite, got -inf"),
        ('{"question": "1?", "answer": 1e999}', "must be finite, got inf"),
        ("[1, 2]", "t.jsonl:7: expected a JSON object, got list"),
        ({"question": "1?"}, "t.jsonl:7: no field 'answer'; fields: question"),
        ({"answer": "1"}, "t.jsonl:7: no field 'question'"),
        ({"question": " ", "answer": "1"}, "t.jsonl:7: field 'question'"),
        ({"question": 5, "answer": "1"}, "t.jsonl:7: field 'question'"),
        ({"question": "1?", "answer": None}, "t.jsonl:7: field 'answer' is empty"),
        ({"question": "1?", "answer": "1", "id": None}, "t.jsonl:7: field 'id'"),
        ({**GOOD, "id": "x3"}, "t.jsonl:7: the id 'x3' is taken by line 4"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path: Path, seventh: Any, message: str) -> None:
    rows = [{**GOOD, "id": f"x{number}"} for number in range(6)]
    with pytest.raises(DataError, match=re.escape(message)):
        TaskSet.from_jsonl(write(tmp_path / "t.jsonl", *rows, seventh))


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing\.jsonl cannot be read"):
        TaskSet.from_jsonl(tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match="cannot be read: it is a folder"):
        TaskSet.from_jsonl(tmp_path)
    empty = write(tmp_path / "empty.jsonl", "")
    with pytest.raises(DataError, match=r"empty\.jsonl holds no tasks"):
        TaskSet.from_jsonl(empty)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"question": "a", "answer": "1"}\n{"question": "\xe9"}\n')
    with pytest.raises(DataError, match=r"latin\.jsonl:2: not UTF-8"):
        TaskSet.from_jsonl(latin)
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"question": "a", "answer": "1"}\n' * 9)[:-9])
    with pytest.raises(DataError, match=r"cut\.jsonl\.gz cannot be read"):
        TaskSet.from_jsonl(cut)


def test_the_hub_extra_is_named_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match=r"turngym\[hub\]"):
        TaskSet.from_hub("gsm8k", split="train")


def test_unknown_data_sets_are_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'gsm8k'"):
        TaskSet.from_hub("gsm8", split="train")


def test_hub_rows_become_tasks_and_being_offline_is_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(repository: str, config: str, *, split: str) -> list[dict[str, str]]:
        if split == "test":
            raise ConnectionError("no network")
        return [{"question": "1+1?", "answer": "1+1=2\n#### 2"}]

    fake = types.ModuleType("datasets")
    vars(fake)["load_dataset"] = load
    monkeypatch.setitem(sys.modules, "datasets", fake)
    tasks = TaskSet.from_hub("gsm8k", split="train")
    assert tasks[0] == Task(
        id="gsm8k/0", prompt="1+1?", answer="2", metadata={"solution": "1+1=2\n#### 2"}
    )
    with pytest.raises(DataError, match=r"ConnectionError: no network.*pass the path"):
        TaskSet.from_hub("gsm8k", split="test")
