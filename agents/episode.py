"""One episode: reset, act, step, until the task or a limit ends it; then a `Trajectory`.

One `boundary` turns failures into data. What the model does wrong is an observation; what the
world does wrong (environment, reward, engine) ends the episode with a `*_error` status.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, get_args

from turngym.agents.agent import Act, AgentFactory, Interruption, Seating
from turngym.agents.config import RolloutConfig
from turngym.agents.seeds import derive
from turngym.agents.source import EnvHandle, StepResult
from turngym.envs.blame import describe
from turngym.errors import (
    ConfigError,
    EngineError,
    EnvError,
    MissingDependencyError,
    RewardError,
    TemplateError,
    WeightSyncError,
)
from turngym.types import (
    Action,
    Observation,
    Rewards,
    RewardSpec,
    Status,
    Task,
    Trajectory,
    Turn,
    is_world_fault,
)

__all__ = ["EpisodeFailure", "Seat", "boundary", "run_episode"]

_STATUSES = frozenset(get_args(Status))
_FATAL = (ConfigError, MissingDependencyError, WeightSyncError)
_BLAME: Mapping[type[Exception], Status] = {
    RewardError: "reward_error",
    EnvError: "env_error",
    EngineError: "engine_error",
    TemplateError: "engine_error",
}
_OWN_INFO = frozenset({"rewards", "results", "tools", "stop_reason"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One place in a run: which task, and which of its samples."""

    run_seed: int
    ordinal: int
    """Position of the task in the run's task stream."""

    sample: int
    task: Task
    group_id: str

    @property
    def env_seed(self) -> int:
        """Seed of `reset`: one for the whole group, which starts from one state."""
        return derive(self.run_seed, self.ordinal, "env")

    def turn_seed(self, turn: int) -> int:
        """Seed of the draws of a turn."""
        return derive(self.run_seed, self.ordinal, self.sample, turn)


class EpisodeFailure(Exception):  # noqa: N818 - not an error to handle, a result on its way
    """The world failed; carries the status and the cause in words."""

    def __init__(self, status: Status, cause: BaseException) -> None:
        super().__init__(describe(cause))
        self.status = status


@contextmanager
def boundary(status: Status, *, fatal: tuple[type[Exception], ...] = _FATAL) -> Iterator[None]:
    """Attribute whatever fails inside: to what the error says of itself, else to `status`.

    Args:
        status: who is to blame when the error does not say.
        fatal: errors that are no matter of one episode; they go through and stop the run.

    Raises:
        EpisodeFailure: for every other error.
    """
    try:
        yield
    except EpisodeFailure:
        raise
    except Exception as error:
        if isinstance(error, fatal) and not isinstance(error, TemplateError):
            raise
        blamed = (named for kind, named in _BLAME.items() if isinstance(error, kind))
        raise EpisodeFailure(next(blamed, status), error) from error


async def run_episode(
    env: EnvHandle,
    make_agent: AgentFactory,
    seat: Seat,
    config: RolloutConfig,
    specs: Mapping[str, RewardSpec],
    *,
    env_id: str,
) -> Trajectory:
    """Play one episode; failures of the world come back as a trajectory's status.

    Args:
        env: the environment; after a failure it must not be used again.
        make_agent: makes the agent that plays.
        seat: task, sample, seeds.
        config: budgets and deadlines.
        specs: the environment's reward components.
        env_id: recorded.

    Raises:
        ConfigError: a setting is wrong.
        WeightSyncError: the policy's weights are not the trainer's.
        asyncio.CancelledError: the caller was cancelled.
    """
    episode = _Episode(env, make_agent, seat, config, specs)
    try:
        status = await episode.play()
        with boundary("engine_error"):
            return episode.record(env_id, status)
    except EpisodeFailure as failure:
        return episode.record(env_id, failure.status, str(failure))
    finally:
        episode.agent.close()


