"""`TurnEnv`: a Gymnasium environment whose actions and observations are chat messages.

    class Arithmetic(TurnEnv):
        tools = [calculate]

        def tasks(self, split): ...
        def prompt(self, task): ...

        @reward(weight=0.2, on="turn")
        def valid_call(self, turn): ...

        @reward
        def correct(self, episode): ...

An author fills in `tasks` and, where needed, the hooks `prompt`, `start`, `respond`, `is_over`,
`facts` and `expert`. Everything else (calls, validation, limits, scoring, snapshots) is done here.
What an episode changes lives in `self.state`, which snapshots copy.
"""

import copy
import functools
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, cast, get_args

import gymnasium

from turngym.envs.arguments import refuse_unknown
from turngym.envs.authoring import bound_rewards, bound_tools
from turngym.envs.calls import answer_calls, only_unreadable
from turngym.envs.episode import Episode, Snapshot, as_messages, final_answer
from turngym.envs.spaces import DialogueSpace, MessageSpace
from turngym.envs.tasks import TaskSet
from turngym.envs.tools import Tool
from turngym.errors import ConfigError, DataError, EnvError, ResetNeededError, TurngymError
from turngym.rewards.base import EpisodeView, RewardFn, Rubric, TurnView
from turngym.types import Action, Message, Observation, RewardSpec, Status, Task, is_world_fault

__all__ = ["TurnEnv"]

Info = dict[str, Any]


