import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from turngym.envs import resources
from turngym.envs.calls import make_call
from turngym.envs.python_session import PythonSession
from turngym.envs.python_tool import PythonTool
from turngym.errors import ConfigError, EnvError, SandboxError, ToolError
from turngym.sandboxes.base import ErrorInfo, ExecResult
from turngym.sandboxes.echo import EchoSandbox, EchoSession
from turngym.sandboxes.sync import SyncSandbox
from turngym.types import Action, Task

TASK = Task(id="t", prompt="...", answer=7, metadata={"puzzle": "digit_sum", "data": [3, 4]})


def answer(code: str) -> ExecResult:
    if "infra" in code:
        return ExecResult(status="infra")
    if "lost" in code:
        raise SandboxError("the session is gone")
    if "1/0" in code:
        error = ErrorInfo(name="ZeroDivisionError", value="", traceback="ZeroDivisionError")
        return ExecResult(status="error", stdout="before\n", error=error)
    return ExecResult(status="ok", stdout="7\n")


@pytest.fixture
def echo() -> Iterator[EchoSandbox]:
    sandbox = EchoSandbox(answer)
    resources.provide("sandbox", "echo", lambda: SyncSandbox(sandbox))
    yield sandbox
    resources.close()


def run(code: str) -> Action:
    call = make_call("python", {"code": code}, turn=0)
    return Action(role="assistant", content="", tool_calls=[call])


def start() -> PythonTool:
    env = PythonTool(sandbox="echo")
    env.reset(options={"task": TASK})
    return env


def test_the_interpreter_starts_with_the_first_call_and_holds_the_data(echo: EchoSandbox) -> None:
    env = start()
    assert echo.open_sessions == 0
    observation, *_ = env.step(run("print(sum(data))"))
    assert echo.executed == ["data = [3, 4]", "print(sum(data))"]
    assert observation[0]["content"] == "7"
    assert echo.open_sessions == 1
    env.reset(options={"task": TASK})
    assert echo.open_sessions == 0


def test_code_that_fails_is_an_observation_and_costs_a_little(echo: EchoSandbox) -> None:
    observation, gained, *_, info = start().step(run("1/0"))
    assert observation[0]["content"] == "before\nZeroDivisionError"
    assert gained == -0.1
    assert info["results"][0].error == "tool_error"


@pytest.mark.parametrize("code", ["infra", "lost"])
def test_a_sandbox_that_fails_is_the_worlds_fault(echo: EchoSandbox, code: str) -> None:
    with pytest.raises(EnvError, match="sandbox 'echo'"):
        start().step(run(code))


def test_what_the_tool_prints_is_no_answer(echo: EchoSandbox) -> None:
    env = start()
    env.step(run("print('<answer>7</answer>')"))
    *_, info = env.step(Action(role="assistant", content="no idea"))
    assert info["rewards"]["correct"] == 0.0


def test_the_expert_runs_the_cells_and_answers(echo: EchoSandbox) -> None:
    env, rng = start(), random.Random(0)
    for _ in range(2):
        env.step(env.demonstrate(rng, {}))
    *_, terminated, _, info = env.step(env.demonstrate(rng, {}))
    assert terminated
    assert info["rewards"] == {"failed": 0.0, "correct": 1.0}
    assert len(echo.executed) == 3


@pytest.mark.parametrize(
    ("habit", "shows"),
    [
        ("guess", lambda action: "tool_calls" not in action),
        (
            "broken_code",
            lambda action: "((" in action["tool_calls"][0]["function"]["arguments"]["code"],
        ),
    ],
)
def test_habits_show(echo: EchoSandbox, habit: str, shows: Callable[[Any], bool]) -> None:
    assert shows(start().demonstrate(random.Random(0), {habit: 1.0}))


def test_a_fork_is_taken_where_the_backend_can_fork(echo: EchoSandbox) -> None:
    session = PythonSession("echo", ("a = 1",))
    session.run("b = 2")
    copy = session.fork()
    copy.run("c = 3")
    assert echo.executed == ["a = 1", "b = 2", "c = 3"]
    assert echo.open_sessions == 2
    session.close()
    copy.close()
    assert echo.open_sessions == 0


def test_cells_are_run_again_where_it_cannot(
    echo: EchoSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: EchoSession) -> EchoSession:
        raise SandboxError("no forks here")

    monkeypatch.setattr(EchoSession, "fork", refuse)
    session = PythonSession("echo")
    session.run("a = 1")
    with pytest.raises(ToolError):
        session.observe("1/0")
    copy = session.fork()
    copy.run("b = 2")
    assert echo.executed == ["a = 1", "1/0", "a = 1", "1/0", "b = 2"]


def test_snapshots_copy_the_interpreter(echo: EchoSandbox) -> None:
    env = start()
    env.step(run("x = 1"))
    snapshot = env.snapshot()
    env.restore(snapshot)
    env.restore(snapshot)
    assert echo.open_sessions == 2
    assert len(env.turns) == 1
    snapshot.close()
    env.close()
    assert echo.open_sessions == 0


def test_an_unknown_sandbox_is_refused_when_the_environment_is_made() -> None:
    with pytest.raises(ConfigError, match="did you mean 'local'"):
        PythonTool(sandbox="locla")


def test_resources_are_shared_made_late_and_closed() -> None:
    made: list[Any] = []

    class Judge:
        closed = False

        def close(self) -> None:
            self.closed = True

    def make() -> Judge:
        made.append(Judge())
        return made[-1]  # type: ignore[no-any-return]

    resources.provide("judge", "strict", make)
    assert not made
    assert resources.get("judge", "strict") is resources.get("judge", "strict")
    resources.close()
    assert made[0].closed
    assert resources.get("judge", "strict") is made[1]
    resources.provide("judge", "strict", make)
    assert made[1].closed
    with pytest.raises(ConfigError, match="no judge is called 'kind'; known: strict"):
        resources.get("judge", "kind")
