from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from turngym.errors import TrajectoryError
from turngym.rl.algorithm import RunFacts
from turngym.rl.batch import Batch
from turngym.rl.padded import batch_from_padded
from turngym.rl.plan import plan
from turngym.rl.presets import PRESETS


def test_only_sampled_tokens_are_on_the_token_axis(trajectory: Any, group: Any) -> None:
    batch = Batch.from_groups([group(trajectory((2, 1), tool=(1.0, 0.5)), trajectory((3,)))])
    assert batch.row.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.turn.tolist() == [0, 0, 1, 0, 0, 0]
    assert batch.version.tolist() == [3] * 6
    assert batch.num_turns.tolist() == [2, 1]
    assert batch.group.tolist() == [0, 0]
    assert batch.task_ids == ("t0",)


def test_contexts_hold_every_token_and_point_at_the_sampled_ones(
    trajectory: Any, group: Any
) -> None:
    batch = Batch.from_groups([group(trajectory((2, 1)), trajectory((3,)))])
    first, second = batch.contexts
    assert first.ids.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert first.positions.tolist() == [2, 3, 5]
    assert (second.row, second.start) == (1, 3)
    assert batch.tokens_of([1]).tolist() == [3, 4, 5]
    assert batch.tokens_of([]).tolist() == []


def test_a_rewritten_history_gives_one_context_a_segment(trajectory: Any, group: Any) -> None:
    batch = Batch.from_groups([group(trajectory((2, 1), new_segment=True), trajectory())])
    rows = [(context.row, context.positions.tolist()) for context in batch.contexts]
    assert rows == [(0, [2, 3]), (0, [1]), (1, [2, 3])]
    assert batch.row.tolist() == [0, 0, 0, 1, 1]


def test_contexts_without_a_sampled_token_need_no_forward_pass(trajectory: Any, group: Any) -> None:
    batch = Batch.from_groups([group(trajectory((0, 2), new_segment=True))])
    assert [context.positions.tolist() for context in batch.contexts] == [[1, 2]]
    assert batch.turn.tolist() == [1, 1]
    assert batch.num_turns.tolist() == [2]


def test_missing_rewards_are_nan_and_never_zero(trajectory: Any, group: Any) -> None:
    batch = Batch.from_groups(
        [group(trajectory((1, 1), correct=None, tool=(None, 0.5)), trajectory((1,), tool=(0.0,)))]
    )
    assert batch.rewards["correct"].isnan().tolist() == [True, False]
    assert batch.turn_rewards["tool"].isnan().tolist() == [[True, False], [False, True]]


def test_statuses_become_flags(trajectory: Any, group: Any) -> None:
    cut = trajectory(status="max_tokens")
    demo = trajectory(
        source="demo", logp=np.full(5, np.nan, np.float32), version=np.full(5, -1, np.int32)
    )
    batch = Batch.from_groups([group(cut, demo)])
    assert batch.truncated.tolist() == [True, False]
    assert batch.demo.tolist() == [False, True]
    assert batch.logp_rollout.tolist() == [-0.5, -0.5, 0.0, 0.0]


def test_faults_of_the_world_are_refused(trajectory: Any, group: Any) -> None:
    broken = trajectory(status="env_error", error="disk full")
    with pytest.raises(TrajectoryError, match="env_error"):
        Batch.from_groups([group(trajectory(), broken)])


def test_message_level_records_are_refused(trajectory: Any, group: Any) -> None:
    whole = trajectory((1,))
    bare = {name: getattr(whole, name)[:0] for name in ("ids", "logp", "role", "turn")}
    bare |= {name: getattr(whole, name)[:0] for name in ("version", "segment")}
    turn = replace(whole.turns[0], start=0, stop=0)
    with pytest.raises(TrajectoryError, match="message-level"):
        Batch.from_groups([group(replace(whole, turns=(turn,), **bare))])


def test_a_first_token_that_nothing_predicts_is_refused(trajectory: Any, group: Any) -> None:
    whole = trajectory((2,))
    parts = {
        name: getattr(whole, name)[2:]
        for name in ("ids", "logp", "role", "turn", "version", "segment")
    }
    headless = replace(whole, turns=(replace(whole.turns[0], start=0, stop=2),), **parts)
    with pytest.raises(TrajectoryError, match="start with a prompt"):
        Batch.from_groups([group(headless)])


def test_greedy_rollouts_are_a_column_of_their_group(trajectory: Any, group: Any) -> None:
    groups = [group(trajectory(), trajectory()), group(trajectory(task="t1"))]
    greedy = {"t0": trajectory((1, 1), correct=0.0, tool=(0.5, 0.5)), "t1": trajectory(task="t1")}
    batch = Batch.from_groups(groups, greedy=greedy)
    assert batch.greedy["correct"].tolist() == [0.0, 0.0, 1.0]
    assert batch.greedy["tool"].nan_to_num(-1).tolist() == [1.0, 1.0, -1.0]
    with pytest.raises(TrajectoryError, match="t1"):
        Batch.from_groups(groups, greedy={"t0": greedy["t0"]})


