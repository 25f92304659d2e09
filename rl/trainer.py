"""The training loop, blind to the algorithm and to what samples.

(critic alone, where the algorithm wants it first), then
collect -> update -> sync -> canary -> log -> (save, evaluate)

How far rollouts run ahead of it is the collector's matter: with staleness 0 they begin when the
loop collects, else they go on all the while.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from turngym.agents.base import TrainablePolicy
from turngym.agents.store import TrajectoryStore
from turngym.errors import EngineError, WeightSyncError
from turngym.rl.checkpoint import Checkpoint, save
from turngym.rl.collector import Collected, Collector
from turngym.rl.config import TrainConfig
from turngym.rl.engines import Engines
from turngym.rl.learner import Learner
from turngym.rl.weights import Canary
from turngym.tracking import Tracker
from turngym.types import Group, Trajectory

__all__ = ["StepReport", "Trainer"]

StepReport = Callable[[int, Mapping[str, float]], None]
Evaluate = Callable[[str, int], None]


class Trainer:
    """Runs rollout batches until the run is done or is asked to stop.

    Args:
        config: the run.
        learner: holds and improves the weights.
        policy: samples from them.
        engines: roll out with it.
        collector: rolls out what trains.
        tokenizer: saved beside the weights.
        canary: checks every sync.
        tracker: takes the metrics.
        evaluate: called with (name, rollout batches done).
        is_main: this process writes the run folder.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        learner: Learner,
        policy: TrainablePolicy,
        engines: Engines,
        collector: Collector,
        tokenizer: Any,
        canary: Canary,
        tracker: Tracker,
        evaluate: Evaluate,
        is_main: bool = True,
    ) -> None:
        self.config = config
        self.learner = learner
        self.policy = policy
        self.collector = collector
        self.step = 0
        """Rollout batches trained on."""

        self.stop_requested = False
        """Set it (from a signal handler, say) to end after the running step, with a checkpoint."""

        self._engines = engines
        self._tokenizer = tokenizer
        self._canary = canary
        self._tracker = tracker
        self._evaluate = evaluate
        self._is_main = is_main
        self._saved = -1
        self._store = TrajectoryStore(config.run / "trajectories")

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint whose weights are already in the model."""
        self.learner.load_state_dict(checkpoint.learner)
        self.collector.restore(checkpoint.state["collector"], checkpoint.waiting)
        if self.collector.replay is not None:
            for trajectory in checkpoint.replay:
                self.collector.replay.put(trajectory)
        self.step = self._saved = checkpoint.step

    def sync(self) -> float:
        """Bring the weights to the sampler and make sure that they are in use.

        Returns:
            What the canary measured, nats.

        Raises:
            EngineError: the engine failed, or took too long.
            WeightSyncError: the engine does not sample from the trainer's weights.
        """
        model, version = self.learner.model, self.learner.version
        trained = ((name, p.detach()) for name, p in model.named_parameters() if p.requires_grad)
        self.policy.push(trained, version=version)
        gap = self._canary.check(self.policy, model, version=version)
        self.collector.synced(version)
        return gap

    def run(self, report: StepReport | None = None) -> None:
        """Train until `config.steps` rollout batches are done or `stop_requested` is set.

        Call `sync` first. When a sync fails later on, what was learned is saved before the error
        is raised.

        Args:
            report: called after every rollout batch with (batches done, metrics).

        Raises:
            WeightSyncError: the engine does not sample from the trainer's weights.
            CircuitBreakerError: too many episodes failed for the world's fault.
            CheckpointError: the run folder cannot be written.
        """
        every = self.config.eval.every
        if self.step < self.config.steps:
            self._pretrain_critic()
        while self.step < self.config.steps and not self.stop_requested:
            metrics = self._train_one()
            self._tracker.log(metrics, self.step)
            if report is not None:
                report(self.step, metrics)
            if self.config.save_every and self.step % self.config.save_every == 0:
                self.save()
            if every and self.step % every == 0 and self.step < self.config.steps:
                self._evaluate(f"step-{self.step:06d}", self.step)
        if self._saved != self.step:
            self.save()

    def _pretrain_critic(self) -> None:
        """Let the critic learn the returns of a policy that does not move yet (VAPO)."""
        metrics: dict[str, float] = {}
        while self.learner.pretraining_left and not self.stop_requested:
            metrics = self.learner.pretrain_critic(self._collect().groups)
            self.collector.synced(self.learner.version)
        if metrics:
            self._saved = -1
            self._tracker.log(metrics, self.step)

    def _collect(self) -> Collected:
        """Wait for a batch, sampled with the settings in force."""
        now = self.config.at(self.step)
        self._engines.use(now)
        self.learner.temperature = now.temperature
        if self.policy.version != self.learner.version:  # an engine that had to start again
            self.sync()
        return self.collector.collect(left=self.config.steps - self.step)

    def _train_one(self) -> dict[str, float]:
        started = time.perf_counter()
        collected = self._collect()
        sampled_at = time.perf_counter()
        self._keep(collected)
        metrics = self.learner.update(collected.groups, greedy=collected.greedy)
        updated_at = time.perf_counter()
        self.step += 1
        try:
            gap = self.sync()
        except (EngineError, WeightSyncError):
            self.save()
            raise
        synced_at = time.perf_counter()
        return (
            reward_metrics(collected.sampled)
            | dict(collected.metrics)
            | metrics
            | {
                "train/version": self.learner.version,
                "train/canary": gap,
                "time/rollout_s": sampled_at - started,
                "time/update_s": updated_at - sampled_at,
                "time/sync_s": synced_at - updated_at,
            }
        )

    def _keep(self, collected: Collected) -> None:
        every = self.config.store_trajectories
        if self._is_main and every and self.step % every == 0:
            for group in collected.sampled:
                self._store.append(group.trajectories, {"step": self.step, "group": group.id})

    def save(self) -> None:
        """Write a checkpoint of the state after `step` rollout batches."""
        self._saved = self.step
        if not self._is_main:
            return
        state, waiting = self.collector.snapshot()
        save(
            self.config.run,
            step=self.step,
            model=self.learner.model,
            tokenizer=self._tokenizer,
            learner=self.learner.state_dict(),
            state={"collector": state},
            replay=[] if self.collector.replay is None else list(self.collector.replay),
            waiting=waiting,
            keep=self.config.keep_checkpoints,
        )


def reward_metrics(groups: list[Group]) -> dict[str, float]:
    """Return means over the trajectories of a rollout batch, by metric key.

    Components that abstained are left out of their mean; turn components are summed over turns.
    """
    trajectories = [one for group in groups for one in group.trajectories]
    rubric = {name: spec for group in groups for name, spec in group.rubric.items()}
    metrics: dict[str, float] = {}
    totals = [0.0] * len(trajectories)
    for name, spec in rubric.items():
        values = [_component(one, name) for one in trajectories]
        known = [value for value in values if value is not None]
        if known:
            metrics[f"reward/{name}/mean"] = sum(known) / len(known)
        totals = [t + spec.weight * (v or 0.0) for t, v in zip(totals, values, strict=True)]
    count = len(trajectories)
    earned: dict[str, list[float]] = {}
    for one, total in zip(trajectories, totals, strict=True):
        earned.setdefault(one.env_id.rpartition("/")[2], []).append(total)
    if len(earned) > 1:
        metrics |= {f"env/{name}/reward": sum(of) / len(of) for name, of in earned.items()}
    return metrics | {
        "reward/mean": sum(totals) / count,
        "rollout/episodes": count,
        "rollout/turns": sum(len(one.turns) for one in trajectories) / count,
        "rollout/sampled_tokens": sum(one.num_sampled for one in trajectories) / count,
        "rollout/truncated_frac": sum(one.truncated for one in trajectories) / count,
        "rollout/tool_errors": sum(t.tool_errors for one in trajectories for t in one.turns)
        / count,
    }


def _component(trajectory: Trajectory, name: str) -> float | None:
    values = [trajectory.rewards.get(name), *(turn.rewards.get(name) for turn in trajectory.turns)]
    known = [value for value in values if value is not None]
    return sum(known) if known else None
