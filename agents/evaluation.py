"""Evaluation: play tasks, keep every episode, report with confidence intervals."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from turngym.agents.episode import Seat
from turngym.agents.rollout import RolloutEngine
from turngym.agents.source import Tasks
from turngym.agents.store import TrajectoryStore
from turngym.agents.summary import Report, record, success_rule, summarize
from turngym.envs.wrappers import plain
from turngym.errors import CheckpointError, ConfigError
from turngym.types import Task, Trajectory, is_world_fault

__all__ = ["evaluate"]


def evaluate(
    engine: RolloutEngine,
    *,
    num_tasks: int | None = None,
    samples_per_task: int = 1,
    out: Path | str | None = None,
    resume: bool = False,
    success: str | Sequence[str] | None = None,
    policy: Mapping[str, Any] | None = None,
) -> Report:
    """Play the first tasks of the engine's source and summarise the episodes.

    With a folder, each episode is stored as it ends (`trajectories/`), `evaluation.json` says what
    was played and `report.json` holds the numbers. An interrupted evaluation is resumed with the
    same arguments; episodes that failed for the world's fault are played again. Draws are seeded
    by task and sample, so the numbers are those of one run; more tasks or samples may be asked.

    Args:
        engine: plays the episodes; its group size is not used.
        num_tasks: how many tasks; None = all of the split.
        samples_per_task: episodes a task, for pass@k and pass^k.
        out: folder; None keeps nothing.
        resume: go on in a folder that already holds episodes.
        success: what counts as success, see `success_rule`.
        policy: JSON-able facts that tell the policy from others, such as its name and sampling;
            an evaluation is only resumed with the same.

    Raises:
        ConfigError: a number out of range, an unknown component, or a folder that holds another
            evaluation: of another policy, other tasks or another environment.
        CircuitBreakerError: too many episodes failed for the world's fault; resume when mended.
        CheckpointError: the folder cannot be written.
    """
    specs = engine.source.reward_specs
    rule = success_rule(specs, success)
    available = len(engine.source.task_set)
    num_tasks = available if num_tasks is None else num_tasks
    if not 1 <= num_tasks <= available:
        raise ConfigError(f"num_tasks must lie in 1..{available} (the split), got {num_tasks}")
    if samples_per_task < 1:
        raise ConfigError(f"samples_per_task must be at least 1, got {samples_per_task}")
    facts = _facts(engine) | {"policy": policy, "success": rule}
    store, records = _open(out, facts, engine.source.task_set, num_tasks, resume=resume)
    done = {(one["task_id"], one["sample"]) for one in records if not is_world_fault(one["status"])}
    seats = (
        engine.seat(ordinal, sample)
        for ordinal in range(num_tasks)
        for sample in range(samples_per_task)
    )
    todo = [seat for seat in seats if (seat.task.id, seat.sample) not in done]

    def keep(_: Seat, trajectory: Trajectory) -> None:
        if store is not None:
            store.append([trajectory])
        records.append(record(trajectory))

    engine.wait(engine.play(todo, keep, total=len(todo)))
    report = summarize(records, specs, success=list(rule))
    if out is not None:
        _write(Path(out) / "report.json", report.to_json())
    return report


def _facts(engine: RolloutEngine) -> dict[str, Any]:
    """Return what tells an evaluation from others, besides policy, rule and tasks."""
    source = engine.source
    return {
        "env_id": source.env_id,
        "kwargs": source.kwargs,
        "seed": engine.seed,
        "specs": {name: spec.weight for name, spec in source.reward_specs.items()},
    }


def _open(
    out: Path | str | None,
    facts: Mapping[str, Any],
    task_set: Tasks,
    num_tasks: int,
    *,
    resume: bool,
) -> tuple[TrajectoryStore | None, list[dict[str, Any]]]:
    """Return where episodes go and what is there already."""
    if out is None:
        return None, []
    folder = Path(out)
    store = TrajectoryStore(folder / "trajectories")
    records = store.rows()
    if records and not resume:
        raise ConfigError(f"{folder} already holds an evaluation: resume it or choose another")
    path = folder / "evaluation.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    prints = found.pop("tasks", {})
    asked = json.loads(json.dumps(facts, default=str))
    if found:
        _require_same(folder, found, asked)
    prints = _check_tasks(folder, prints, task_set, num_tasks)
    _write(path, asked | {"tasks": prints})
    return store, records


def _require_same(folder: Path, found: Any, asked: Any) -> None:
    for name, was, now in _differences(found, asked):
        raise ConfigError(
            f"{folder} holds another evaluation: its {name} is {was!r}, not {now!r}; choose "
            "another folder"
        )


def _differences(found: Any, asked: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted name, found, asked) of whatever differs between two JSON values."""
    if not (isinstance(found, dict) and isinstance(asked, dict)):
        if found != asked:
            yield name, found, asked
        return
    for key in asked | found:
        yield from _differences(
            found.get(key), asked.get(key), f"{name}.{key}" if name else str(key)
        )


def _check_tasks(
    folder: Path, prints: Mapping[str, str], task_set: Tasks, num_tasks: int
) -> dict[str, str]:
    """Return the fingerprints of the first tasks, by id; those there were must be among them."""
    count = min(max(num_tasks, len(prints)), len(task_set))
    now = {task.id: _fingerprint(task) for task in map(task_set.__getitem__, range(count))}
    if changed := [name for name, seen in prints.items() if now.get(name) != seen]:
        raise ConfigError(
            f"{folder} holds another evaluation: the task {changed[0]!r} has changed or is gone "
            f"({len(changed)} of {len(prints)} are); choose another folder"
        )
    return now


def _fingerprint(task: Task) -> str:
    content = json.dumps([task.prompt, task.answer, dict(task.metadata)], default=plain)
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def _write(path: Path, content: dict[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error
