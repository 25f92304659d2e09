"""A bare Gymnasium environment that does what its test says, and sources that make it."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gymnasium
import pytest

from turngym.agents.source import EnvSource
from turngym.errors import EnvError, RewardError
from turngym.rewards.base import ToolResult
from turngym.types import Action, Message, Observation, RewardSpec, Status, Task

ID = "test/Relay-v0"


class RelayTasks:
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, ordinal: int) -> Task:
        return Task(id=f"task-{ordinal}", prompt=f"count to {ordinal}", answer=ordinal)


class RelayEnv(gymnasium.Env[Observation, Action]):
    """Answers each tool call with `ok N`; words end the episode, `yes` is the right answer.

    `faults` names what goes wrong in which step: `{turn: "raise" | "reward" | "hang" | ...}`.
    """

    live = 0
    lock = threading.Lock()

    def __init__(
        self,
        *,
        num_tasks: int = 1000,
        max_turns: int = 8,
        delay_s: float = 0.0,
        faults: Mapping[int, str] | None = None,
        fault_tasks: tuple[str, ...] | None = None,
        self_ending: bool = True,
        log: list[Any] | None = None,
        hook: Callable[["RelayEnv", str], None] | None = None,
    ) -> None:
        self.task_set = RelayTasks(num_tasks)
        self.max_turns = max_turns
        self.delay_s = delay_s
        self.faults = faults or {}
        self.fault_tasks = fault_tasks
        self.self_ending = self_ending
        self.log: list[Any] = log if log is not None else []
        self.hook = hook
        self.has_expert = True
        self.reward_specs = {
            "valid": RewardSpec(name="valid", weight=0.5, level="turn", low=0.0, high=1.0),
            "correct": RewardSpec(name="correct", level="outcome", low=0.0, high=1.0),
        }
        self.turn = 0
        self.answer: str | None = None
        with RelayEnv.lock:
            RelayEnv.live += 1

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self.task: Task = (options or {})["task"]
        self.turn, self.answer = 0, None
        self.log.append(("reset", self.task.id, seed))
        self._fail(-1)
        noise = int(self.np_random.integers(1000))
        prompt = Message(role="user", content=f"{self.task.prompt} {noise}")
        tools = [{"type": "function", "function": {"name": "count", "parameters": {}}}]
        return (prompt,), {"task_id": self.task.id, "tools": tools}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if self.hook is not None:
            self.hook(self, action["content"])
        time.sleep(self.delay_s)
        self._fail(self.turn)
        self.turn += 1
        calls = action.get("tool_calls", [])
        results = tuple(
            ToolResult(name=call["function"]["name"], arguments={}, value=self.turn, text="ok")
            for call in calls
        )
        info: dict[str, Any] = {"rewards": {"valid": float(bool(calls))}, "results": results}
        if not calls:
            self.answer = action["content"]
            info["rewards"] |= self.finish("completed")
            info["stop_reason"] = "completed"
            return (), 0.0, True, False, info
        observation = tuple(
            Message(role="tool", content=f"ok {self.turn}", tool_call_id=call["id"])
            for call in calls
        )
        if self.turn >= self.max_turns and self.self_ending:
            info["rewards"] |= self.finish("max_turns")
            info["stop_reason"] = "max_turns"
            return observation, 0.0, False, True, info
        return observation, 0.0, False, self.turn >= self.max_turns, info

    def finish(self, reason: Status) -> dict[str, float | None]:
        self.log.append(("finish", self.task.id, reason))
        if self.faults.get(99) and self._is_faulty():
            raise RewardError("reward 'correct' raised ValueError: no verdict")
        return {"correct": float(self.answer == "yes")}

    def demonstrate(self, rng: Any, habits: Mapping[str, float]) -> Action:
        if self.turn < 2:
            function = {"name": "count", "arguments": {"n": self.turn}}
            call = {"id": f"call_{self.turn}", "type": "function", "function": function}
            return Message(role="assistant", content="hm", tool_calls=[call])  # type: ignore[list-item]
        return Message(
            role="assistant", content="no" if rng.random() < habits.get("guess", 0) else "yes"
        )

    def close(self) -> None:
        with RelayEnv.lock:
            RelayEnv.live -= 1

    def _is_faulty(self) -> bool:
        return self.fault_tasks is None or self.task.id in self.fault_tasks

    def _fail(self, turn: int) -> None:
        fault = self.faults.get(turn)
        if fault is None or not self._is_faulty():
            return
        if fault == "hang":
            time.sleep(1.5)
        elif fault == "env":
            raise EnvError("the disk is gone")
        elif fault == "reward":
            raise RewardError("reward 'valid' raised ZeroDivisionError")
        elif fault == "exit":
            raise SystemExit(3)
        elif fault == "stop":
            raise StopIteration
        else:
            raise KeyError(fault)


@pytest.fixture(scope="session", autouse=True)
def _registered() -> None:
    if ID not in gymnasium.registry:
        gymnasium.register(ID, RelayEnv)  # type: ignore[arg-type]


@pytest.fixture
def relay() -> Iterator[Callable[..., EnvSource]]:
    """Makes sources of relay environments; afterwards none may be open."""
    before = RelayEnv.live
    yield lambda **kwargs: EnvSource(ID, kwargs)
    deadline = time.monotonic() + 3
    while RelayEnv.live > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert RelayEnv.live == before, "an environment was left open"
