"""Rollouts that run ahead of the trainer, with a script in the place of the model."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from turngym.agents.config import RolloutConfig
from turngym.agents.rollout import RolloutEngine, TokenAgent
from turngym.agents.scripted import ScriptedPolicy
from turngym.agents.seeds import derive
from turngym.agents.store import TrajectoryStore
from turngym.errors import CircuitBreakerError, EngineError, WeightSyncError
from turngym.rl.collector import Collected, Collector
from turngym.rl.presets import preset
from turngym.rl.stream import TaskStream

GROUP = 2


class Gate(ScriptedPolicy):
    """Lets nobody speak before the test says so, and knows whose group asked."""

    def __init__(self, world: Any) -> None:
        super().__init__(world.speak, encode=lambda text: world.renderer.codec.encode(text).ids)
        self.world = world
        self.changed = threading.Condition()
        self.tasks = TaskStream(len(world.source.task_set), seed=1).take(100)
        self.of_seed = {
            derive(7, ordinal, sample, turn): ordinal
            for ordinal in self.tasks
            for sample in range(GROUP)
            for turn in range(6)
        }
        self.asked: set[int] = set()
        self.open: set[int] = set()
        self.is_open = False
        self.failing = False

    async def generate(self, prompt_ids: Sequence[int], sampling: Any, **rest: Any) -> Any:
        ordinal = self.of_seed[rest["seed"]]
        with self.changed:
            self.asked.add(ordinal)
            self.changed.notify_all()
        while not self.is_open and ordinal not in self.open:
            await asyncio.sleep(0.001)
        if self.failing:
            raise EngineError("out of order")
        return await super().generate(prompt_ids, sampling, **rest)

    def wait_for(self, count: int) -> None:
        """Wait until the first so many tasks of the stream were begun, and no other."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.asked) >= count, timeout=10)
            assert self.asked == set(self.tasks[:count])


Make = Callable[..., Collector]


@pytest.fixture
def gate(world: Any) -> Gate:
    return Gate(world)


@pytest.fixture
def make(world: Any, gate: Gate) -> Iterator[Make]:
    made: list[Collector] = []

    def build(name: str = "grpo", *, staleness: int, prompts: int = 2, **more: Any) -> Collector:
        bound = world.bind(preset(name), group_size=GROUP)
        config = RolloutConfig(group_size=GROUP, retries=0, max_tokens=96, **more)
        agent = TokenAgent.factory(gate, world.renderer)
        engine = RolloutEngine(world.source, agent, config, seed=7)
        world.engines.append(engine)
        stream = TaskStream(len(world.source.task_set), seed=1)
        made.append(Collector(engine, stream, bound, prompts=prompts, staleness=staleness))
        return made[-1]

    yield build
    for one in made:
        one.close()


def ordinals(collected: Collected) -> list[int]:
    return [group.ordinal for group in collected.groups]


def push(collector: Collector, gate: Gate, version: int) -> None:
    gate.version = version
    collector.synced(version)


def await_waiting(collector: Collector) -> None:
    """Wait until a group has finished and not trained."""
    pipeline = collector.pipeline
    with pipeline._changed:
        assert pipeline._changed.wait_for(lambda: pipeline.waiting, timeout=10)


class Taking:
    """A `collect` in another thread, as the trainer's waiting."""

    def __init__(self, collector: Collector, **more: Any) -> None:
        self.found: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=(collector, more), daemon=True)
        self._thread.start()

    def _run(self, collector: Collector, more: Any) -> None:
        try:
            self.found.append(collector.collect(**more))
        except Exception as error:
            self.found.append(error)

    @property
    def waits(self) -> bool:
        self._thread.join(0.05)
        return self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(10)
        assert self.found, "still waiting"
        return self.found[0]


def test_a_synchronous_run_begins_nothing_while_the_trainer_works(make: Make, gate: Gate) -> None:
    gate.is_open = True
    collector = make(staleness=0)
    collector.collect()
    assert collector.pipeline.engine.unfinished == 0
    assert len(gate.asked) == 2
    push(collector, gate, 1)
    assert len(gate.asked) == 2


def test_one_step_off_rolls_out_the_next_batch_while_this_one_trains(
    make: Make, gate: Gate
) -> None:
    collector = make(staleness=1)
    taking = Taking(collector, left=3)
    gate.wait_for(4)
    assert taking.waits
    gate.open |= {*gate.tasks[:2]}
    assert ordinals(taking.result()) == gate.tasks[:2]
    assert collector.pipeline.engine.unfinished == 2 * GROUP
    push(collector, gate, 1)
    gate.wait_for(6)


def test_the_end_of_the_run_is_not_overshot(make: Make, gate: Gate) -> None:
    gate.is_open = True
    collector = make(staleness=3)
    for left in (3, 2, 1):
        collector.collect(left=left)
        push(collector, gate, 4 - left)
    assert collector.stream.position == len(gate.asked) == 6


