"""What a training run is made of: frozen dataclasses without torch (`--help` must be fast)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

from turngym.agents.config import EngineConfig, RolloutConfig
from turngym.config import suggest
from turngym.errors import ConfigError
from turngym.rl.algorithm import Algorithm
from turngym.rl.presets import preset
from turngym.tracking import TRACKERS

__all__ = [
    "CriticConfig",
    "EvalSchedule",
    "ModelConfig",
    "OptimConfig",
    "SftConfig",
    "Stages",
    "TrainConfig",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model is trained."""

    path: str = "tiny"
    """A Hugging Face folder or hub id; `tiny` = a fresh 0.2-million-parameter model."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"
    lora_rank: int = 0
    """Rank of low-rank adapters, trained instead of the weights (needs peft); 0 = all weights."""

    lora_alpha: float | None = None
    """The adapters' update is scaled by alpha / rank; None = twice the rank."""

    lora_targets: tuple[str, ...] = ()
    """Names of the linear layers that get an adapter; none = all of them."""

    def __post_init__(self) -> None:
        if self.lora_rank < 0:
            raise ConfigError(f"model.lora_rank must be 0 (off) or positive, got {self.lora_rank}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """How gradients become updates."""

    lr: float = 1e-6
    """Learning rate of AdamW."""

    matrix_lr: float = 0.0
    """Learning rate of Muon for matrices inside the network; 0 = AdamW for everything."""

    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.99)
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 = never."""

    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    decay_from: float = 0.0
    """Fraction of the steps after which the decay begins."""

    minibatches: int = 1
    """Optimizer steps a rollout batch is split into."""

    epochs: int = 1
    """Passes over a rollout batch."""

    micro_tokens: int = 16_384
    """Most tokens, padding included, of one forward pass; bounds memory, never changes results."""

    def __post_init__(self) -> None:
        for name in ("lr", "matrix_lr", "weight_decay", "max_grad_norm"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"optim.{name} must be finite and >= 0, got {value}")
        for name in ("minibatches", "epochs", "micro_tokens"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"optim.{name} must be at least 1, got {value}")
        if not 0 <= self.decay_from < 1:
            raise ConfigError(f"optim.decay_from must lie in [0, 1), got {self.decay_from}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig:
    """The critic of algorithms that have one; `optim` holds for what is not said here.

    How many steps it takes, and how many before the policy moves, is the algorithm's matter
    (`ValueLoss`).
    """

    path: str | None = None
    """Folder or hub id of the model that becomes the critic; None = a copy of the policy."""

    lr: float | None = None
    """Learning rate; None = five times the policy's, as in Open-Reasoner-Zero."""

    matrix_lr: float | None = None
    """Learning rate of Muon; None = the policy's."""

    warmup_steps: int = 0

    def __post_init__(self) -> None:
        for name in ("lr", "matrix_lr"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"critic.{name} must be finite and >= 0, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Settings that change while a run goes on: (rollout batch, value from there on), in order."""

    temperature: tuple[tuple[int, float], ...] = ()
    max_tokens: tuple[tuple[int, int], ...] = ()
    """Of `rollout.max_tokens`: short completions first."""

    max_context: tuple[tuple[int, int], ...] = ()
    """Of `rollout.max_context`."""

    def __post_init__(self) -> None:
        for name in ("temperature", "max_tokens", "max_context"):
            stages = getattr(self, name)
            starts = [start for start, _ in stages]
            if starts != sorted(set(starts)) or min(starts, default=0) < 0:
                raise ConfigError(f"stages.{name} must begin later and later, got {starts}")
            for _, value in stages:
                if not 0 < value < float("inf"):
                    raise ConfigError(f"stages.{name} must be positive and finite, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """Cold start: imitation of the environment's own expert."""

    steps: int = 0
    """Optimizer steps; 0 = no cold start."""

    demos: int = 4096
    """Different demonstrations collected; they are reshuffled every time all were seen."""

    batch_size: int = 24
    """Demonstrations a step."""

    habits: dict[str, float] = field(default_factory=dict)
    """Bad habits of the expert, each with its probability a turn: what is left for RL to mend."""

    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(
            lr=5e-3, matrix_lr=0.05, warmup_steps=20, schedule="linear", decay_from=0.5
        )
    )

    def __post_init__(self) -> None:
        if self.steps < 0 or self.demos < 1 or self.batch_size < 1:
            raise ConfigError(
                "sft.steps must be >= 0, sft.demos and sft.batch_size at least 1, got "
                f"{self.steps}, {self.demos} and {self.batch_size}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSchedule:
    """When and on how much a run evaluates itself; tasks come from the `eval` split."""

    tasks: int = 200
    samples: int = 1
    every: int = 0
    """Optimizer steps between evaluations; 0 = only before and after."""

    before: bool = True
    after: bool = True

    def __post_init__(self) -> None:
        if self.tasks < 1 or self.samples < 1 or self.every < 0:
            raise ConfigError(
                "eval.tasks and eval.samples must be at least 1 and eval.every not negative, got "
                f"{self.tasks}, {self.samples} and {self.every}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Improve an agent: roll out tasks in groups, credit, update, sync, again.

    A recipe (`@file.toml`) gives settings, flags override it. `--algorithm NAME` chooses a preset
    (see `turngym algorithms`), `--algorithm.AXIS.FIELD` changes it.
    """

    env_id: str = "turngym/Calculator-v0"
    """Environment; also the first positional argument."""

    mix: dict[str, float] = field(default_factory=dict)
    """Further environments that train beside `env_id`, each with the share of the groups it gets
    for every one of `env_id`'s. Arguments follow the id: `turngym/Lookup-v0?max_hops=3`."""

    run: Path = Path("runs/train")
    """Run folder: configuration, metrics, trajectories, checkpoints, the trained model."""

    resume: bool = False
    """Go on from the newest checkpoint of the run folder, with the same settings."""

    seed: int = 0
    steps: int = 30
    """Rollout batches; each is `optim.minibatches` * `optim.epochs` optimizer steps."""

    prompts: int = 16
    """Tasks of a rollout batch, each rolled out `rollout.group_size` times."""

    temperature: float = 1.0
    """At which the policy samples while it trains."""

    staleness: int = 0
    """Rollout batches that may be trained on between the weights that begin a trajectory and the
    batch it trains in: 0 = sample, train, sample; 1 = one step off, the next batch is sampled while
    this one trains; more = asynchronous within that bound."""

    stages: Stages = field(default_factory=Stages)
    curriculum: int = 1
    """Tasks looked at for each one taken: of those, tasks solved half of the time so far are the
    likeliest. 1 = every task in turn."""

    topk: int = 8
    """Most likely tokens the sampler records with each one, for algorithms that compare them."""

    experience: Path | None = None
    """Run folder whose stored successes may be replayed from the start (RLEP)."""

    deterministic: bool = False
    """Bit-equal runs and resumes (float32 on a CPU, one thread)."""

    threads: int | None = None
    """Threads of a matrix product; tiny models run fastest with 1. None = torch's choice."""

    dialect: str | None = None
    """How the model writes tool calls; None = told from its chat template."""

    on_rewrite: Literal["error", "append", "segments"] = "error"
    """What to do with a chat template that rewrites history (drops earlier reasoning)."""

    trackers: tuple[str, ...] = ()
    """Besides the run folder: tensorboard, wandb, trackio."""

    save_every: int = 10
    """Rollout batches between checkpoints; 0 = only at the end."""

    keep_checkpoints: int = 2
    store_trajectories: int = 1
    """Rollout batches between stored ones; 0 = none."""

    model: ModelConfig = field(default_factory=ModelConfig)
    algorithm: Algorithm = field(default_factory=lambda: preset("grpo"))
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    eval: EvalSchedule = field(default_factory=EvalSchedule)

    def __post_init__(self) -> None:
        for name in ("prompts", "keep_checkpoints", "curriculum", "topk"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        for name in self.trackers:
            if name not in TRACKERS:
                raise ConfigError(f"unknown tracker {name!r}{suggest(name, TRACKERS)}")
        for name in ("steps", "save_every", "store_trajectories", "staleness"):
            if (value := getattr(self, name)) < 0:
                raise ConfigError(f"{name} must not be negative, got {value}")
        if not 0 < self.temperature < float("inf"):
            raise ConfigError(
                f"temperature must be positive and finite while training, got {self.temperature}"
            )
        for start, _ in (*self.stages.max_tokens, *self.stages.max_context):
            self._rollout_at(start)  # refused now, not when the stage begins
        if self.deterministic and self.model.dtype != "float32":
            raise ConfigError(
                f"deterministic runs need model.dtype='float32', got {self.model.dtype!r}"
            )
        if self.staleness:
            self._check_ahead()
        for name, share in self.mix.items():
            if not 0 < share < float("inf"):
                raise ConfigError(f"mix: the share of {name} must be positive, got {share}")

    def _check_ahead(self) -> None:
        """Refuse what cannot hold while trajectories are sampled ahead of the trainer."""
        if self.deterministic:
            raise ConfigError(
                f"deterministic runs need staleness=0, got {self.staleness}: which weights sample "
                "a token then depends on the machine's speed"
            )
        if self.stages.temperature:
            raise ConfigError(
                f"stages.temperature needs staleness=0, got {self.staleness}: a batch is trained "
                "at one temperature, trajectories sampled ahead would have the one before"
            )

    @property
    def engine_dtype(self) -> str:
        """Of the weights that sample."""
        return self.model.dtype if self.engine.dtype == "auto" else self.engine.dtype

    def at(self, batch: int) -> "TrainConfig":
        """Return the settings in force for a rollout batch (from 0), see `Stages`."""
        temperature = _staged(self.temperature, self.stages.temperature, batch)
        return replace(self, temperature=temperature, rollout=self._rollout_at(batch))

    def _rollout_at(self, batch: int) -> RolloutConfig:
        return replace(
            self.rollout,
            max_tokens=_staged(self.rollout.max_tokens, self.stages.max_tokens, batch),
            max_context=_staged(self.rollout.max_context, self.stages.max_context, batch),
        )

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens of one completion in the whole run."""
        return max([self.rollout.most_tokens, *(value for _, value in self.stages.max_tokens)])

    @property
    def most_context(self) -> int | None:
        """Largest context of the whole run; None = what the policy allows."""
        stages = [value for _, value in self.stages.max_context]
        own = self.rollout.max_context
        if own is None:
            return None if not stages or self.stages.max_context[0][0] > 0 else max(stages)
        return max([own, *stages])


def _staged(value: T, stages: Sequence[tuple[int, T]], batch: int) -> T:
    return next((later for start, later in reversed(stages) if batch >= start), value)
