"""From a configuration to a running training: builds the parts, runs the stages in order.

model -> cold start -> evaluation -> reinforcement learning -> evaluation -> saved model
"""

import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from turngym.agents.base import Sampling, TrainablePolicy
from turngym.agents.evaluation import evaluate
from turngym.agents.head import vocab_size
from turngym.agents.renderer import Renderer
from turngym.agents.rollout import DemoAgent, EnvSource, MixedSource, RolloutEngine, TokenAgent
from turngym.agents.seeds import derive
from turngym.agents.store import TrajectoryStore
from turngym.config import dump
from turngym.errors import CheckpointError, ConfigError
from turngym.rl.algorithm import BoundAlgorithm
from turngym.rl.checkpoint import Checkpoint, latest, saving
from turngym.rl.collector import Collector
from turngym.rl.config import TrainConfig
from turngym.rl.engines import Engines
from turngym.rl.learner import Learner
from turngym.rl.models import Models
from turngym.rl.observer import Observer, Quiet
from turngym.rl.parallel import Ranks
from turngym.rl.replay import ReplayBuffer
from turngym.rl.sampler import open_policy
from turngym.rl.sft import cold_start
from turngym.rl.trainer import Trainer
from turngym.rl.weights import Canary
from turngym.rl.worlds import Worlds
from turngym.tracking import Many, Tracker, make_tracker, write_json

__all__ = ["TrainSession", "train"]

logger = logging.getLogger(__name__)


_FIXED = (
    *("env_id", "env", "mix", "seed", "prompts", "temperature", "curriculum", "staleness"),
    *("model", "algorithm", "optim", "critic", "sft"),
)
"""Settings that a resumed run must share with its beginning."""


def train(
    config: TrainConfig,
    env_kwargs: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
) -> Path:
    """Run a whole training: cold start, evaluation, reinforcement learning, evaluation.

    Args:
        config: the run.
        env_kwargs: arguments of the environment.
        observer: follows progress; None = nothing is shown.

    Returns:
        Folder of the trained model.

    Raises:
        ConfigError: settings contradict each other, or the run folder holds another run.
        CheckpointError: the run folder cannot be written, or there is nothing to resume.
        CircuitBreakerError: too many episodes failed for the world's fault.
    """
    with TrainSession(config, env_kwargs or {}, observer or Quiet()) as session:
        session.run()
    return config.run / "model"


