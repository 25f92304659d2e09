"""From records of episodes to the numbers of an evaluation: one pure function, `summarize`.

The command line, the viewer and the files all show what it returns. Episodes that failed for the
world's fault are counted apart and never as wrong; a component that abstained is missing, not 0.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from turngym.errors import ConfigError
from turngym.types import RewardSpec, Trajectory, is_world_fault

__all__ = ["Estimate", "Report", "pass_at_k", "pass_hat_k", "record", "success_rule", "summarize"]

Record = Mapping[str, Any]

_RESAMPLES = 2000


def record(trajectory: Trajectory) -> dict[str, Any]:
    """Return what summaries need of a trajectory, JSON-able.

    `rewards` holds each outcome component, and each turn component summed over the turns that did
    not abstain (None when all did).
    """
    rewards = dict(trajectory.rewards)
    for turn in trajectory.turns:
        for name, value in turn.rewards.items():
            so_far = rewards.get(name)
            rewards[name] = so_far if value is None else value if so_far is None else so_far + value
    return {
        "task_id": trajectory.task_id,
        "sample": trajectory.sample,
        "status": trajectory.status,
        "error": trajectory.error,
        "rewards": rewards,
        "turns": len(trajectory.turns),
        "tool_calls": sum(_num_calls(turn.message) for turn in trajectory.turns),
        "tool_errors": sum(turn.tool_errors for turn in trajectory.turns),
        "sampled_tokens": trajectory.num_sampled,
        "seconds": sum(turn.generate_s + turn.env_s for turn in trajectory.turns),
    }


def _num_calls(message: Mapping[str, Any]) -> int:
    return len(message.get("tool_calls", ())) + len(message.get("invalid_tool_calls", ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over tasks with its 95 % interval."""

    value: float
    low: float | None
    """Bootstrap over tasks, percentile 2.5; None when one task says nothing of the others."""

    high: float | None
    tasks: int
    """Tasks that the mean is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The numbers of an evaluation."""

    success: Mapping[str, float]
    """An episode is a success when each of these components reaches its threshold."""

    tasks: int
    """Tasks with at least one episode that did not fail for the world's fault; 0 = there is
    nothing to report but `last_error`."""

    episodes: int
    """Episodes in all, errors included."""

    errors: int
    """Episodes that failed for the world's fault; in no other number."""

    last_error: str | None
    """Status and cause of the last of them, by task and sample; None when there is none."""

    unscored: int
    """Episodes whose success is unknown because a component abstained; not in pass@k."""

    statuses: Mapping[str, int]
    pass_at: Mapping[int, Estimate]
    """By k: chance that at least one of k tries is a success."""

    pass_hat: Mapping[int, Estimate]
    """By k: chance that all of k tries are."""

    reward: Estimate | None
    """Weighted sum of the components."""

    rewards: Mapping[str, Estimate]
    """By component; turn components are summed over the turns."""

    turns: Estimate | None
    tool_errors: Estimate | None
    """Tool calls of an episode that could not be read, validated or run."""

    tool_error_rate: float | None
    """The same as a fraction of all calls; None when there was none."""

    truncated: Estimate | None
    """Fraction of the episodes that a limit ended."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data with string keys."""
        plain = asdict(self)
        for name in ("pass_at", "pass_hat"):
            plain[name] = {str(k): estimate for k, estimate in plain[name].items()}
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "Report":
        """Return the report that `to_json` wrote."""

        def estimate(value: Any) -> Any:
            if not isinstance(value, Mapping):
                return value
            if "tasks" in value:
                return Estimate(**value)
            return {name: estimate(item) for name, item in value.items()}

        values = {name: estimate(value) for name, value in plain.items()}
        for name in ("pass_at", "pass_hat"):
            values[name] = {int(k): item for k, item in values[name].items()}
        return cls(**values)

    def rows(self) -> list[tuple[str, str, str]]:
        """Return table rows: name, value, 95 % interval."""
        named: list[tuple[str, Estimate | None]] = [
            *((f"pass@{k}", estimate) for k, estimate in self.pass_at.items()),
            *((f"pass^{k}", estimate) for k, estimate in self.pass_hat.items() if k > 1),
            ("reward", self.reward),
            *((f"reward/{name}", estimate) for name, estimate in self.rewards.items()),
            ("turns", self.turns),
            ("tool errors", self.tool_errors),
            ("truncated", self.truncated),
        ]
        table = [
            (name, f"{estimate.value:.3f}", _interval(estimate))
            for name, estimate in named
            if estimate is not None
        ]
        return [*table, ("errors", f"{self.errors}/{self.episodes}", "")]


