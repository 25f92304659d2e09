"""What the engine counts, and the breaker that stops a run of failures."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from turngym.errors import CircuitBreakerError
from turngym.types import Status, Trajectory, is_world_fault

__all__ = ["CircuitBreaker", "RolloutStats"]

_BLAMED: Mapping[Status, str] = {
    "reward_error": "; it is the environment's own code that fails: mend the reward",
}


@dataclass
class RolloutStats:
    """Sums over everything an engine has rolled out."""

    trajectories: int = 0
    """Episodes that ended for the model's or the task's sake."""

    statuses: Counter[Status] = field(default_factory=Counter)
    """Episodes by status, failed ones included (after their retries)."""

    retries: int = 0
    dropped_groups: int = 0
    turns: int = 0
    sampled_tokens: int = 0
    context_tokens: int = 0
    """Tokens that were not sampled: prompts, observations, template."""

    tool_errors: int = 0
    truncated: int = 0
    generate_s: float = 0.0
    """Seconds waited for the policy, over all turns."""

    generate_max_s: float = 0.0
    env_s: float = 0.0
    """Seconds waited for the environment, over all turns."""

    env_max_s: float = 0.0

    def add(self, trajectory: Trajectory) -> None:
        """Count a finished episode."""
        self.statuses[trajectory.status] += 1
        if is_world_fault(trajectory.status):
            return
        self.trajectories += 1
        self.truncated += trajectory.truncated
        self.turns += len(trajectory.turns)
        sampled = trajectory.num_sampled
        self.sampled_tokens += sampled
        self.context_tokens += len(trajectory.ids) - sampled
        for turn in trajectory.turns:
            self.tool_errors += turn.tool_errors
            self.generate_s += turn.generate_s
            self.generate_max_s = max(self.generate_max_s, turn.generate_s)
            self.env_s += turn.env_s
            self.env_max_s = max(self.env_max_s, turn.env_s)

    @property
    def failures(self) -> int:
        """Episodes that failed for the world's fault, after their retries."""
        return sum(count for status, count in self.statuses.items() if is_world_fault(status))

    @property
    def truncated_frac(self) -> float | None:
        """Fraction of the episodes that a limit ended; None before the first."""
        return self.truncated / self.trajectories if self.trajectories else None

    def metrics(self) -> Mapping[str, float]:
        """Means and fractions by metric key; empty before the first episode."""
        if not self.trajectories:
            return {}
        turns = max(self.turns, 1)
        return {
            "rollout/trajectories": self.trajectories,
            "rollout/turns": self.turns / self.trajectories,
            "rollout/sampled_tokens": self.sampled_tokens / self.trajectories,
            "rollout/context_tokens": self.context_tokens / self.trajectories,
            "rollout/tool_errors": self.tool_errors / self.trajectories,
            "rollout/truncated_frac": self.truncated / self.trajectories,
            "rollout/failures": self.failures,
            "rollout/retries": self.retries,
            "rollout/dropped_groups": self.dropped_groups,
            "rollout/generate_s": self.generate_s / turns,
            "rollout/generate_max_s": self.generate_max_s,
            "rollout/env_s": self.env_s / turns,
            "rollout/env_max_s": self.env_max_s,
        }


class CircuitBreaker:
    """Stops the run when too many of the latest attempts failed for the world's fault.

    Args:
        failure_rate: fraction above which it opens; 1 = never.
        window: attempts looked at.
        patience: attempts before the first verdict.
    """

    def __init__(self, failure_rate: float, *, window: int = 32, patience: int = 8) -> None:
        self._failure_rate = failure_rate
        self._failed: deque[bool] = deque(maxlen=window)
        self._patience = patience

    def note(self, trajectory: Trajectory) -> None:
        """Count an attempt.

        Raises:
            CircuitBreakerError: more than the rate failed; the message holds the last cause.
        """
        self._failed.append(is_world_fault(trajectory.status))
        failed, seen = sum(self._failed), len(self._failed)
        if self._failed[-1] and seen >= self._patience and failed > self._failure_rate * seen:
            blamed = _BLAMED.get(trajectory.status, "")
            raise CircuitBreakerError(
                f"{failed} of the last {seen} episodes failed for the world's fault (more than "
                f"failure_rate {self._failure_rate:g}); the last one, task "
                f"{trajectory.task_id!r}: {trajectory.status}: {trajectory.error}{blamed}"
            )
