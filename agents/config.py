"""Settings of the rollout side. Free of torch: the command line reads them for `--help`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from turngym.errors import ConfigError

__all__ = ["EngineConfig", "RolloutConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What samples tokens."""

    kind: Literal["hf", "vllm"] = "hf"
    """`hf` = the in-process sampler, no extra install; `vllm` needs vLLM or servers of it."""

    isolated: bool = False
    """vllm: in a child process, which dies with this one, instead of in this process."""

    urls: tuple[str, ...] = ()
    """vllm: running servers to sample from instead, such as http://localhost:8000."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """vllm: of the engine's weights; `auto` = the trainer's. With servers it says what they have,
    and so how closely their log-probabilities must agree with the trainer's."""

    folder: Path | None = None
    """vllm servers: where weights and adapters are handed over, seen by the servers under the same
    path; None = shared memory, for servers on this machine."""

    transfer: Literal["file", "nccl", "ipc"] = "file"
    """vllm servers: how full weights get there. `file` works everywhere; `nccl` (between GPUs) and
    `ipc` (on one GPU) take vLLM's own weight transfer, which the server must be started for."""

    kv_gib: float = 1.0
    """vllm on a CPU: memory for keys and values, GiB."""

    gpu_memory: float = 0.5
    """vllm on a GPU: fraction of its memory the engine may take."""

    timeout_s: float = 120.0
    """Seconds that starting, a weight update or another control call may take."""

    def __post_init__(self) -> None:
        chosen = [name for name in ("isolated", "urls", "folder") if getattr(self, name)]
        if self.kind == "hf" and (chosen or self.dtype != "auto" or self.transfer != "file"):
            raise ConfigError(
                "engine.isolated, engine.urls, engine.dtype, engine.folder and engine.transfer are "
                "settings of vLLM; add engine.kind='vllm'"
            )
        if self.isolated and self.urls:
            raise ConfigError("engine.isolated starts an engine, engine.urls names running ones")
        for name in ("kv_gib", "gpu_memory", "timeout_s"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ConfigError(f"engine.{name} must be positive and finite, got {value}")
        if self.gpu_memory > 1:
            raise ConfigError(f"engine.gpu_memory is a fraction of 1, got {self.gpu_memory}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How episodes are rolled out."""

    group_size: int = 8
    """Trajectories a task (G)."""

    concurrency: int = 64
    """Trajectories in flight at once."""

    max_tokens: int = 512
    """Most tokens of one completion (a turn); a completion cut off there ends the episode."""

    think_tokens: int | None = None
    """Tokens after which a turn that is still thinking is interrupted: `interrupt_text` is put in
    its mouth (it never trains) and at most `answer_tokens` follow (ScaleRL, arXiv:2510.13786);
    None = it may think until `max_tokens`."""

    interrupt_text: str = "\nTime is up, so I answer with what I have.\n</think>"
    """Closes the reasoning block."""

    answer_tokens: int = 256
    """Most tokens after an interruption."""

    max_context: int | None = None
    """Most tokens of a context, completion included; None = what the policy allows."""

    deadline_s: float | None = 600.0
    """Seconds an episode may take before it is ended and scored as it stands; None = no limit.
    Deterministic runs have none: a deadline makes the result depend on the machine's load."""

    env_timeout_s: float = 120.0
    """Seconds one call of the environment may run; past them its thread is abandoned and the
    episode is an `env_error`. Tools have their own, shorter deadlines."""

    retries: int = 1
    """Times an episode that failed for the world's fault is played again, in a fresh environment
    with the same seed, before its group is dropped."""

    failure_rate: float = 0.5
    """The run stops when more than this fraction of the last 32 attempts failed for the world's
    fault (judged from the eighth on); 1 = never."""

    threads: int | None = None
    """Threads for environment code; None = one for every trajectory in flight."""

    lag_s: float = 1.0
    """Seconds the event loop may be blocked before a warning names the blocker."""

    deterministic: bool = False
    """Bit-equal trajectories whatever the concurrency, given a deterministic policy."""

    def __post_init__(self) -> None:
        for name in (
            "group_size",
            "concurrency",
            "max_tokens",
            "max_context",
            "threads",
            "think_tokens",
            "answer_tokens",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.think_tokens is not None and self.think_tokens >= self.max_tokens:
            raise ConfigError(
                f"think_tokens must be less than max_tokens={self.max_tokens} to leave room for an "
                f"answer, got {self.think_tokens}"
            )
        for name in ("deadline_s", "env_timeout_s", "lag_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name} must be positive and finite, got {value}")
        if self.retries < 0:
            raise ConfigError(f"retries must not be negative, got {self.retries}")
        if not 0 <= self.failure_rate <= 1:
            raise ConfigError(f"failure_rate must lie in [0, 1], got {self.failure_rate}")

    @property
    def most_tokens(self) -> int:
        """Most sampled tokens of one turn, interrupted or not."""
        return max(self.max_tokens, (self.think_tokens or -self.answer_tokens) + self.answer_tokens)

    @property
    def episode_deadline_s(self) -> float | None:
        """The deadline in force: none in deterministic runs."""
        return None if self.deterministic else self.deadline_s
