"""The rollout engine against lock-step loops, and what it costs a turn.

    python benchmarks/rollout.py --repeats 3
    python -P benchmarks/rollout.py --parts vllm --tool-s 0.05

Schedules: the same scripted completions and tools with the same latencies, drawn per trajectory
and turn, under (1) lock-step turns with serial tools, as synchronous trainers run them, (2)
lock-step turns with parallel tools, (3) the engine. A batch of completions takes as long as its
slowest. Wall time; sides alternate, ratios are medians over the pairs.

Stragglers: now and then a tool takes many times as long. A trainer takes batch after batch and
works on each for a while; time a batch under both lock-step loops and under the engine with the
staleness it may have, and the share of it that was lost to stragglers: waiting, times the share of
empty seats.

vLLM: the same schedules, with slow tools, over a real engine in this process and a tiny model; then
with instant tools, against the engine's own offline loop over the same contexts and lengths.

Overhead: instant completions and tools; engine time a turn, thread hop included, and what is left
after the same policy, renderer and environment calls in a plain loop are taken off. CPU time of
the process, all threads together, on top of wall time.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium

from turngym.agents.base import Policy, Sampling
from turngym.agents.config import EngineConfig, RolloutConfig
from turngym.agents.episode import Seat
from turngym.agents.model import load_model
from turngym.agents.plain import PlainRenderer
from turngym.agents.rollout import EnvSource, RolloutEngine, TokenAgent
from turngym.agents.scripted import ScriptedPolicy
from turngym.agents.tiny import TinyConfig, build_tiny_agent
from turngym.agents.vllm_policy import VLLMPolicy, open_vllm
from turngym.rl.admission import Admission
from turngym.rl.pipeline import Pipeline
from turngym.types import Action, Group, Message, Observation, RewardSpec, Status, Task

ENV_ID = "benchmark/SlowTool-v0"
CALL = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
RENDERER = PlainRenderer()
STUCK = 1 / 200
GROUP = 8
SAMPLING = Sampling(stop_ids=tuple(range(250, 261)))
"""Ends a script's line, and now and then what a model says that has learned nothing."""


class Tasks:
    """Tasks that differ by name only."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, ordinal: int) -> Task:
        return Task(id=str(ordinal))


class SlowTool(gymnasium.Env[Observation, Action]):
    """Answers every call after a delay drawn from the episode's seed.

    Args:
        turns: of an episode.
        mean_s: mean of the delay.
        stuck_s: delay of one call in 200, which hangs; 0 = none does.
    """

    def __init__(self, *, turns: int = 8, mean_s: float = 0.0, stuck_s: float = 0.0) -> None:
        self.task_set = Tasks()
        self.reward_specs = {"done": RewardSpec(name="done")}
        self.turns = turns
        self.mean_s = mean_s
        self.stuck_s = stuck_s

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode."""
        self.rng = random.Random(seed)
        self.turn = 0
        return (Message(role="user", content="go"),), {"tools": ()}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Sleep, answer."""
        self.turn += 1
        if self.mean_s:
            is_stuck = self.stuck_s > 0 and self.rng.random() < STUCK
            time.sleep(self.stuck_s if is_stuck else draw(self.rng, self.mean_s))
        is_over = self.turn >= self.turns
        info: dict[str, Any] = {"rewards": self.finish("completed") if is_over else {}}
        if is_over:
            info["stop_reason"] = "completed"
        return (Message(role="tool", content="ok"),), 0.0, is_over, False, info

    def finish(self, reason: Status) -> Mapping[str, float | None]:
        """Score the outcome."""
        return {"done": 1.0}


def draw(rng: random.Random, mean_s: float) -> float:
    """Draw a latency: mostly near the mean, now and then several times as long."""
    return rng.lognormvariate(0.0, 0.6) * mean_s / 1.2


def make_policy(mean_s: float) -> ScriptedPolicy:
    """Return a policy that calls the tool in every turn."""
    if not mean_s:
        return ScriptedPolicy([CALL], encode=RENDERER.encode)
    return ScriptedPolicy(
        [CALL], encode=RENDERER.encode, latency=lambda turn, rng: draw(rng, mean_s)
    )


def make_engine(
    rows: int,
    turns: int,
    policy: Policy,
    tool_s: float,
    *,
    stuck_s: float = 0.0,
    group: int = 1,
) -> RolloutEngine:
    """Return an engine over slow tools, all rows in flight."""
    return RolloutEngine(
        EnvSource(ENV_ID, {"turns": turns, "mean_s": tool_s, "stuck_s": stuck_s}),
        TokenAgent.factory(policy, RENDERER, SAMPLING),
        RolloutConfig(group_size=group, concurrency=rows),
        seed=0,
    )


class Row:
    """One trajectory of the loops that do without the engine."""

    def __init__(self, ordinal: int, turns: int, tool_s: float, stuck_s: float = 0.0) -> None:
        self.seat = Seat(
            run_seed=0, ordinal=ordinal, sample=0, task=Tasks()[ordinal], group_id=f"{ordinal}"
        )
        self.env = SlowTool(turns=turns, mean_s=tool_s, stuck_s=stuck_s)
        prompt, _ = self.env.reset(seed=self.seat.env_seed)
        self.context = RENDERER.start(prompt, ())[0].tolist()

    async def complete(self, policy: Policy, turn: int) -> Action:
        """Sample the next completion and read it."""
        seed = self.seat.turn_seed(turn)
        said = await policy.generate(self.context, SAMPLING, seed=seed, session=self.seat.group_id)
        self.context += said.ids.tolist()
        RENDERER.roles(said.ids)
        return RENDERER.parse(said.ids)

    def answer(self, action: Action) -> None:
        """Run the tool and add what it says."""
        observation = self.env.step(action)[0]
        suffix, _ = RENDERER.extend((), observation, (), last_id=self.context[-1])
        self.context += suffix.tolist()


def lock_step(
    num_rows: int,
    turns: int,
    policy: Policy,
    tool_s: float,
    *,
    threads: int,
    stuck_s: float = 0.0,
    first: int = 0,
) -> None:
    """Play turn by turn: all completions, then all tools, `threads` at a time."""
    rows = [Row(ordinal, turns, tool_s, stuck_s) for ordinal in range(first, first + num_rows)]

    async def completions(turn: int) -> list[Action]:
        return await asyncio.gather(*(row.complete(policy, turn) for row in rows))

    with ThreadPoolExecutor(threads) as pool:
        for turn in range(turns):
            actions = asyncio.run(completions(turn))
            list(pool.map(Row.answer, rows, actions))


def bare_loop(num_rows: int, turns: int) -> None:
    """Play row after row in one coroutine: no threads, no engine, no record."""
    policy = make_policy(0.0)

    async def main() -> None:
        for ordinal in range(num_rows):
            row = Row(ordinal, turns, 0.0)
            for turn in range(turns):
                row.answer(await row.complete(policy, turn))

    asyncio.run(main())


def clock(play: Callable[[], object]) -> tuple[float, float]:
    """Return wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    play()
    return time.perf_counter() - wall, time.process_time() - cpu


