from dataclasses import replace
from typing import Any

import pytest

from turngym.errors import ConfigError
from turngym.rl.axes import Selection
from turngym.rl.collector import Collected
from turngym.rl.parallel import Ranks
from turngym.rl.presets import preset
from turngym.rl.stream import TaskStream


def sizes(collected: Collected) -> list[int]:
    return [len(group.trajectories) for group in collected.groups]


@pytest.mark.parametrize("skill", [0.0, 1.0])
def test_at_the_cap_the_learner_trains_on_what_there_is(make_world: Any, skill: float) -> None:
    world = make_world(skill=skill)
    bound = world.bind(preset("dapo"))
    collected = world.collector(bound, prompts=2).collect()
    assert collected.batches == bound.algorithm.selection.max_batches == 10
    assert len(collected.sampled) == 20
    assert collected.groups == collected.sampled[-2:]
    assert collected.metrics["rollout/kept_groups_frac"] == 0.0


def test_dropped_groups_are_replaced_until_the_batch_is_full(make_world: Any) -> None:
    world = make_world(skill=0.1)
    bound = world.bind(preset("dapo"))
    collected = world.collector(bound, prompts=6).collect()
    assert len(collected.groups) == 6
    assert 1 < collected.batches < 10
    for group in collected.groups:
        right = sum(one.rewards["correct"] or 0.0 for one in group.trajectories)
        assert 0 < right < 4
    ordinals = [group.ordinal for group in collected.sampled]
    assert len(set(ordinals)) == len(ordinals)


def test_solved_tasks_are_retired_and_an_all_solved_set_does_not_hang(make_world: Any) -> None:
    world = make_world(skill=1.0, size=4)
    bound = world.bind(preset("scalerl"))
    collector = world.collector(bound, prompts=2)
    first, second = collector.collect(), collector.collect()
    assert {g.task_id for g in first.sampled}.isdisjoint(g.task_id for g in second.sampled)
    assert second.metrics["rollout/retired_tasks"] == 4
    assert len(collector.collect().sampled) == 2


def test_a_task_that_is_not_retired_is_found_among_retired_ones(make_world: Any) -> None:
    world = make_world(skill=0.0, size=3)
    bound = world.bind(preset("scalerl"))
    collector = world.collector(bound, prompts=1)
    tasks = [world.source.task(n).id for n in range(3)]
    collector.rates = replace(
        collector.rates, solved={tasks[0]: 9, tasks[2]: 9}, tried={tasks[0]: 9, tasks[2]: 9}
    )
    assert [collector.collect().groups[0].task_id for _ in range(2)] == [tasks[1]] * 2


def test_demonstrations_join_their_group_from_the_same_state(world: Any) -> None:
    bound = world.bind(preset("luffy"))
    collected = world.collector(bound).collect()
    assert sizes(collected) == [5, 5, 5]
    assert collected.metrics["rollout/joined"] == 3
    for group, fresh in zip(collected.groups, collected.sampled, strict=True):
        *sampled, demo = group.trajectories
        assert tuple(sampled) == fresh.trajectories
        assert (demo.source, demo.sample, demo.rewards["success"]) == ("demo", 4, 1.0)
        assert (demo.prompt, demo.seed) == (sampled[0].prompt, sampled[0].seed)


def test_successes_are_replayed_when_their_task_comes_again(make_world: Any) -> None:
    world = make_world(size=3)
    bound = world.bind(preset("rlep"))
    collector = world.collector(bound, prompts=3)
    first = collector.collect()
    assert sizes(first) == [4, 4, 4]
    stored = {
        id(one.ids): one.task_id
        for group in first.sampled
        for one in group.trajectories
        if one.rewards["correct"] == 1.0
    }
    second = collector.collect()
    assert second.metrics["rollout/joined"] > 0
    for group in second.groups:
        replayed = group.trajectories[4:]
        assert len(replayed) == min(2, list(stored.values()).count(group.task_id))
        assert len({id(one.ids) for one in replayed}) == len(replayed)
        assert all(stored[id(one.ids)] == group.task_id for one in replayed)
        assert [one.sample for one in group.trajectories] == list(range(len(group.trajectories)))


