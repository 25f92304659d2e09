"""The vocabulary shared by all packages: plain data, standard library and numpy only.

Three status vocabularies exist and are never mixed: a completion's `FinishReason`, a sandbox's
status (`turngym.sandboxes.base`) and a trajectory's `Status`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal, NotRequired, TypedDict, get_args

import numpy as np
from numpy.typing import NDArray

from turngym.errors import TrajectoryError

__all__ = [
    "Action",
    "FinishReason",
    "FunctionCall",
    "Group",
    "InvalidToolCall",
    "Level",
    "Message",
    "Observation",
    "RewardSpec",
    "Rewards",
    "Source",
    "Status",
    "Task",
    "TokenRole",
    "ToolCall",
    "Trajectory",
    "Turn",
    "is_world_fault",
]


class FunctionCall(TypedDict):
    """Name and arguments of a call; `arguments` is the parsed object, as chat templates want it."""

    name: str
    arguments: dict[str, Any]


class ToolCall(TypedDict):
    """One tool call of an assistant message, in OpenAI's shape."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class InvalidToolCall(TypedDict):
    """A call the parser could not read: the model's fault, answered by a message it can act on."""

    text: str
    """The text of the attempt, exactly as sampled."""

    error: str
    """Error kind, for example `malformed_json`, `truncated`, `missing_name`."""

    span: tuple[int, int]
    """Start and end of `text` in the sampled text, in characters."""

    detail: NotRequired[str]
    """One sentence for the model."""

    index: NotRequired[int]
    """Position among all calls, valid and invalid, of the message (results keep call order)."""


class Message(TypedDict):
    """One chat message, in the shape chat templates and OpenAI-style servers take."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Any
    """Text; a list of content parts is passed through untouched (multimodal)."""

    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    reasoning_content: NotRequired[str]
    invalid_tool_calls: NotRequired[list[InvalidToolCall]]


Action = Message
"""What a policy does in one turn: one assistant message."""

Observation = tuple[Message, ...]
"""The messages an environment adds: the first prompt, tool results, user replies."""

Rewards = Mapping[str, float | None]
"""Reward components by name; None = the component abstained and leaves the statistics."""

FinishReason = Literal["stop", "length", "abort"]
"""Why a completion ended: a stop token, a token limit, or the engine gave up."""

Level = Literal["turn", "outcome"]

Source = Literal["policy", "demo"]

Status = Literal[
    "completed",
    "max_turns",
    "max_tokens",
    "context_full",
    "deadline",
    "parse_limit",
    "env_error",
    "reward_error",
    "engine_error",
    "cancelled",
]
"""How an episode ended. `*_error` are the world's faults and never reach the learner."""

_STATUSES = frozenset(get_args(Status))