def compare_schedules(
    rows: int, turns: int, fresh: Callable[[], Policy], tool_s: float, repeats: int
) -> None:
    """Time the engine and both lock-step loops in turns; print medians and ratios."""
    sides: dict[str, list[float]] = {"engine": [], "serial": [], "parallel": []}
    for _ in range(repeats):
        with make_engine(rows, turns, fresh(), tool_s) as engine:
            sides["engine"].append(clock(lambda: engine.run(range(rows)))[0])
        for name, threads in (("serial", 1), ("parallel", rows)):
            play = partial(lock_step, rows, turns, fresh(), tool_s, threads=threads)
            sides[name].append(clock(play)[0])
    print(f"{rows} trajectories x {turns} turns, tools {tool_s} s (mean)")
    for name, times in sides.items():
        ratio = statistics.median(t / e for t, e in zip(times, sides["engine"], strict=True))
        print(f"  {name:9} {statistics.median(times):7.2f} s   {ratio:5.2f} x the engine")


def offline(policy: VLLMPolicy, groups: Sequence[Group]) -> None:
    """Sample as many tokens from the same contexts, all at once, in vLLM's own loop."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    backend: Any = policy.backend
    params = {"ignore_eos": True, "logprobs": 0, "detokenize": False, "seed": 0}
    params["output_kind"] = RequestOutputKind.FINAL_ONLY

    def loop() -> None:
        for group in groups:
            (row,) = group.trajectories
            for number, turn in enumerate(row.turns):
                prompt = {
                    "prompt_token_ids": row.ids[: turn.start].tolist(),
                    "cache_salt": f"offline{policy.version}",
                }
                length = turn.stop - turn.start
                own = SamplingParams(max_tokens=length, **params)
                backend._engine.add_request(f"{group.id}-{number}", prompt, own)
        while backend._engine.has_unfinished_requests():
            backend._engine.step()

    backend.thread.call(loop)


def compare_on_vllm(options: argparse.Namespace) -> None:
    """Run the schedules and the offline comparison over a real engine."""
    shape = TinyConfig(heads=3, kv_heads=3, head_dim=32, max_context=1024)
    versions = itertools.count(1)
    with tempfile.TemporaryDirectory() as folder:
        path = build_tiny_agent(Path(folder) / "tiny", shape)
        model, _ = load_model(path, device="cpu")
        with open_vllm(EngineConfig(kind="vllm"), model_path=path, max_context=1024) as policy:

            def fresh() -> VLLMPolicy:
                policy.push(model.named_parameters(), version=next(versions))
                return policy

            compare_schedules(options.rows, options.turns, fresh, 0.0, 1)  # warms up
            compare_schedules(options.rows, options.turns, fresh, options.tool_s, options.repeats)
            ratios = []
            for _ in range(options.repeats):
                with make_engine(options.rows, options.turns, fresh(), 0.0) as engine:
                    groups: list[Group] = []
                    ours, _ = clock(lambda: groups.extend(engine.run(range(options.rows))))  # noqa: B023
                theirs, _ = clock(lambda: offline(policy, groups))  # noqa: B023
                ratios.append(theirs / ours)
            print(f"instant tools: {statistics.median(ratios):.2f} of the offline throughput")


def train_ahead(
    engine: RolloutEngine, policy: ScriptedPolicy, staleness: int, batches: int, update_s: float
) -> float:
    """Take batches and work on each; return the seconds lost to stragglers."""
    numbers = itertools.count()
    pipeline = Pipeline(
        engine,
        Admission(engine.config.concurrency // GROUP, staleness),
        draw=lambda count: list(itertools.islice(numbers, count)),
        replace=lambda: next(numbers),
        keep=lambda groups: [True] * len(groups),
        wants_more=lambda kept, drawn: False,
        exchange=lambda arrivals: arrivals,
    )
    lost = 0.0
    for batch in range(batches):
        lost += pipeline.take(left=batches - batch).metrics["time/straggler_s"]
        time.sleep(update_s)
        policy.version = batch + 1
        pipeline.synced(batch + 1)
    return lost


def compare_stragglers(options: argparse.Namespace) -> None:
    """Print what a batch takes when some tools hang, in lock step and ahead of the trainer."""
    rows, turns, batches = options.rows, options.turns, options.batches
    latencies = (options.generate_s, options.tool_s, options.stuck_s)
    print(
        f"{batches} batches of {rows} trajectories x {turns} turns, one tool in {1 / STUCK:.0f} "
        f"takes {options.stuck_s} s, the trainer {options.update_s} s"
    )

    in_step_batches = min(batches, 4)

    def in_step(threads: int) -> None:
        for batch in range(in_step_batches):
            policy = make_policy(latencies[0])
            first = batch * rows
            lock_step(
                rows,
                turns,
                policy,
                latencies[1],
                threads=threads,
                stuck_s=latencies[2],
                first=first,
            )
            time.sleep(options.update_s)

    for name, threads in (("lock step, serial", 1), ("lock step, parallel", rows)):
        wall = clock(partial(in_step, threads))[0]
        print(f"  {name:20} {wall / in_step_batches:6.2f} s a batch")
    for staleness in options.staleness:
        policy = make_policy(latencies[0])
        with make_engine(
            rows, turns, policy, latencies[1], stuck_s=latencies[2], group=GROUP
        ) as engine:
            started = time.perf_counter()
            lost = train_ahead(engine, policy, staleness, batches, options.update_s)
            wall = time.perf_counter() - started
        print(
            f"  {f'staleness {staleness}':20} {wall / batches:6.2f} s a batch, "
            f"{lost / wall:5.1%} lost to stragglers"
        )


def measure_overhead(rows: int, turns: int, repeats: int) -> None:
    """Print what a turn costs with nothing to wait for."""
    count = rows * turns
    engine_ms, bare_ms = [], []
    with make_engine(min(rows, 64), turns, make_policy(0.0), 0.0) as engine:
        engine.run(range(64))
        for repeat in range(repeats):
            first = (repeat + 1) * rows
            wall, cpu = clock(lambda: engine.run(range(first, first + rows)))  # noqa: B023
            engine_ms.append((wall / count * 1e3, cpu / count * 1e3))
            wall, cpu = clock(lambda: bare_loop(rows, turns))
            bare_ms.append((wall / count * 1e3, cpu / count * 1e3))
    print(f"overhead, {rows} trajectories x {turns} instant turns, milliseconds a turn")
    for label, column in (("wall", 0), ("CPU", 1)):
        whole = statistics.median(sample[column] for sample in engine_ms)
        bare = statistics.median(sample[column] for sample in bare_ms)
        print(
            f"  {label:4} engine {whole:.3f}   bare loop {bare:.3f}   overhead {whole - bare:.3f}"
        )


def main() -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64, help="trajectories")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--generate-s", type=float, default=0.03, help="mean latency a completion")
    parser.add_argument("--tool-s", type=float, default=0.01, help="mean latency of a tool")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--overhead-rows", type=int, default=512)
    parser.add_argument("--batches", type=int, default=32, help="of the part on stragglers")
    parser.add_argument("--stuck-s", type=float, default=1.0, help="latency of a tool that hangs")
    parser.add_argument("--update-s", type=float, default=0.2, help="time a trainer works")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--parts", nargs="+", default=["schedules", "stragglers", "overhead"])
    options = parser.parse_args()
    gymnasium.register(ENV_ID, SlowTool)  # type: ignore[arg-type]
    if "schedules" in options.parts:
        fresh = partial(make_policy, options.generate_s)
        compare_schedules(options.rows, options.turns, fresh, options.tool_s, options.repeats)
    if "vllm" in options.parts:
        compare_on_vllm(options)
    if "stragglers" in options.parts:
        compare_stragglers(options)
    if "overhead" in options.parts:
        measure_overhead(options.overhead_rows, options.turns, options.repeats)


if __name__ == "__main__":
    main()