def test_equal_observations_are_equal_states_inside_a_group_only(
    trajectory: Any, group: Any
) -> None:
    groups = [group(trajectory((1, 1)), trajectory((1, 1))), group(trajectory((1,), task="t1"))]
    states = Batch.from_groups(groups, anchors=True).anchor_state
    assert states is not None
    assert states.tolist() == [[0, 1], [0, 1], [2, -1]]


def test_an_environment_may_name_its_states(trajectory: Any, group: Any) -> None:
    named = trajectory((1, 1), infos=[{"anchor": "door"}, {"anchor": "door"}])
    states = Batch.from_groups([group(named)], anchors=True).anchor_state
    assert states is not None
    assert states.tolist() == [[0, 0]]


def test_spans_answers_and_buckets_come_along(trajectory: Any, group: Any) -> None:
    marked = trajectory(
        (1, 2), infos=[{}, {"span": "reflection"}], metadata={"answer": "7", "bucket": "code"}
    )
    batch = Batch.from_groups([group(marked, trajectory())])
    assert batch.spans["reflection"].tolist() == [False, True, True, False, False]
    assert batch.answers == ("7", None)
    assert batch.bucket is not None
    assert batch.bucket.tolist() == [0, 1]


def test_an_environment_may_name_the_bucket(trajectory: Any, group: Any) -> None:
    solver = trajectory((1, 1), infos=[{}, {"bucket": "solver"}])
    proposer = trajectory((1,), infos=[{"bucket": "proposer"}])
    buckets = Batch.from_groups([group(solver, proposer), group(solver)]).bucket
    assert buckets is not None
    assert buckets.tolist() == [0, 1, 0]
    assert Batch.from_groups([group(trajectory())]).bucket is None


def test_extra_columns_of_the_sampler_follow_the_tokens(trajectory: Any, group: Any) -> None:
    top = np.arange(10, dtype=np.float32).reshape(5, 2)
    extra = {"topk_logp": -top, "topk_ids": top.astype(np.int64)}
    batch = Batch.from_groups([group(trajectory((2,), extra=extra))])
    assert batch.topk_ids is not None
    assert batch.topk_ids.tolist() == [[4, 5], [6, 7]]
    assert batch.token_ids is not None
    assert batch.token_ids.tolist() == [2, 3]


def test_inserted_observations_change_no_plan(trajectory: Any, group: Any) -> None:
    run = RunFacts(rubric=group(trajectory()).rubric, group_size=3, max_tokens=8)
    bound = PRESETS["dr_grpo"].bind(run)

    def advantages(observation: int) -> Any:
        members = [
            trajectory((2, 1), tool=(0.0, 1.0), observation=observation),
            trajectory((1,), correct=0.0, tool=(0.5,), observation=observation),
            trajectory((1, 2), correct=0.0, tool=(0.5, 0.0), observation=observation),
        ]
        found = plan(bound, Batch.from_groups([group(*members)]))
        return found.advantage.tolist(), found.weight.tolist()

    assert advantages(1) == advantages(5)


def test_no_groups_make_an_empty_batch_with_a_plan(trajectory: Any, group: Any) -> None:
    batch = Batch.from_groups([])
    assert (batch.num_tokens, batch.num_rows, batch.num_groups) == (0, 0, 0)
    run = RunFacts(rubric=group(trajectory()).rubric, group_size=3, max_tokens=8)
    assert len(plan(PRESETS["dr_grpo"].bind(run), batch).advantage) == 0


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"turn": torch.zeros(1, dtype=torch.int64)}, "column 'turn' needs 2 tokens"),
    ({"truncated": torch.zeros(3, dtype=torch.bool)}, "column 'truncated' needs 1 rows"),
    ({"row": torch.tensor([0.0, 0.0])}, "'row' must be int64"),
    ({"row": torch.tensor([0, 1])}, "rows must lie in 0..0"),
    ({"turn": torch.tensor([0, 1])}, "turns must exist"),
    ({"demo": torch.zeros(1)}, "'demo' must be bool"),
    ({"mask": torch.ones(2)}, "'mask' must be bool"),
    ({"logp_rollout": torch.tensor([0.0, float("nan")])}, "must be finite"),
    ({"rewards": {"r": torch.tensor([float("inf")])}}, "reward 'r' must be finite"),
    ({"turn_rewards": {"k": torch.zeros((1, 2))}}, "needs one column a turn"),
    ({"turn_rewards": {"r": torch.zeros((1, 1))}}, "of both levels"),
]


@pytest.mark.parametrize(("changes", "rule"), WRONG)
def test_columns_that_disagree_are_refused(changes: dict[str, Any], rule: str) -> None:
    batch = batch_from_padded(
        mask=torch.ones((1, 2), dtype=torch.bool),
        group=torch.zeros(1, dtype=torch.int64),
        logp_rollout=torch.zeros((1, 2)),
        rewards={"r": torch.zeros(1)},
    )
    with pytest.raises(TrajectoryError, match=rule):
        replace(batch, **changes)


def test_a_float_mask_is_no_mask() -> None:
    with pytest.raises(TrajectoryError, match="mask must be"):
        batch_from_padded(
            mask=torch.ones((1, 2)),
            group=torch.zeros(1, dtype=torch.int64),
            logp_rollout=torch.zeros((1, 2)),
            rewards={},
        )
