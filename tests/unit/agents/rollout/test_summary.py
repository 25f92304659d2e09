import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngym.agents.summary import (
    Report,
    pass_at_k,
    pass_hat_k,
    record,
    success_rule,
    summarize,
)
from turngym.errors import ConfigError
from turngym.types import Message, RewardSpec, Trajectory, Turn

SPECS = {
    "correct": RewardSpec(name="correct", low=0.0, high=1.0),
    "valid": RewardSpec(name="valid", weight=0.5, level="turn"),
}


def row(task: str, sample: int, correct: float | None, **change: Any) -> dict[str, Any]:
    return {
        "task_id": task,
        "sample": sample,
        "status": "completed",
        "error": None,
        "rewards": {"correct": correct, "valid": 2.0},
        "turns": 3,
        "tool_calls": 2,
        "tool_errors": 1,
    } | change


def tries(task: str, n: int, c: int) -> list[dict[str, Any]]:
    return [row(task, sample, float(sample < c)) for sample in range(n)]


def failed(task: str, sample: int) -> dict[str, Any]:
    return row(task, sample, None, status="env_error", error="gone", rewards={}, turns=0)


def test_pass_at_k_and_pass_hat_k_of_two_tasks_worked_by_hand() -> None:
    report = summarize(tries("a", 4, 1) + tries("b", 4, 4), SPECS)
    assert report.pass_at[1].value == pytest.approx(0.625)
    assert report.pass_at[2].value == pytest.approx(0.75)
    assert report.pass_at[4].value == 1.0
    assert report.pass_hat[1].value == pytest.approx(0.625)
    assert report.pass_hat[2].value == pytest.approx(0.5)
    assert (report.tasks, report.episodes, report.errors) == (2, 8, 0)


def test_half_of_the_records_from_a_file_and_one_error_more_change_no_number() -> None:
    records = tries("a", 4, 1) + tries("b", 4, 4)
    one_run = summarize(records, SPECS)
    union = [json.loads(json.dumps(one)) for one in records[3:]] + records[:3]
    resumed = summarize([*union, failed("a", 4)], SPECS)
    assert (resumed.errors, resumed.episodes) == (1, 9)
    assert resumed.pass_at == one_run.pass_at
    assert resumed.pass_hat == one_run.pass_hat
    assert resumed.rewards == one_run.rewards
    assert resumed.reward == one_run.reward


def test_a_retried_error_is_replaced_by_the_episode_that_worked() -> None:
    report = summarize([failed("a", 0), row("a", 0, 1.0), row("a", 0, 0.0)], SPECS)
    assert (report.errors, report.episodes, report.pass_at[1].value) == (0, 1, 1.0)


def test_an_abstaining_component_is_missing_and_not_zero() -> None:
    report = summarize([row("a", 0, None), row("a", 1, 1.0), row("b", 0, None)], SPECS)
    assert report.unscored == 2
    assert report.pass_at[1].value == 1.0
    assert report.pass_at[1].tasks == 1
    assert report.rewards["correct"].value == 1.0


def test_rewards_are_means_over_tasks_of_weighted_sums() -> None:
    report = summarize([row("a", 0, 1.0), row("a", 1, 0.0), row("b", 0, 1.0)], SPECS)
    assert report.rewards["correct"].value == pytest.approx(0.75)
    assert report.rewards["valid"].value == pytest.approx(2.0)
    assert report.reward is not None
    assert report.reward.value == pytest.approx(0.75 + 0.5 * 2.0)
    assert report.tool_error_rate == pytest.approx(0.5)


def test_truncated_episodes_are_counted_and_scored() -> None:
    report = summarize([row("a", 0, 0.0, status="max_tokens"), row("b", 0, 1.0)], SPECS)
    assert report.truncated is not None
    assert report.truncated.value == 0.5
    assert report.pass_at[1].value == 0.5
    assert report.statuses == {"completed": 1, "max_tokens": 1}


def test_intervals_come_from_tasks_and_one_task_has_none() -> None:
    alone = summarize(tries("a", 8, 4), SPECS).pass_at[1]
    assert (alone.value, alone.low, alone.high) == (0.5, None, None)
    many = [one for task in range(100) for one in tries(str(task), 1, task % 2)]
    found = summarize(many, SPECS).pass_at[1]
    assert found.low is not None
    assert found.high is not None
    # A proportion of 0.5 over 100 tasks has a standard error of 0.05.
    assert found.low == pytest.approx(0.4, abs=0.03)
    assert found.high == pytest.approx(0.6, abs=0.03)