def test_a_straggler_holds_the_trainer_up_only_when_it_is_due(make: Make, gate: Gate) -> None:
    collector = make(staleness=2, prompts=1)
    taking = Taking(collector, left=9)
    slow, *quick = gate.tasks[:5]
    gate.open.add(quick[0])
    assert ordinals(taking.result()) == [quick[0]]
    push(collector, gate, 1)
    gate.open.add(quick[1])
    assert ordinals(collector.collect(left=8)) == [quick[1]]
    push(collector, gate, 2)
    gate.wait_for(5)
    gate.open.add(quick[2])
    await_waiting(collector)
    due = Taking(collector, left=7)
    assert due.waits
    gate.open.add(slow)
    assert ordinals(due.result()) == [slow]
    assert ordinals(collector.collect(left=6)) == [quick[2]]


def test_no_more_groups_begin_than_there_are_seats(make: Make, gate: Gate) -> None:
    collector = make(staleness=8, prompts=4, concurrency=2 * GROUP)
    taking = Taking(collector)
    gate.wait_for(2)
    assert taking.waits
    assert collector.stream.position == 2
    gate.open.add(gate.tasks[0])
    gate.wait_for(3)
    gate.is_open = True
    assert len(taking.result().groups) == 4


def test_dropped_groups_make_room_at_once(make: Make, gate: Gate) -> None:
    gate.is_open = True
    gate.world.skill = 0.0
    collector = make("dapo", staleness=1)
    found = collector.collect(left=2)
    cap = collector.bound.algorithm.selection.max_batches
    assert len(found.sampled) >= cap * 2
    assert found.groups == found.sampled[-2:]
    assert found.metrics["rollout/kept_groups_frac"] == 0.0


def test_wanted_groups_beyond_a_batch_wait_for_the_next(make: Make, gate: Gate) -> None:
    gate.is_open = True
    collector = make("dapo", staleness=2)
    seen: list[int] = []
    for left in range(6, 0, -1):
        found = collector.collect(left=left)
        assert len(found.groups) == 2
        for group in found.groups:
            assert {one.rewards["correct"] for one in group.trajectories} == {0.0, 1.0}
        seen += [group.ordinal for group in found.sampled]
        push(collector, gate, 7 - left)
    assert len(set(seen)) == len(seen)
    waiting = {one.metadata["ordinal"] for one in collector.pipeline.waiting}
    assert waiting.isdisjoint(seen)


def test_a_group_the_world_breaks_is_replaced_by_another_task(make: Make, gate: Gate) -> None:
    collector = make(staleness=1, prompts=1, failure_rate=1.0)
    taking = Taking(collector, left=1)
    gate.wait_for(1)
    gate.failing = True
    gate.open.add(gate.tasks[0])
    gate.wait_for(2)
    gate.failing = False
    gate.is_open = True
    assert ordinals(taking.result()) == [gate.tasks[1]]
    assert collector.pipeline.engine.stats.dropped_groups == 1


def test_what_breaks_a_rollout_stops_the_trainer(make: Make, gate: Gate) -> None:
    gate.is_open = gate.failing = True
    collector = make(staleness=1, failure_rate=0.1)
    for _ in range(2):
        with pytest.raises(CircuitBreakerError, match="out of order"):
            collector.collect()


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_sampler_that_falls_back_to_older_weights_is_found_out(
    staleness: int, make: Make, gate: Gate
) -> None:
    gate.is_open = True
    collector = make(staleness=staleness)
    collector.synced(3)
    with pytest.raises(WeightSyncError, match="version 0, but version 3 was in use"):
        collector.collect()


def test_a_snapshot_loses_and_repeats_nothing(make: Make, gate: Gate, tmp_path: Path) -> None:
    first = make(staleness=2)
    taking = Taking(first, left=5)
    gate.open |= {gate.tasks[1], gate.tasks[2]}
    trained = ordinals(taking.result())
    push(first, gate, 1)
    gate.wait_for(8)
    gate.open.add(gate.tasks[4])
    await_waiting(first)
    state, waiting = first.snapshot()
    first.close()
    assert trained == [gate.tasks[1], gate.tasks[2]]
    store = TrajectoryStore(tmp_path / "waiting")
    store.append(waiting)

    gate.is_open = True
    second = make(staleness=2)
    second.restore(state, store)
    for left in (4, 3, 2, 1):
        trained += ordinals(second.collect(left=left))
        push(second, gate, 6 - left)
    assert sorted(trained) == sorted(gate.tasks[:10])


def test_closing_leaves_nothing_running(make: Make, gate: Gate) -> None:
    collector = make(staleness=1)
    taking = Taking(collector)
    gate.wait_for(4)
    collector.close()
    assert collector.pipeline.engine.unfinished == 0
    assert isinstance(taking.result(), EngineError)
