"""Where the engine's environments come from, and how coroutines talk to them.

Environments are plain synchronous Gymnasium. Each is used by one episode at a time; its code runs
on pool threads, so that no tool can block the event loop.
"""

import logging
import random
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import gymnasium

from turngym.agents.threads import BlockingPool, CallTimeoutError
from turngym.envs.registry import make
from turngym.errors import ConfigError, EnvError
from turngym.types import Action, Observation, Rewards, RewardSpec, Status, Task

__all__ = ["EnvHandle", "EnvSource", "Tasks"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

StepResult = tuple[Observation, Any, bool, bool, dict[str, Any]]


class Tasks(Protocol):
    """What the engine needs of a task set."""

    def __len__(self) -> int: ...

    def __getitem__(self, ordinal: int, /) -> Task: ...


class EnvSource:
    """Makes equal environments, through `gymnasium.make`.

    Args:
        env_id: registered id, for example `turngym/Calculator-v0`.
        kwargs: keyword arguments of the environment.
        split: which of its disjoint task sets to draw from; None = the environment's default.

    Raises:
        ConfigError: the environment has no tasks, or is no `TurnEnv`.
        EnvError: it could not be made.
    """

    def __init__(
        self,
        env_id: str,
        kwargs: Mapping[str, Any] | None = None,
        split: str | None = None,
    ) -> None:
        self.env_id = env_id
        self.kwargs = dict(kwargs or {})
        if split is not None:
            self.kwargs["split"] = split
        env = self._make()
        try:
            self.task_set: Tasks = self._attribute(env, "task_set")
            self.reward_specs: Mapping[str, RewardSpec] = dict(self._attribute(env, "reward_specs"))
            if len(self.task_set) < 1:
                raise ConfigError(f"{env_id} has no tasks with the arguments {self.kwargs}")
        except BaseException:
            close_env(env)
            raise
        self.has_expert = bool(getattr(env.unwrapped, "has_expert", False))
        self.max_turns: int | None = getattr(env.unwrapped, "max_turns", None)
        self._spare: gymnasium.Env[Any, Any] | None = env
        self._lock = threading.Lock()

    def at(self, ordinal: int) -> "EnvSource":
        """Return the source whose task an ordinal is: this one; see `MixedSource`."""
        return self

    def task(self, ordinal: int) -> Task:
        """Return the task at a position of the endless stream: epoch after epoch of the set."""
        return self.task_set[ordinal % len(self.task_set)]

    def make(self) -> gymnasium.Env[Any, Any]:
        """Return a fresh environment; the first was made to read the task set."""
        with self._lock:
            env, self._spare = self._spare, None
        return self._make() if env is None else env

    def close(self) -> None:
        """Close what `make` has not handed out. Idempotent."""
        with self._lock:
            env, self._spare = self._spare, None
        if env is not None:
            close_env(env)

    def _make(self) -> gymnasium.Env[Any, Any]:
        # Gymnasium's passive checker walks every message of every step; our own `check_env` has
        # done that once.
        return make(self.env_id, disable_env_checker=True, **self.kwargs)

    def _attribute(self, env: gymnasium.Env[Any, Any], name: str) -> Any:
        try:
            return env.get_wrapper_attr(name)
        except AttributeError as error:
            raise ConfigError(
                f"{self.env_id} has no `{name}`: rollouts need a turngym.envs.TurnEnv"
            ) from error


class EnvHandle:
    """One environment, made on first use, called from coroutines, one call at a time.

    Args:
        source: makes it.
        pool: where its code runs.
        timeout_s: most seconds a call may run.
    """

    def __init__(self, source: EnvSource, pool: BlockingPool, *, timeout_s: float) -> None:
        self._source = source
        self._pool = pool
        self._timeout_s = timeout_s
        self._env: gymnasium.Env[Any, Any] | None = None
        self._lock = threading.Lock()
        self._is_busy = False
        self._is_discarded = False

    async def reset(self, *, seed: int, task: Task) -> tuple[Observation, dict[str, Any]]:
        """Start an episode of a task."""
        return await self._call(
            "reset", lambda: self._made().reset(seed=seed, options={"task": task})
        )

    async def step(self, action: Action) -> StepResult:
        """Play one turn."""
        return await self._call("step", lambda: self._made().step(action))

    async def finish(self, reason: Status) -> Rewards:
        """Score the outcome of an episode that is ended from outside."""
        return await self._call("finish", lambda: self._made().get_wrapper_attr("finish")(reason))

    async def demonstrate(self, rng: random.Random, habits: Mapping[str, float]) -> Action:
        """Ask the environment's expert for its next action."""
        return await self._call("demonstrate", lambda: self.ask_expert(rng, habits))

    @property
    def expert(self) -> Callable[[random.Random, Mapping[str, float]], Action] | None:
        """The environment's expert, called in place; None when it has none."""
        return self.ask_expert if self._source.has_expert else None

    def ask_expert(self, rng: random.Random, habits: Mapping[str, float]) -> Action:
        """Ask the expert from the calling thread."""
        action: Action = self._made().get_wrapper_attr("demonstrate")(rng, habits)
        return action

    def discard(self) -> None:
        """Close the environment as soon as no call is running in it; returns at once."""
        with self._lock:
            is_idle = not self._is_busy and not self._is_discarded
            self._is_discarded = True
        if is_idle:
            threading.Thread(target=self._close, name="turngym-close", daemon=True).start()

    def close(self) -> None:
        """Close the environment, which no episode may be using. Idempotent."""
        with self._lock:
            if self._is_discarded:
                return
            self._is_discarded = True
        self._close()

    async def _call(self, name: str, fn: Callable[[], T]) -> T:
        try:
            return await self._pool.call(lambda: self._run(fn), timeout_s=self._timeout_s)
        except CallTimeoutError as error:
            raise EnvError(
                f"{name} of {self._source.env_id} was {error} and is abandoned; give its tools a "
                "timeout, or raise env_timeout_s"
            ) from error

    def _run(self, fn: Callable[[], T]) -> T:
        self._enter()
        try:
            return fn()
        finally:
            self._leave()

    def _enter(self) -> None:
        with self._lock:
            if self._is_discarded:
                raise EnvError(f"{self._source.env_id} was discarded before the call began")
            self._is_busy = True

    def _leave(self) -> None:
        with self._lock:
            self._is_busy = False
            is_orphan = self._is_discarded
        if is_orphan:
            self._close()

    def _made(self) -> gymnasium.Env[Any, Any]:
        if self._env is None:
            self._env = self._source.make()
        return self._env

    def _close(self) -> None:
        if self._env is not None:
            close_env(self._env)


def close_env(env: gymnasium.Env[Any, Any]) -> None:
    """Close an environment; a failure to do so is logged."""
    try:
        env.close()
    except Exception as error:
        logger.warning("closing %s failed: %s: %s", env, type(error).__name__, error)