def _interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f"[{estimate.low:.3f}, {estimate.high:.3f}]"


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k of n tries is among the c right ones, unbiased.

    arXiv:2107.03374, equation 1.
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Chance that all of k of n tries are among the c right ones, unbiased (arXiv:2406.12045)."""
    return math.comb(c, k) / math.comb(n, k)


def success_rule(
    specs: Mapping[str, RewardSpec], success: str | Sequence[str] | None = None
) -> dict[str, float]:
    """Decide what counts as a success: components and the thresholds that each must reach.

    The threshold is a component's highest possible value, 1 when that is unknown.

    Args:
        specs: the environment's components.
        success: component or components; None = `success`, else `correct`, else the only outcome
            component.

    Raises:
        ConfigError: an unknown component, no obvious one, or no component at all.
    """
    if not specs:
        raise ConfigError("the environment has no rewards: mark a method with @turngym.reward")
    if success is None:
        outcomes = [name for name, spec in specs.items() if spec.level == "outcome"]
        obvious = [name for name in ("success", "correct") if name in outcomes]
        chosen = (obvious or outcomes)[:1]
        if not obvious and len(outcomes) != 1:
            known = outcomes or list(specs)
            raise ConfigError(f"name the component that counts as success=; known: {known}")
    else:
        chosen = [success] if isinstance(success, str) else list(success)
    if unknown := [name for name in chosen if name not in specs]:
        raise ConfigError(f"success={unknown[0]!r} is no reward component; known: {sorted(specs)}")
    highs = {name: specs[name].high for name in chosen}
    return {name: 1.0 if high is None else high for name, high in highs.items()}


def summarize(
    records: Iterable[Record],
    specs: Mapping[str, RewardSpec],
    *,
    success: str | Sequence[str] | None = None,
    seed: int = 0,
) -> Report:
    """Summarise the episodes of an evaluation.

    Depends on the set of records alone, not on their order: the union of an interrupted run and
    its continuation gives what one run gives. Of several records of one (task, sample) the first
    that is no error counts.

    Args:
        records: what `record` returned, or the same read from a file.
        specs: the environment's components.
        success: see `success_rule`.
        seed: seeds the bootstrap.

    Raises:
        ConfigError: see `success_rule`.
    """
    rule = success_rule(specs, success)
    episodes = _distinct(records)
    scored = [one for one in episodes if not is_world_fault(one["status"])]
    failed = [one for one in episodes if is_world_fault(one["status"])]
    by_task: dict[str, list[Record]] = {}
    for one in scored:
        by_task.setdefault(one["task_id"], []).append(one)
    tasks = list(by_task.values())
    counts = _count_successes(tasks, rule)

    def over_tasks(value: Callable[[Record], float | None]) -> Estimate | None:
        found = ([v for one in task if (v := value(one)) is not None] for task in tasks)
        return _estimate([sum(values) / len(values) for values in found if values], seed)

    components = {name: over_tasks(partial(_component, name)) for name in specs}
    num_calls = sum(one["tool_calls"] for one in scored)
    num_errors = sum(one["tool_errors"] for one in scored)
    return Report(
        success=rule,
        tasks=len(tasks),
        episodes=len(episodes),
        errors=len(failed),
        last_error=f"{failed[-1]['status']}: {failed[-1]['error']}" if failed else None,
        unscored=len(scored) - sum(n for n, _ in counts),
        statuses=dict(sorted(Counter(one["status"] for one in episodes).items())),
        pass_at=_over_k(counts, pass_at_k, seed),
        pass_hat=_over_k(counts, pass_hat_k, seed),
        reward=over_tasks(lambda one: _total(one, specs)),
        rewards={name: found for name, found in components.items() if found is not None},
        turns=over_tasks(lambda one: one["turns"]),
        tool_errors=over_tasks(lambda one: one["tool_errors"]),
        tool_error_rate=num_errors / num_calls if num_calls else None,
        truncated=over_tasks(lambda one: float(one["status"] != "completed")),
    )


def _distinct(records: Iterable[Record]) -> list[Record]:
    """One record a (task, sample), sorted, so that sums do not depend on the order."""
    chosen: dict[tuple[str, int], Record] = {}
    for one in records:
        key = (one["task_id"], one["sample"])
        if key not in chosen or is_world_fault(chosen[key]["status"]):
            chosen[key] = one
    return [chosen[key] for key in sorted(chosen)]


def _count_successes(
    tasks: Iterable[Sequence[Record]], rule: Mapping[str, float]
) -> list[tuple[int, int]]:
    """(tries, successes) of each task that has tries whose success is known."""
    verdicts = ([_is_success(one, rule) for one in task] for task in tasks)
    known = ([verdict for verdict in task if verdict is not None] for task in verdicts)
    return [(len(task), sum(task)) for task in known if task]


def _over_k(
    counts: Sequence[tuple[int, int]], estimator: Callable[[int, int, int], float], seed: int
) -> dict[int, Estimate]:
    """Estimate by k, over the tasks that have at least k tries."""
    most = max((n for n, _ in counts), default=0)
    powers = {1 << exponent for exponent in range(most.bit_length())}
    found = {
        k: _estimate([estimator(n, c, k) for n, c in counts if n >= k], seed)
        for k in sorted((powers | {most}) - {0})
    }
    return {k: estimate for k, estimate in found.items() if estimate is not None}


def _is_success(episode: Record, rule: Mapping[str, float]) -> bool | None:
    values = [episode["rewards"].get(name) for name in rule]
    if any(value is None for value in values):
        return None
    return all(value >= least for value, least in zip(values, rule.values(), strict=True))


def _component(name: str, episode: Record) -> float | None:
    value: float | None = episode["rewards"].get(name)
    return value


def _total(episode: Record, specs: Mapping[str, RewardSpec]) -> float | None:
    rewards: Mapping[str, float | None] = episode["rewards"]
    scored = [specs[name].weight * value for name, value in rewards.items() if value is not None]
    return sum(scored) if scored else None


def _estimate(values: Sequence[float], seed: int) -> Estimate | None:
    """Mean and 95 % percentile bootstrap interval over tasks; None without a value."""
    if not values:
        return None
    array = np.array(values, np.float64)
    low = high = None
    if len(array) > 1:
        rng = np.random.default_rng(seed)
        # In pieces: the draws of many tasks at once would not fit the memory.
        piece = max(1, 1_000_000 // len(array))
        sizes = [min(piece, _RESAMPLES - start) for start in range(0, _RESAMPLES, piece)]
        draws = (rng.integers(len(array), size=(size, len(array))) for size in sizes)
        means = np.concatenate([array[draw].mean(axis=1) for draw in draws])
        low, high = (float(bound) for bound in np.quantile(means, (0.025, 0.975)))
    return Estimate(value=float(array.mean()), low=low, high=high, tasks=len(array))