def is_world_fault(status: Status) -> bool:
    """Tell whether a status is the world's fault (retried, never trained, never scored)."""
    return status.endswith("_error") or status == "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem an agent can be given."""

    id: str
    """Unique in its task set; names the task in records, splits and resumes."""

    prompt: str | tuple[Message, ...] = ""
    """The question as text, or as messages; environments may build the prompt themselves."""

    answer: Any = None
    """Hidden answer; JSON-able."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Everything else an environment needs; JSON-able."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """What is known of one reward component without running it."""

    name: str
    weight: float = 1.0
    level: Level = "outcome"
    low: float | None = None
    high: float | None = None


class TokenRole(IntEnum):
    """Where a token of the record came from."""

    PROMPT = 0
    """First prompt: messages of `reset`, tools, template."""

    OBSERVATION = 1
    """What the environment said after a turn."""

    GLUE = 2
    """Template text between messages, forced text, an appended end token."""

    REASONING = 3
    """Sampled, outside any tool call."""

    ACTION = 4
    """Sampled, inside a tool call (`algorithms.md` 9: set by the token before it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One completion of the policy and the environment's answer to it."""

    start: int
    """Row of the first token of the completion in the trajectory's columns."""

    stop: int
    """One past the row of its last token; equal to `start` in message-level records."""

    finish_reason: FinishReason
    message: Message
    """The action as parsed."""

    observation: Observation = ()
    """What the environment answered."""

    rewards: Rewards = field(default_factory=dict)
    """Turn-level rewards by name; empty when nothing was scored."""

    tool_errors: int = 0
    """Calls of this turn that could not be parsed, validated or run."""

    generate_s: float = 0.0
    """Seconds the policy took, queueing included."""

    env_s: float = 0.0
    """Seconds the environment took."""

    info: Mapping[str, Any] = field(default_factory=dict)
    """What the environment reported of this turn; JSON-able."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """The record of one episode: token columns plus one `Turn` a completion.

    One row a token, in the order the sampler saw or emitted them; never re-tokenised. Columns are
    read-only. A message-level record (OracleAgent, OpenAI servers) has no rows and cannot be
    trained on.

    Raises:
        TrajectoryError: at construction, when an invariant does not hold (see `_check_*`).
    """

    env_id: str
    task_id: str
    group_id: str
    seed: int
    status: Status
    source: Source = "policy"

    ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """Token ids, (T,)."""

    logp: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    """Log-probability the sampler gave the token, temperature applied; NaN where not sampled."""

    role: NDArray[np.int8] = field(default_factory=lambda: np.empty(0, np.int8))
    """`TokenRole` of each token."""

    turn: NDArray[np.int16] = field(default_factory=lambda: np.empty(0, np.int16))
    """Turn the token belongs to, -1 for the first prompt; an observation belongs to the turn it
    answers."""

    version: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """Optimizer steps the sampling weights had seen; -1 where not sampled."""

    segment: NDArray[np.int16] = field(default_factory=lambda: np.empty(0, np.int16))
    """Context the token belongs to: 0 throughout for append-only templates; a template that
    rewrites history starts a new segment (its own prompt, its own row in the learner) a turn."""

    turns: tuple[Turn, ...] = ()
    rewards: Rewards = field(default_factory=dict)
    """Outcome rewards by name."""

    prompt: Observation = ()
    """Messages of `reset`."""

    sample: int = 0
    """Index in the group."""

    error: str | None = None
    """Cause, when `status` is the world's fault."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Anything worth keeping; JSON-able."""

    extra: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Optional columns with one row a token (top-K of the sampler, sampling mask)."""

    def __post_init__(self) -> None:
        if self.status not in _STATUSES:
            raise TrajectoryError(f"status must be one of {sorted(_STATUSES)}, got {self.status!r}")
        if is_world_fault(self.status) and self.error is None:
            raise TrajectoryError(f"status {self.status!r} needs `error`, the cause in words")
        self._check_columns()
        self._check_roles()
        self._check_turns()
        for column in self._columns().values():
            column.setflags(write=False)

    def _columns(self) -> dict[str, NDArray[Any]]:
        names = ("ids", "logp", "role", "turn", "version", "segment")
        return {name: getattr(self, name) for name in names} | dict(self.extra)

    def _check_columns(self) -> None:
        lengths = {name: len(column) for name, column in self._columns().items()}
        if len(set(lengths.values())) > 1:
            raise TrajectoryError(f"columns must have one row a token, got lengths {lengths}")
        for name, dtype in (
            ("ids", np.int32),
            ("logp", np.float32),
            ("role", np.int8),
            ("turn", np.int16),
            ("version", np.int32),
            ("segment", np.int16),
        ):
            found = getattr(self, name).dtype
            if found != dtype:
                raise TrajectoryError(f"column {name!r} must be {np.dtype(dtype)}, got {found}")
        if len(self.ids) and int(self.ids.min()) < 0:
            raise TrajectoryError(f"token ids must not be negative, got {int(self.ids.min())}")

    def _check_roles(self) -> None:
        if not len(self.ids):
            return
        if int(self.role.min()) < 0 or int(self.role.max()) > TokenRole.ACTION:
            raise TrajectoryError(f"roles must lie in 0..{int(TokenRole.ACTION)}")
        sampled = self.sampled
        if self.source == "policy":
            wrong = np.flatnonzero(sampled != np.isfinite(self.logp))
            if len(wrong):
                row = int(wrong[0])
                raise TrajectoryError(
                    f"row {row}: a token is sampled exactly when its logp is finite, got "
                    f"role {TokenRole(self.role[row]).name} with logp {self.logp[row]}"
                )
            if bool((self.logp[sampled] > 1e-4).any()):
                raise TrajectoryError(
                    f"log-probabilities must not be positive, got {float(self.logp[sampled].max())}"
                )
        elif np.isfinite(self.logp).any():
            raise TrajectoryError("demonstrations carry no log-probabilities; logp must be NaN")
        if bool((sampled & (self.version < 0)).any()) and self.source == "policy":
            raise TrajectoryError(
                "sampled tokens need the version of the weights that sampled them"
            )

    def _check_turns(self) -> None:
        for name in ("turn", "segment"):
            if (np.diff(getattr(self, name)) < 0).any():
                raise TrajectoryError(f"column {name!r} must not decrease")
        if len(self.ids) and (int(self.turn[0]) < -1 or int(self.turn[-1]) >= len(self.turns)):
            raise TrajectoryError(
                f"turn indices must lie in -1..{len(self.turns) - 1}, "
                f"got {int(self.turn[0])}..{int(self.turn[-1])}"
            )
        covered = np.zeros(len(self.ids), bool)
        last = 0
        for k, turn in enumerate(self.turns):
            if not last <= turn.start <= turn.stop <= len(self.ids):
                raise TrajectoryError(
                    f"turn {k} spans rows {turn.start}..{turn.stop}, which is out of order or past "
                    f"the end ({len(self.ids)} rows)"
                )
            if (self.turn[turn.start : turn.stop] != k).any():
                raise TrajectoryError(f"rows {turn.start}..{turn.stop} must carry turn index {k}")
            covered[turn.start : turn.stop] = True
            last = turn.stop
        if (self.sampled & ~covered).any():
            row = int(np.flatnonzero(self.sampled & ~covered)[0])
            raise TrajectoryError(f"row {row} is sampled but lies in no turn")

    @property
    def sampled(self) -> NDArray[np.bool_]:
        """True on tokens the policy (or the demonstrator) produced: the loss mask, (T,)."""
        return self.role >= TokenRole.REASONING

    @property
    def has_tokens(self) -> bool:
        """False for message-level records, which cannot be trained on."""
        return len(self.ids) > 0

    @property
    def num_sampled(self) -> int:
        """Number of policy tokens."""
        return int(self.sampled.sum())

    @property
    def terminated(self) -> bool:
        """The task ended the episode."""
        return self.status == "completed"

    @property
    def truncated(self) -> bool:
        """A limit ended the episode."""
        return not self.terminated and not is_world_fault(self.status)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """The trajectories of one task, all from the same initial state; the unit of a baseline."""

    id: str
    task_id: str
    env_id: str
    trajectories: tuple[Trajectory, ...]
    rubric: Mapping[str, RewardSpec]
    """Every reward component the environment can emit, by name."""

    ordinal: int = 0
    """Position of the task in the run's task stream."""

    def __post_init__(self) -> None:
        if not self.trajectories:
            raise TrajectoryError(f"group {self.id!r} has no trajectory")
        for trajectory in self.trajectories:
            if (trajectory.task_id, trajectory.group_id) != (self.task_id, self.id):
                raise TrajectoryError(
                    f"group {self.id!r} of task {self.task_id!r} holds a trajectory of group "
                    f"{trajectory.group_id!r}, task {trajectory.task_id!r}"
                )
            names = set(trajectory.rewards).union(*(turn.rewards for turn in trajectory.turns))
            if unknown := names - set(self.rubric):
                raise TrajectoryError(
                    f"rewards {sorted(unknown)} are not in the rubric {sorted(self.rubric)}"
                )