class _Episode:
    def __init__(
        self,
        env: EnvHandle,
        make_agent: AgentFactory,
        seat: Seat,
        config: RolloutConfig,
        specs: Mapping[str, RewardSpec],
    ) -> None:
        self._env = env
        self._seat = seat
        self._specs = specs
        limit_s = config.episode_deadline_s
        self._loop = asyncio.get_running_loop()
        self._deadline = None if limit_s is None else self._loop.time() + limit_s
        self.agent = make_agent(
            Seating(
                turn_seed=seat.turn_seed,
                max_tokens=config.max_tokens,
                max_context=config.max_context,
                interruption=None
                if config.think_tokens is None
                else Interruption(
                    after=config.think_tokens,
                    text=config.interrupt_text,
                    answer_tokens=config.answer_tokens,
                ),
                expert=env.expert,
                demonstrate=env.demonstrate,
            )
        )
        self._prompt: Observation = ()
        self._turns: list[Turn] = []
        self._outcome: dict[str, float | None] = {}

    async def play(self) -> Status:
        """Play to the end and return how it ended."""
        with boundary("env_error"):
            self._prompt, info = await self._env.reset(
                seed=self._seat.env_seed, task=self._seat.task
            )
        with boundary("engine_error"):
            self.agent.memory.begin(self._prompt, info.get("tools", ()))
        for turn in itertools.count():
            if not self.agent.memory.has_room:
                return await self._finish("context_full")
            if self._is_late():
                return await self._finish("deadline")
            started = time.perf_counter()
            act = await self._act(turn)
            generate_s = time.perf_counter() - started
            if act is None:
                return await self._finish("deadline")
            if act.limit is not None:
                self._turns.append(_turn(act, generate_s))
                return await self._finish(act.limit)
            status = await self._step(act, generate_s)
            if status is not None:
                return status
        raise AssertionError("itertools.count() does not end")

    def _is_late(self) -> bool:
        return self._deadline is not None and self._loop.time() >= self._deadline

    async def _act(self, turn: int) -> Act | None:
        """The next action, or None when the deadline passes first."""
        try:
            async with asyncio.timeout_at(self._deadline):
                with boundary("engine_error"):
                    return await self.agent.act(turn)
        except TimeoutError:  # the boundary has turned every other one into a failure
            return None

    async def _step(self, act: Act, generate_s: float) -> Status | None:
        started = time.perf_counter()
        # What happens in a step may come of what the model wrote: it must not stop the run.
        with boundary("env_error", fatal=()):
            result = await self._env.step(act.message)
            env_s = time.perf_counter() - started
            observation, ended, info = _checked_step(result)
            rewards, outcome = self._split(info["rewards"])
            answered = replace(
                _turn(act, generate_s),
                observation=observation,
                rewards=rewards,
                tool_errors=_count_errors(act.message, info),
                env_s=env_s,
                info=_reported(info),
            )
            self._turns.append(answered)
        if ended is not None:
            self._outcome = outcome
            # A wrapper such as TimeLimit ends the episode behind the environment's back.
            return ended if "stop_reason" in info else await self._finish(ended)
        with boundary("engine_error"):
            self.agent.memory.observe(act.message, observation, info.get("tools"))
        return None

    async def _finish(self, reason: Status) -> Status:
        """Have the outcome of an episode scored that ended from outside."""
        with boundary("env_error"):
            turn, self._outcome = self._split(await self._env.finish(reason))
            if turn:
                raise EnvError(f"finish() must score outcome rewards only, got {sorted(turn)}")
        return reason

    def _split(self, rewards: Rewards) -> tuple[dict[str, float | None], dict[str, float | None]]:
        """Sort rewards by level: (turn, outcome)."""
        levels: dict[str, dict[str, float | None]] = {"turn": {}, "outcome": {}}
        for name, value in rewards.items():
            spec = self._specs.get(name)
            if spec is None:
                raise EnvError(
                    f"reward {name!r} is not in the environment's specs {sorted(self._specs)}"
                )
            if value is not None:
                value = float(value)
                if not math.isfinite(value):
                    raise RewardError(f"reward {name!r} must be finite, got {value}; None abstains")
            levels[spec.level][name] = value
        return levels["turn"], levels["outcome"]

    def record(self, env_id: str, status: Status, error: str | None = None) -> Trajectory:
        """Build the trajectory; a failed one keeps its messages but no tokens and no scores."""
        failed = error is not None
        return Trajectory(
            env_id=env_id,
            task_id=self._seat.task.id,
            group_id=self._seat.group_id,
            seed=self._seat.env_seed,
            status=status,
            source=self.agent.source,
            turns=tuple(replace(turn, start=0, stop=0) if failed else turn for turn in self._turns),
            rewards={} if failed else self._outcome,
            prompt=self._prompt,
            sample=self._seat.sample,
            error=error,
            metadata={"ordinal": self._seat.ordinal},
            **({} if failed else self.agent.memory.columns()),
        )


def _checked_step(result: StepResult) -> tuple[Observation, Status | None, dict[str, Any]]:
    """Take a step result apart: observation, status when the episode ended, info."""
    try:
        observation, _, terminated, truncated, info = result
        info["rewards"]
    except (TypeError, ValueError, KeyError) as error:
        raise EnvError(
            "step must return (observation, reward, terminated, truncated, info) with the named "
            f"rewards in info['rewards'], got {str(result)[:200]}"
        ) from error
    if not terminated and not truncated:
        return observation, None, info
    status = info.get("stop_reason", "completed" if terminated else "max_turns")
    if status not in _STATUSES or is_world_fault(status):
        raise EnvError(f"info['stop_reason'] must be a trajectory status, got {status!r}")
    return observation, status, info


def _turn(act: Act, generate_s: float) -> Turn:
    return Turn(
        start=act.start,
        stop=act.stop,
        finish_reason=act.finish_reason,
        message=act.message,
        generate_s=generate_s,
    )


def _count_errors(message: Action, info: Mapping[str, Any]) -> int:
    if "results" in info:
        return sum(not result.ok for result in info["results"])
    return len(message.get("invalid_tool_calls", ()))


def _reported(info: Mapping[str, Any]) -> dict[str, Any]:
    """What is worth keeping of a step's info: the fate of each call, and plain values."""
    kept: dict[str, Any] = {
        name: value
        for name, value in info.items()
        if name not in _OWN_INFO and (value is None or isinstance(value, (bool, int, float, str)))
    }
    if info.get("results"):
        kept["results"] = [
            {"name": result.name, "error": result.error} for result in info["results"]
        ]
    return kept