def test_no_record_at_all_gives_an_empty_report() -> None:
    report = summarize([], SPECS)
    assert (report.episodes, report.pass_at, report.reward) == (0, {}, None)
    assert report.rows() == [("errors", "0/0", "")]
    assert summarize([failed("a", 0)], SPECS).errors == 1


def test_a_report_of_errors_alone_tells_the_last_ones_cause() -> None:
    report = summarize([failed("b", 0), failed("a", 1) | {"error": "full"}], SPECS)
    assert (report.tasks, report.errors, report.last_error) == (0, 2, "env_error: gone")
    assert report.to_json()["last_error"] == "env_error: gone"
    assert summarize(tries("a", 2, 1), SPECS).last_error is None


def test_the_table_and_the_json_show_the_same_numbers() -> None:
    report = summarize(tries("a", 4, 1) + tries("b", 4, 4), SPECS)
    plain = json.loads(json.dumps(report.to_json()))
    assert Report.from_json(plain) == report
    assert plain["pass_at"]["2"]["value"] == 0.75
    assert ("pass^2", "0.500", "[0.000, 1.000]") in report.rows()


def test_success_is_named_or_obvious() -> None:
    turn = SPECS["valid"]
    one = {"solved": RewardSpec(name="solved", high=2.0), "valid": turn}
    assert success_rule(SPECS) == {"correct": 1.0}
    assert success_rule(one) == {"solved": 2.0}
    assert success_rule(SPECS, ["correct", "valid"]) == {"correct": 1.0, "valid": 1.0}
    named = SPECS | {"success": RewardSpec(name="success")}
    assert success_rule(named) == {"success": 1.0}
    with pytest.raises(ConfigError, match="known: \\['correct', 'valid'\\]"):
        success_rule(SPECS, "corect")
    with pytest.raises(ConfigError, match="name the component"):
        success_rule({"a": RewardSpec(name="a"), "b": RewardSpec(name="b")})
    with pytest.raises(ConfigError, match=r"name the component.*known: \['valid'\]"):
        success_rule({"valid": turn})
    with pytest.raises(ConfigError, match=r"has no rewards: mark a method with @turngym\.reward"):
        success_rule({})


def test_a_record_sums_turn_rewards_and_keeps_abstention() -> None:
    def turn(valid: float | None, at: int) -> Turn:
        message = Message(role="assistant", content="")
        return Turn(
            start=0,
            stop=0,
            finish_reason="stop",
            message=message,
            rewards={"valid": valid, "x": None},
        )

    trajectory = Trajectory(
        env_id="e",
        task_id="t",
        group_id="g",
        seed=0,
        status="completed",
        turns=(turn(1.0, 0), turn(None, 1), turn(0.5, 2)),
        rewards={"correct": None},
    )
    assert record(trajectory)["rewards"] == {"correct": None, "valid": 1.5, "x": None}


@settings(deadline=None, max_examples=50)
@given(counts=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=6))
def test_pass_at_k_rises_and_pass_hat_k_falls_with_k(counts: list[tuple[int, int]]) -> None:
    for n, c in ((n, min(c, n)) for n, c in counts):
        rising = [pass_at_k(n, c, k) for k in range(1, n + 1)]
        falling = [pass_hat_k(n, c, k) for k in range(1, n + 1)]
        assert rising == sorted(rising)
        assert falling == sorted(falling, reverse=True)
        assert rising[0] == pytest.approx(c / n)
        assert falling[0] == pytest.approx(c / n)
        assert rising[-1] == float(c > 0)
        assert falling[-1] == float(c == n)


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 1000))
def test_the_order_of_records_does_not_matter(seed: int) -> None:
    records = [*tries("a", 3, 1), *tries("b", 2, 2), failed("c", 0), *tries("c", 2, 0)[1:]]
    shuffled = random.Random(seed).sample(records, len(records))
    assert summarize(shuffled, SPECS) == summarize(records, SPECS)
