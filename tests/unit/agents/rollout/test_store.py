import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turngym.agents.store import TrajectoryStore
from turngym.errors import CheckpointError, DataError
from turngym.types import InvalidToolCall, Message, Trajectory, Turn


def trajectory(sample: int = 0, *, extra: bool = False, tokens: bool = True) -> Trajectory:
    invalid = InvalidToolCall(text="<tool_call>{", error="unterminated", span=(3, 15))
    message = Message(role="assistant", content="ä\x00", invalid_tool_calls=[invalid])
    answer = Message(role="tool", content="no", tool_call_id="a")
    columns: dict[str, Any] = {}
    if tokens:
        columns = {
            "ids": np.array([5, 1, 2, 9], np.int32),
            "logp": np.array([np.nan, -0.1 * (sample + 1), -1e-30, np.nan], np.float32),
            "role": np.array([0, 3, 4, 1], np.int8),
            "turn": np.array([-1, 0, 0, 0], np.int16),
            "version": np.array([-1, 7, 8, -1], np.int32),
            "segment": np.zeros(4, np.int16),
        }
    turn = Turn(
        start=1 if tokens else 0,
        stop=3 if tokens else 0,
        finish_reason="stop",
        message=message,
        observation=(answer,),
        rewards={"valid": None, "fmt": 0.1 + 0.2},
        tool_errors=1,
        generate_s=0.25,
        env_s=1 / 3,
        info={"results": [{"name": "x", "error": "timeout"}]},
    )
    return Trajectory(
        env_id="e",
        task_id="t",
        group_id="0/t",
        seed=2**63 - 1,
        status="max_turns",
        turns=(turn,),
        rewards={"correct": 0.0},
        prompt=(Message(role="user", content="q"),),
        sample=sample,
        metadata={"ordinal": 4},
        extra={"topk": np.arange(8, dtype=np.float16).reshape(4, 2)} if extra else {},
        **columns,
    )


def assert_equal(one: Trajectory, other: Trajectory) -> None:
    for field in fields(Trajectory):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes(), field.name
        elif field.name == "extra":
            assert a.keys() == b.keys()
            assert all(np.array_equal(a[name], b[name]) for name in a)
            assert all(a[name].dtype == b[name].dtype for name in a)
        else:
            assert a == b, field.name


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    first = [trajectory(0, extra=True), trajectory(1), trajectory(2, tokens=False)]
    store = TrajectoryStore(tmp_path)
    store.append(first, {"step": 12})
    store.append([trajectory(3)])
    again = TrajectoryStore(tmp_path)
    found = list(again)
    assert len(found) == 4
    for one, other in zip([*first, trajectory(3)], found, strict=True):
        assert_equal(one, other)
    rows = again.rows()
    assert [row.get("step") for row in rows] == [12, 12, 12, None]
    assert rows[0]["rewards"] == {"correct": 0.0, "valid": None, "fmt": 0.1 + 0.2}
    assert rows[3]["shard"] == "000002.npz"
    assert isinstance(found[0].turns[0].message["invalid_tool_calls"][0]["span"], tuple)


def test_a_torn_last_line_is_ignored_with_a_warning_and_cut_off_by_the_next_append(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    TrajectoryStore(tmp_path).append([trajectory(0), trajectory(1)])
    index = tmp_path / "index.jsonl"
    with index.open("a") as file:
        file.write('{"schema": 1, "shard": "0000')
    store = TrajectoryStore(tmp_path)
    assert len(store.rows()) == 2
    assert "torn line" in caplog.text
    store.append([trajectory(2)])
    assert [row["sample"] for row in store.rows()] == [0, 1, 2]


def test_a_shard_without_index_line_is_not_overwritten_or_read(tmp_path: Path) -> None:
    TrajectoryStore(tmp_path).append([trajectory(0)])
    (tmp_path / "index.jsonl").unlink()
    store = TrajectoryStore(tmp_path)
    store.append([trajectory(1)])
    assert [row["shard"] for row in store.rows()] == ["000002.npz"]


def test_broken_lines_and_other_schemas_name_file_and_line(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    store.append([trajectory(0)])
    index = tmp_path / "index.jsonl"
    whole = index.read_text()
    index.write_text(whole + "{broken\n" + whole)
    with pytest.raises(DataError, match=r"index\.jsonl:2: no index row"):
        store.rows()
    index.write_text(json.dumps(json.loads(whole) | {"schema": 99}) + "\n")
    with pytest.raises(DataError, match=r"index\.jsonl:1: schema 99"):
        store.rows()


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    store.append([trajectory(0)])
    (tmp_path / "000001.npz").write_bytes(b"PK not really")
    with pytest.raises(DataError, match=r"000001\.npz is missing or broken"):
        list(TrajectoryStore(tmp_path))


def test_nothing_stored_is_nothing_read(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "none")
    store.append([])
    assert list(store) == []


def test_what_is_not_json_able_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    with pytest.raises(DataError, match="JSON"):
        store.append([trajectory(0)], {"step": object()})
    assert store.rows() == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_a_clear_error_and_keeps_what_is_there(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    store.append([trajectory(0)])
    kept = (tmp_path / "index.jsonl").rename(tmp_path / "kept.jsonl")
    (tmp_path / "index.jsonl").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=r"No space left.*free space"):
        store.append([trajectory(1)])
    kept.replace(tmp_path / "index.jsonl")
    assert [row["sample"] for row in TrajectoryStore(tmp_path).rows()] == [0]


def test_a_shard_that_does_not_fit_leaves_nothing_behind(tmp_path: Path) -> None:
    code = (
        "import resource, sys; sys.path.insert(0, sys.argv[2])\n"
        "from test_store import trajectory, TrajectoryStore\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))\n"
        "TrajectoryStore(sys.argv[1]).append([trajectory(0)])\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "CheckpointError: cannot write trajectories" in run.stderr
    assert list(tmp_path.iterdir()) == []