class TurnEnv(gymnasium.Env[Observation, Action]):
    """Base class of environments in message space.

    `reset` returns the first messages and an info with `task_id` and `tools` (JSON schemas).
    `step` takes one assistant message; its info holds `rewards` (components by name, the outcome
    ones once the episode ended), `results` (one `ToolResult` a call), `tools` when they changed,
    and `stop_reason` at the end. The scalar reward is the weighted sum of `rewards`.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  Gymnasium's own shape

    tools: ClassVar[Sequence[Tool]] = ()
    """Tools offered besides the methods marked with `@tool`."""

    rewards: ClassVar[Sequence[RewardFn]] = ()
    """Reward functions used besides the methods marked with `@reward`."""

    habits: ClassVar[Collection[str]] = ()
    """Bad habits that `expert` can show."""

    state: Any = None
    """Whatever the author's hooks and tools change during an episode: plain data that can be
    copied. `start` sets it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "TurnEnv":
        """Refuse unknown keyword arguments by name, with the closest known one."""
        refuse_unknown(cls, kwargs)
        return super().__new__(cls)

    def __init__(
        self, *, split: str = "train", max_turns: int = 8, parse_limit: int | None = 3
    ) -> None:
        """Set up an environment that has not been reset yet.

        Args:
            split: which tasks `tasks` returns.
            max_turns: actions after which the episode is truncated.
            parse_limit: consecutive actions with nothing but unreadable tool calls after which the
                episode is truncated; None = no such limit.
        """
        if max_turns < 1:
            raise ConfigError(f"max_turns must be at least 1, got {max_turns}")
        if parse_limit is not None and parse_limit < 1:
            raise ConfigError(f"parse_limit must be at least 1 or None, got {parse_limit}")
        self.split = split
        self.max_turns = max_turns
        self.parse_limit = parse_limit
        self.observation_space = DialogueSpace()
        self.action_space = MessageSpace("assistant")
        self._tools = {tool.name: tool for tool in bound_tools(self)}
        self._rubric = Rubric.of([*self.rewards, *bound_rewards(self)])
        self._episode: Episode | None = None

    # The author's hooks.

    def tasks(self, split: str) -> TaskSet:
        """Return the tasks of a split. Every environment defines this."""
        raise EnvError(f"{type(self).__name__} must define tasks(split)")

    def prompt(self, task: Task) -> str | Sequence[Message]:
        """Return the first messages; text alone is one user message."""
        return task.prompt

    def start(self, task: Task) -> None:
        """Prepare an episode, for example by setting `self.state`; `self.np_random` is seeded."""

    def offered(self) -> Collection[str]:
        """Return the names of the tools offered now; they may change during an episode."""
        return self._tools.keys()

    def respond(self, turn: TurnView) -> str | Sequence[Message] | None:
        """Answer an action without tool calls; None (the default) ends the episode."""
        return None

    def is_over(self, turn: TurnView) -> bool:
        """Tell whether the tool calls of an action ended the task."""
        return False

    def facts(self) -> Mapping[str, Any]:
        """Return what outcome rewards may know of the world; by default `state`, if a mapping."""
        return self.state if isinstance(self.state, Mapping) else {}

    def expert(self, rng: random.Random, habits: Mapping[str, float]) -> Action:
        """Return the next action of an expert that knows the answer; see `demonstrate`."""
        raise EnvError(f"{type(self).__name__} has no expert")

    def save_live(self) -> Any:
        """Return a copy of what is alive outside `state` (a sandbox), for `load_live`."""
        return None

    def load_live(self, saved: Any) -> None:
        """Continue from a copy made by `save_live`, which must stay usable."""

    # Gymnasium's side.

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start an episode.

        Args:
            seed: seeds `np_random`, which draws the task when none is given.
            options: `{"task": task_or_id}` gives the task.

        Raises:
            ConfigError: an unknown option.
            DataError: no task has the id.
            EnvError: the environment's own code failed.
        """
        super().reset(seed=seed)
        task = self._task_of(options or {})
        self._episode = None
        self.state = None
        with self._boundary("reset"):
            episode = Episode(task)
            self.start(task)
            prompt = as_messages(self.prompt(task))
            self._episode = episode
            return prompt, {"task_id": task.id, "tools": self._tell_tools()}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, Info]:
        """Take one assistant message, run its tool calls, and score the turn.

        Raises:
            ResetNeededError: no episode is running.
            DataError: the action is no assistant message (the caller's mistake, not the model's).
            RewardError: a reward function raised or returned no finite number.
            EnvError: the environment's own code or a tool's surroundings failed.
        """
        episode = self._running()
        if not self.action_space.contains(action):
            raise DataError(
                "an action is an assistant message {'role': 'assistant', 'content': str, ...} with "
                f"parsed tool_calls, got {str(action)[:200]!r}; to act with text, wrap the "
                "environment in TextActions"
            )
        try:
            with self._boundary("step"):
                turn, observation, terminated = self._take(episode, action)
            rewards = self._rubric.score("turn", turn)
            info: Info = {"rewards": rewards, "results": turn.results}
            limit = None if terminated else self._limit(episode)
            if terminated or limit:
                rewards |= self._end("completed" if terminated else cast(Status, limit))
                info["stop_reason"] = episode.stop_reason
            elif (tools := self._tell_tools()) is not None:
                info["tools"] = tools
        except BaseException:
            self._episode = None
            raise
        reward = float(self._rubric.total(rewards))
        return observation, reward, terminated, limit is not None, info

    def close(self) -> None:
        """Drop the episode. Shared resources stay open, see `turngym.envs.resources.close`."""
        self._episode = None

    # Beyond Gymnasium.

    def finish(self, reason: Status) -> dict[str, float | None]:
        """End the episode from outside (deadline, token budget, time limit) and score its outcome.

        Idempotent: an episode that has ended keeps its first reason and scores.

        Raises:
            ConfigError: the reason is a world's fault, which is never scored, or is unknown.
            ResetNeededError: there is no episode.
            RewardError: a reward function raised or returned no finite number.
        """
        episode = self._current()
        if episode.outcome is None:
            allowed = [status for status in get_args(Status) if not is_world_fault(status)]
            if reason not in allowed:
                raise ConfigError(f"reason must be one of {', '.join(allowed)}, got {reason!r}")
            self._end(reason)
        return dict(cast(dict[str, float | None], episode.outcome))

    @functools.cached_property
    def task_set(self) -> TaskSet:
        """The tasks of this environment's split."""
        return self.tasks(self.split)

    @property
    def reward_specs(self) -> dict[str, RewardSpec]:
        """Every reward component, by name."""
        return self._rubric.specs

    @property
    def task(self) -> Task:
        """The current task."""
        return self._current().task

    @property
    def turns(self) -> tuple[TurnView, ...]:
        """The turns of the episode so far."""
        return self._current().turns

    @property
    def has_expert(self) -> bool:
        """The environment can demonstrate its tasks."""
        return type(self).expert is not TurnEnv.expert

    def demonstrate(self, rng: random.Random, habits: Mapping[str, float]) -> Action:
        """Return the next action of the environment's own expert in the current state.

        Args:
            rng: decides about the habits and about what a bad habit does.
            habits: probabilities of named bad habits, drawn wherever the habit could show.

        Raises:
            ConfigError: an unknown habit, or a probability outside [0, 1].
            EnvError: the environment has no expert, or it failed.
            ResetNeededError: no episode is running.
        """
        self._running()
        for name, probability in habits.items():
            if name not in self.habits:
                known = ", ".join(sorted(self.habits)) or "none"
                raise ConfigError(f"the expert has no habit {name!r}; known: {known}")
            if not 0 <= probability <= 1:
                raise ConfigError(f"habit {name!r}: {probability} is no probability")
        with self._boundary("demonstrate"):
            return self.expert(rng, habits)

    def snapshot(self) -> Snapshot:
        """Copy the running episode, to be continued by `restore` here or in a sister environment.

        Raises:
            ResetNeededError: there is no episode.
        """
        with self._boundary("snapshot"):
            return Snapshot(
                env_type=type(self),
                episode=copy.copy(self._current()),
                state=copy.deepcopy(self.state),
                random_state=copy.deepcopy(self.np_random.bit_generator.state),
                live=self.save_live(),
            )

    def restore(self, state: Snapshot) -> None:
        """Continue from a snapshot, exactly.

        Raises:
            ConfigError: it was taken in another kind of environment.
        """
        if state.env_type is not type(self):
            raise ConfigError(
                f"a snapshot of {state.env_type.__name__} cannot be restored in "
                f"{type(self).__name__}"
            )
        with self._boundary("restore"):
            self._episode = copy.copy(state.episode)
            self.state = copy.deepcopy(state.state)
            self.np_random.bit_generator.state = copy.deepcopy(dict(state.random_state))
            self.load_live(state.live)

    def _task_of(self, options: Mapping[str, Any]) -> Task:
        if unknown := [name for name in options if name != "task"]:
            raise ConfigError(f"reset takes the option 'task', got {unknown[0]!r}")
        task = options.get("task")
        if isinstance(task, Task):
            return task
        if isinstance(task, str):
            return self.task_set.by_id(task)
        if task is not None:
            raise ConfigError(f"option 'task' must be a Task or the id of one, got {task!r}")
        return self.task_set[int(self.np_random.integers(len(self.task_set)))]

    def _take(self, episode: Episode, action: Action) -> tuple[TurnView, Observation, bool]:
        """Run an action; return the turn, the answer and whether the task ended."""
        index = len(episode.turns)
        offered = {name: self._tools[name] for name in self.offered()}
        results, answers = answer_calls(action, offered, turn=index)
        turn = TurnView(index=index, message=cast(Message, dict(action)), results=results)
        episode.turns += (turn,)
        episode.unreadable = episode.unreadable + 1 if only_unreadable(action) else 0
        if results:
            return turn, answers, self.is_over(turn)
        reply = self.respond(turn)
        if reply is None:
            return turn, (), True
        if not reply:
            raise EnvError("respond() returned no message; return None to end the episode")
        return turn, as_messages(reply), False

    def _limit(self, episode: Episode) -> Status | None:
        if len(episode.turns) >= self.max_turns:
            return "max_turns"
        if self.parse_limit is not None and episode.unreadable >= self.parse_limit:
            return "parse_limit"
        return None

    def _end(self, reason: Status) -> dict[str, float | None]:
        episode = self._current()
        last = episode.turns[-1] if episode.turns else None
        with self._boundary("facts"):
            view = EpisodeView(
                task=episode.task,
                turns=episode.turns,
                final_answer=None if last is None else final_answer(last),
                stop_reason=reason,
                state=self.facts(),
            )
        episode.stop_reason = reason
        episode.outcome = self._rubric.score("outcome", view)
        return episode.outcome

    def _tell_tools(self) -> list[dict[str, Any]] | None:
        """Return the schemas of the tools offered, or None when they are as they were told."""
        episode = self._current()
        with self._boundary("offered"):
            schemas = [self._tools[name].schema for name in self.offered()]
        if episode.turns and schemas == episode.told:
            return None
        episode.told = schemas
        return copy.deepcopy(schemas)

    def _current(self) -> Episode:
        if self._episode is None:
            raise ResetNeededError(f"{type(self).__name__} has no episode: call reset() first")
        return self._episode

    def _running(self) -> Episode:
        episode = self._current()
        if episode.stop_reason is not None:
            raise ResetNeededError(
                f"the episode has ended ({episode.stop_reason}): call reset() before the next step"
            )
        return episode

    @contextmanager
    def _boundary(self, doing: str) -> Iterator[None]:
        """Attribute failures of the author's code to the environment, never to the model."""
        try:
            yield
        except TurngymError as error:
            if isinstance(error, (EnvError, ConfigError, DataError, ImportError)):
                raise
            raise EnvError(f"{type(self).__name__}.{doing}: {error}") from error
        except Exception as error:
            raise EnvError(
                f"{type(self).__name__}.{doing} raised {type(error).__name__}: {error}"
            ) from error
