"""What a reward is: a pure function of plain data, returning `float | None` or raising.

`None` abstains: the component leaves its statistics for this trajectory. An exception is invalid:
the episode is retried, then its group dropped; it is never scored 0. Rewards never run code that a
model wrote and never read the raw history: they get the views below, which hold only what the
*policy* said (assistant spans) and typed results.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from turngym.errors import ConfigError, RewardError
from turngym.types import InvalidToolCall, Level, Message, RewardSpec, Task, ToolCall

__all__ = ["EpisodeView", "RewardFn", "Rubric", "ToolResult", "TurnView", "reward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What one tool call of a turn gave, in call order."""

    name: str
    arguments: Mapping[str, Any]
    value: Any = None
    """The tool's return value before it became text; None when the call failed."""

    error: str | None = None
    """Error kind when the call failed: `unknown_tool`, `schema_mismatch`, `tool_error`,
    `timeout`, or a parser's kind."""

    text: str = ""
    """What the model was shown."""

    @property
    def ok(self) -> bool:
        """The call was read, valid and ran."""
        return self.error is None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    """One turn as rewards see it."""

    index: int
    message: Message
    """The action: content, reasoning, calls. Only what the policy said."""

    results: tuple[ToolResult, ...] = ()

    @property
    def content(self) -> str:
        """Visible text of the action, "" when it has none."""
        content = self.message["content"]
        return content if isinstance(content, str) else ""

    @property
    def tool_calls(self) -> list[ToolCall]:
        """Calls that were read."""
        return self.message.get("tool_calls", [])

    @property
    def invalid_tool_calls(self) -> list[InvalidToolCall]:
        """Calls that could not be read."""
        return self.message.get("invalid_tool_calls", [])


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeView:
    """A whole episode as outcome rewards see it."""

    task: Task
    turns: tuple[TurnView, ...]
    final_answer: str | None
    """Visible text of the last action when it made no call; None when there is none."""

    stop_reason: str
    """Trajectory status, for example `completed` or `max_turns`."""

    state: Mapping[str, Any] = field(default_factory=dict)
    """Typed facts the environment adds (an `ExecResult`, the store's content)."""


RewardFn = Callable[..., float | None]

F = TypeVar("F", bound=Callable[..., float | None])

_MARK = "__turngym_reward__"


@overload
def reward(fn: F, /) -> F: ...


@overload
def reward(
    *,
    weight: float = ...,
    on: Level = ...,
    low: float | None = ...,
    high: float | None = ...,
    name: str | None = ...,
) -> Callable[[F], F]: ...


def reward(
    fn: F | None = None,
    /,
    *,
    weight: float = 1.0,
    on: Level = "outcome",
    low: float | None = None,
    high: float | None = None,
    name: str | None = None,
) -> Any:
    """Mark a method `(self, turn: TurnView)` or `(self, episode: EpisodeView)` as a reward.

    Usable bare (`@reward`) or with arguments.

    Args:
        fn: the function, when used bare.
        weight: factor in the sum; priority under GDPO.
        on: `turn` (scored after every step) or `outcome` (scored once, at the end).
        low: smallest possible value, where known.
        high: largest possible value, where known.
        name: component name; defaults to the function's.

    Raises:
        ConfigError: a weight or bound that is not finite, or `low > high`.
    """

    def mark(function: F) -> F:
        component = name or function.__name__
        for label, value in (("weight", weight), ("low", low), ("high", high)):
            if value is not None and not math.isfinite(value):
                raise ConfigError(f"reward {component!r}: {label} must be finite, got {value}")
        if on not in ("turn", "outcome"):
            raise ConfigError(f"reward {component!r}: on must be 'turn' or 'outcome', got {on!r}")
        if low is not None and high is not None and low > high:
            raise ConfigError(f"reward {component!r}: low {low} is above high {high}")
        spec = RewardSpec(name=component, weight=weight, level=on, low=low, high=high)
        setattr(function, _MARK, spec)
        return function

    return mark if fn is None else mark(fn)


def spec_of(function: Any) -> RewardSpec | None:
    """Return the spec that `reward` attached, or None."""
    spec = getattr(function, _MARK, None)
    return spec if isinstance(spec, RewardSpec) else None


@dataclass(frozen=True)
class Rubric:
    """A named, weighted set of reward functions; it scores, the learner combines."""

    functions: Mapping[str, tuple[RewardSpec, RewardFn]]

    @classmethod
    def of(cls, functions: Iterable[RewardFn]) -> "Rubric":
        """Collect functions marked with `reward`, in order.

        Raises:
            ConfigError: an unmarked function, or two components with one name.
        """
        found: dict[str, tuple[RewardSpec, RewardFn]] = {}
        for function in functions:
            spec = spec_of(function)
            if spec is None:
                raise ConfigError(f"{function!r} is not marked with @reward")
            if spec.name in found:
                raise ConfigError(f"two rewards are called {spec.name!r}; give one `name=`")
            found[spec.name] = (spec, function)
        return cls(found)

    @property
    def specs(self) -> dict[str, RewardSpec]:
        """Specs by name."""
        return {name: spec for name, (spec, _) in self.functions.items()}

    def score(self, level: Level, view: TurnView | EpisodeView) -> dict[str, float | None]:
        """Run every component of a level.

        Raises:
            RewardError: a component raised, or returned NaN, an infinity, or not a number; the
                message names the component and the cause.
        """
        scores: dict[str, float | None] = {}
        for name, (spec, function) in self.functions.items():
            if spec.level != level:
                continue
            try:
                value = function(view)
            except Exception as error:
                raise RewardError(
                    f"reward {name!r} raised {type(error).__name__}: {error}"
                ) from error
            scores[name] = _checked(spec, value)
        return scores

    def total(self, scores: Mapping[str, float | None]) -> float:
        """Weighted sum of the components that did not abstain."""
        specs = self.specs
        return sum(
            specs[name].weight * value for name, value in scores.items() if value is not None
        )


def _checked(spec: RewardSpec, value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, (int, float)) and not hasattr(value, "__float__"):
        raise RewardError(
            f"reward {spec.name!r} must return a number or None, got {type(value).__name__}"
        )
    # Adding zero makes -0.0, such as a fine that was not due, an ordinary zero.
    number = float(value) + 0.0
    if not math.isfinite(number):
        raise RewardError(
            f"reward {spec.name!r} must be finite, got {number}; return None to abstain"
        )
    if (spec.low is not None and number < spec.low) or (
        spec.high is not None and number > spec.high
    ):
        raise RewardError(
            f"reward {spec.name!r} must lie in [{spec.low}, {spec.high}], got {number}"
        )
    return number
