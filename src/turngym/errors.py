"""The error tree: every failure turngym raises on purpose is a `TurngymError`.

    TurngymError
    ├── ConfigError (ValueError)            a setting, recipe or combination is wrong
    │   └── TemplateError                   a chat template cannot be used for training
    ├── DataError (ValueError)              a task file or record is wrong; names file and line
    ├── MissingDependencyError (ImportError)  an optional package is absent; names the extra
    ├── EnvError (RuntimeError)             an environment broke (never the model's fault)
    │   ├── EnvNotFoundError (LookupError)  no environment has this id
    │   └── ResetNeededError                step() after the end of the episode
    ├── ToolError (Exception)               raised inside a tool: its text is shown to the model
    ├── RewardError (RuntimeError)          a reward function raised or returned nonsense
    ├── TrajectoryError (ValueError)        a record would break an invariant
    ├── EngineError (RuntimeError)          sampling failed
    │   ├── EngineTimeoutError (TimeoutError)
    │   ├── WeightSyncError                 the engine's weights are not the trainer's
    │   └── CircuitBreakerError             too many failures in a row: the run stops
    ├── CheckpointError (RuntimeError)      a checkpoint cannot be written or read
    └── SandboxError (RuntimeError)
        ├── SandboxUnavailableError         backend missing, or isolation asked for not to be had
        ├── SandboxCreateError              a session could not be started
        ├── SessionClosedError              the session was closed by its owner
        └── SessionLostError                the session died underneath its owner

Each class also inherits the standard error it stands for, so that callers who know nothing of
turngym still catch it. Messages name the value, the rule and the fix.
"""

__all__ = [
    "CheckpointError",
    "CircuitBreakerError",
    "ConfigError",
    "DataError",
    "EngineError",
    "EngineTimeoutError",
    "EnvError",
    "EnvNotFoundError",
    "MissingDependencyError",
    "ResetNeededError",
    "RewardError",
    "SandboxCreateError",
    "SandboxError",
    "SandboxUnavailableError",
    "SessionClosedError",
    "SessionLostError",
    "TemplateError",
    "ToolError",
    "TrajectoryError",
    "TurngymError",
    "WeightSyncError",
]


class TurngymError(Exception):
    """Base of every error raised on purpose by turngym."""


class ConfigError(TurngymError, ValueError):
    """A setting, a recipe or a combination of settings is wrong."""


class TemplateError(ConfigError):
    """A chat template cannot be used: it raises, or it rewrites what the model said."""


class DataError(TurngymError, ValueError):
    """A task file or a stored record is wrong; the message names the file and the line."""


class MissingDependencyError(TurngymError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""


class EnvError(TurngymError, RuntimeError):
    """An environment failed: the world's fault, never the model's."""


class EnvNotFoundError(EnvError, LookupError):
    """No environment is registered under the id."""


class ResetNeededError(EnvError):
    """`step` was called before `reset` or after the end of the episode."""


class ToolError(TurngymError):
    """Raised inside a tool to tell the model what it did wrong; the tool result is its text."""


class RewardError(TurngymError, RuntimeError):
    """A reward function raised, or returned something that is not a finite number or None."""


class TrajectoryError(TurngymError, ValueError):
    """A trajectory or group would break an invariant of the token record."""


class EngineError(TurngymError, RuntimeError):
    """The sampling engine failed."""


class EngineTimeoutError(EngineError, TimeoutError):
    """The sampling engine did not answer before its deadline."""


class WeightSyncError(EngineError):
    """The engine's weights are not the trainer's; the message holds both numbers."""


class CircuitBreakerError(EngineError):
    """Too many rollouts failed for the world's fault: the run stops, rather than train on noise."""


class CheckpointError(TurngymError, RuntimeError):
    """A checkpoint cannot be written, read, or does not belong to this run."""


class SandboxError(TurngymError, RuntimeError):
    """Base of what a sandbox raises; errors of the code it runs are values, not exceptions."""


class SandboxUnavailableError(SandboxError):
    """The backend is missing, or the isolation that was demanded cannot be had here."""


class SandboxCreateError(SandboxError):
    """A session could not be started."""


class SessionClosedError(SandboxError):
    """The session was used after its owner closed it."""


class SessionLostError(SandboxError):
    """The session died underneath its owner (engine, network or host)."""