class TrainSession:
    """One training run, with everything it needs; use as a context manager.

    Args:
        config: the run.
        env_kwargs: arguments of the environment.
        observer: follows progress.

    Raises:
        ConfigError: settings contradict each other, or the run folder holds another run.
        CheckpointError: `config.resume` and there is nothing to resume.
    """

    def __init__(
        self, config: TrainConfig, env_kwargs: Mapping[str, Any], observer: Observer
    ) -> None:
        self.config = config
        self.trainer: Trainer | None = None
        self._env_kwargs = dict(env_kwargs)
        self._worlds = Worlds(config, env_kwargs)
        self._observer = observer
        self._stack = contextlib.ExitStack()
        self._ranks = Ranks.from_environment(device=config.model.device)
        self._checkpoint = self._prepare_folder()
        self._models = Models(config, self._ranks, self._checkpoint)
        if config.deterministic or config.threads is not None:
            torch.set_num_threads(1 if config.deterministic else config.threads or 1)

    def __enter__(self) -> "TrainSession":
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _prepare_folder(self) -> Checkpoint | None:
        run = self.config.run
        if self.config.resume:
            checkpoint = latest(run)
            if checkpoint is None:
                raise CheckpointError(f"{run} has no complete checkpoint: start without --resume")
            self._check_same()
            return checkpoint
        if latest(run) is not None or (run / "model").exists():
            raise ConfigError(
                f"{run} already holds a run; go on with --resume, or choose another with --run"
            )
        return None

    def _check_same(self) -> None:
        """Refuse to go on with settings that the run did not begin with.

        Raises:
            ConfigError: one differs; names it and both values.
        """
        began = json.loads((self.config.run / "config.json").read_text(encoding="utf-8"))
        for name, value in self._facts().items():
            now = json.loads(json.dumps(value))
            if name in _FIXED and began.get(name) != now:
                raise ConfigError(
                    f"cannot resume {self.config.run} with another {name}: "
                    f"{_difference(began.get(name), now)}"
                )

    def _facts(self) -> dict[str, Any]:
        return dump(self.config) | {"env": dump_kwargs(self._env_kwargs)}

    def run(self) -> None:
        """Run all stages."""
        config = self.config
        source = self._worlds.source()
        self._stack.callback(source.close)
        bound = self._worlds.bind(source)
        model, tokenizer = self._models.load()
        self._ranks.wait()
        if self._ranks.is_main:  # from here on the folder is this run's
            write_json(config.run / "config.json", self._facts())
        renderer = Renderer(tokenizer, dialect=config.dialect, on_rewrite=config.on_rewrite)
        if self._checkpoint is None and config.sft.steps:
            if self._ranks.is_main:
                self._start_cold(model, tokenizer, renderer)
            self._ranks.wait()
            model, tokenizer = self._models.load(started=True)
        model, reference, critic = self._models.ready(model, bound)
        policy = open_policy(
            config,
            model,
            source=self._models.source,
            ranks=self._ranks,
            topk=config.topk if bound.needs_topk else 0,
        )
        self._stack.callback(policy.close)
        learner = Learner(
            model,
            bound,
            config.optim,
            total_steps=config.steps * config.optim.minibatches * config.optim.epochs,
            temperature=config.temperature,
            seed=config.seed,
            reference=reference,
            critic=critic,
            ranks=self._ranks,
        )
        trainer = self._assemble(learner, tokenizer, renderer, source, policy)
        trainer.sync()
        main = self._ranks.is_main
        if config.eval.before and self._checkpoint is None and main:
            self._evaluate(renderer, policy, "before")
        with self._observer.stage("train", config.steps) as advance:
            trainer.run(lambda done, m: advance(done, f"reward {m['reward/mean']:.3f}"))
        if trainer.stop_requested or not main:
            return
        if config.eval.after:
            self._evaluate(renderer, policy, "after")
        if config.model.lora_rank:
            model = model.merge_and_unload()
        with saving(config.run / "model"):
            model.save_pretrained(config.run / "model")
            tokenizer.save_pretrained(config.run / "model")
            if critic is not None:
                critic.model.save(config.run / "critic")

    def _start_cold(self, model: Any, tokenizer: Any, renderer: Renderer) -> None:
        """Imitate the environment's expert; the result becomes the run's base model."""
        config, sft = self.config, self.config.sft
        if config.model.lora_rank:
            model = self._models.attach(model)
        source = self._worlds.source()
        rollout = replace(config.rollout, group_size=1, deterministic=config.deterministic)
        agent = DemoAgent.factory(renderer, sft.habits)
        stage = self._observer.stage
        with (
            stage("demonstrations", sft.demos) as advance,
            RolloutEngine(
                source,
                agent,
                rollout,
                seed=derive(config.seed, "demos"),
                progress=_showing(advance),
            ) as engine,
        ):
            demos = engine.run(range(sft.demos))
        with stage("cold start", sft.steps) as advance:
            cold_start(
                model,
                demos,
                sft,
                seed=config.seed,
                report=lambda done, loss: advance(done, f"loss {loss:.3f}"),
            )
        if config.model.lora_rank:
            model = model.merge_and_unload()
        with saving(config.run / "base"):
            model.save_pretrained(config.run / "base")
            tokenizer.save_pretrained(config.run / "base")

    def _assemble(
        self,
        learner: Learner,
        tokenizer: Any,
        renderer: Renderer,
        source: EnvSource | MixedSource,
        policy: TrainablePolicy,
    ) -> Trainer:
        config = self.config
        renderer.check_vocab(vocab_size(learner.model))
        engines = Engines(
            config,
            bound=learner.bound,
            source=source,
            renderer=renderer,
            policy=policy,
        )
        self._stack.callback(engines.close)
        collector = Collector(
            engines.train,
            self._worlds.stream(source),
            learner.bound,
            prompts=config.prompts,
            greedy=engines.greedy,
            demos=engines.demos,
            replay=self._experience(learner.bound),
            curriculum=config.curriculum,
            staleness=config.staleness,
            ranks=self._ranks,
        )
        self._stack.callback(collector.close)
        step = self._checkpoint.step + 1 if self._checkpoint else None
        tracker: Tracker = Many([])
        if self._ranks.is_main:
            tracker = make_tracker(config.run, config.trackers, resume_step=step)
        self._stack.callback(tracker.close)
        tracker.config(self._facts())
        prompt = renderer.start([{"role": "user", "content": "Hello"}], []).ids
        dtypes = {config.model.dtype, config.engine_dtype}
        tolerance = 1e-4 if dtypes == {"float32"} else 0.2
        self.trainer = Trainer(
            config,
            learner=learner,
            policy=policy,
            engines=engines,
            collector=collector,
            tokenizer=tokenizer,
            canary=Canary(
                prompt.tolist(), Sampling(temperature=config.temperature), tolerance=tolerance
            ),
            tracker=tracker,
            evaluate=lambda name, _: self._evaluate(renderer, policy, name),
            is_main=self._ranks.is_main,
        )
        if self._checkpoint is not None:
            self.trainer.restore(self._checkpoint)
        return self.trainer

    def _experience(self, bound: BoundAlgorithm) -> ReplayBuffer | None:
        """Successes to replay: those of an earlier run, where one is named, come first."""
        folder = self.config.experience
        if not bound.algorithm.selection.replay:
            if folder is not None:
                raise ConfigError(
                    f"experience={folder} is read by algorithms that replay; "
                    f"{bound.algorithm.name} does not (selection.replay=0)"
                )
            return None
        buffer = ReplayBuffer()
        if folder is not None and self._checkpoint is None:
            for trajectory in TrajectoryStore(folder / "trajectories"):
                buffer.add(bound, trajectory)
        return buffer

    def _evaluate(self, renderer: Renderer, policy: TrainablePolicy, name: str) -> None:
        if not self._ranks.is_main:
            return
        config = self.config.at(0 if self.trainer is None else self.trainer.step)
        sampling = Sampling(temperature=config.temperature, max_tokens=config.rollout.max_tokens)
        agent = TokenAgent.factory(policy, renderer, sampling)
        rollout = replace(config.rollout, group_size=1, deterministic=config.deterministic)
        for title, source in self._worlds.held_back(name):
            tasks = min(config.eval.tasks, len(source.task_set))
            stage = self._observer.stage(f"evaluation {title}", tasks * config.eval.samples)
            with (
                stage as advance,
                RolloutEngine(
                    source,
                    agent,
                    rollout,
                    seed=derive(config.seed, "eval"),
                    progress=_showing(advance),
                ) as engine,
            ):
                report = evaluate(engine, num_tasks=tasks, samples_per_task=config.eval.samples)
            write_json(config.run / "evaluations" / f"{title}.json", report.to_json())
            self._observer.evaluated(title, report)


def _showing(advance: Callable[..., None]) -> Callable[[int, int], None]:
    return lambda done, _: advance(done)


def _difference(began: Any, now: Any, where: str = "") -> str:
    """Name the first setting that differs, and both values."""
    if isinstance(began, dict) and isinstance(now, dict):
        for name in [*began, *now]:
            if began.get(name) != now.get(name):
                return _difference(began.get(name), now.get(name), f"{where}.{name}".lstrip("."))
    return f"{where + ' ' if where else ''}was {began!r}, now it is {now!r}"


def dump_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return an environment's arguments as JSON-able data."""
    return {name: list(v) if isinstance(v, tuple) else v for name, v in kwargs.items()}