def test_a_greedy_episode_is_a_baseline_and_never_a_member(world: Any) -> None:
    bound = world.bind(preset("remax"), group_size=1)
    collected = world.collector(bound).collect()
    assert sizes(collected) == [1, 1, 1]
    for group in collected.groups:
        greedy = collected.greedy[group.id]
        assert (greedy.task_id, greedy.seed) == (group.task_id, group.trajectories[0].seed)
        assert all(one is not greedy for one in group.trajectories)


def test_a_curriculum_prefers_tasks_solved_half_of_the_time(make_world: Any) -> None:
    world = make_world(size=40)
    bound = world.bind(preset("grpo"))
    collector = world.collector(bound, prompts=4, curriculum=10)
    tasks = [world.source.task(n).id for n in range(40)]
    solved = {task: 5 if n < 8 else 10 for n, task in enumerate(tasks)}
    collector.rates = replace(collector.rates, solved=solved, tried=dict.fromkeys(tasks, 10))
    half = {*tasks[:8]}
    drawn = [group.task_id for _ in range(3) for group in collector.collect().groups]
    assert len(drawn) == 12
    assert sum(task in half for task in drawn) >= 7


def test_a_curriculum_needs_a_metric(world: Any) -> None:
    bound = world.bind(preset("grpo"))
    selection = replace(bound.algorithm.selection, metric=None)
    bound = replace(bound, algorithm=replace(bound.algorithm, selection=selection))
    with pytest.raises(ConfigError, match=r"set algorithm\.selection\.metric"):
        world.collector(bound, curriculum=4)


def test_a_restored_collector_draws_what_the_first_would_have_drawn(world: Any) -> None:
    bound = world.bind(preset("scalerl"))
    first, second = world.collector(bound), world.collector(bound)
    first.collect()
    second.restore(*first.snapshot())
    assert [g.ordinal for g in second.collect().sampled] == [
        g.ordinal for g in first.collect().sampled
    ]
    assert second.rates == first.rates


def test_two_processes_never_replace_a_dropped_group_by_the_same_task(world: Any) -> None:
    class Half(Ranks):
        def __init__(self, rank: int) -> None:
            self.rank, self.world = rank, 2

    bound = world.bind(preset("grpo"))
    drawn = []
    for rank in range(2):
        collector = world.collector(bound, ranks=Half(rank))
        drawn += [collector.refill() for _ in range(10)]
    assert len(set(drawn)) == 20


def test_every_pass_over_the_tasks_is_another_permutation() -> None:
    stream = TaskStream(5, seed=3)
    first, second = stream.take(5), stream.take(5)
    assert sorted(first) == [0, 1, 2, 3, 4]
    assert sorted(second) == [5, 6, 7, 8, 9]
    assert [n - 5 for n in second] != first
    again = TaskStream(5, seed=3)
    again.load_state_dict({"position": 3, "num_tasks": 5, "seed": 3})
    assert again.take(7) == [*first[3:], *second]


def test_a_stream_of_other_tasks_is_refused() -> None:
    with pytest.raises(ConfigError, match="5 tasks and seed 3, this run 6 and 3"):
        TaskStream(6, seed=3).load_state_dict({"position": 3, "num_tasks": 5, "seed": 3})
    with pytest.raises(ConfigError, match="no task"):
        TaskStream(0, seed=3)


@pytest.mark.parametrize("group_size", [4, 8])
def test_keeping_as_many_as_are_sampled_is_refused(world: Any, group_size: int) -> None:
    with pytest.raises(ConfigError, match=f"keeps 8 of {group_size} members"):
        world.bind(preset("gfpo"), group_size=group_size)


def test_a_cap_without_a_filter_is_refused() -> None:
    with pytest.raises(ConfigError, match="keep_groups"):
        Selection(max_batches=3)
