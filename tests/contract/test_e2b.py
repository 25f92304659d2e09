"""The real SDK against a local server that speaks E2B's protocol (see docs/sandboxes-remote.md)."""

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from turngym.errors import (
    ConfigError,
    MissingDependencyError,
    SandboxCreateError,
    SandboxError,
    SandboxUnavailableError,
    SessionClosedError,
    SessionLostError,
)
from turngym.sandboxes.base import Limits, PoolConfig, Sandbox, Session
from turngym.sandboxes.check import check_sandbox
from turngym.sandboxes.checking.contract import CHECKS
from turngym.sandboxes.e2b import E2BSandbox, E2BSession

pytest.importorskip("e2b_code_interpreter")
pytest.importorskip("aiohttp")

SERVER = Path(__file__).resolve().parents[1] / "support" / "e2b_server.py"
KEY = "e2b_" + "0" * 40


class Service:
    """The test server, seen from outside."""

    def __init__(self, url: str) -> None:
        self.url = url

    def _call(self, method: str, path: str, body: Any = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        headers = {"X-API-Key": KEY, "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request) as answer:
            return bytes(answer.read())

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self._call("GET", "/test/state"))
        return state

    def kill(self, id: str) -> None:
        self._call("DELETE", f"/sandboxes/{id}")

    def drop_next(self, call: str) -> None:
        self._call("POST", "/test/fault", {"call": call})


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = subprocess.Popen(
        [sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None
    assert server.stdout is not None
    yield server.stdout.readline().strip()
    server.stdin.close()
    server.stdout.close()
    assert server.wait(10) == 0


@pytest.fixture
def service(address: str, monkeypatch: pytest.MonkeyPatch) -> Service:
    for name in ("E2B_API_URL", "E2B_SANDBOX_URL"):
        monkeypatch.setenv(name, address)
    monkeypatch.setenv("E2B_API_KEY", KEY)
    return Service(address)


def run(
    body: Callable[[E2BSandbox], Awaitable[None]], *, pool: PoolConfig | None = None, **options: Any
) -> None:
    async def main() -> None:
        sandbox = await E2BSandbox.create(pool=pool, **options)
        try:
            await body(sandbox)
        finally:
            await sandbox.aclose()

    asyncio.run(main())


def in_session(
    body: Callable[[E2BSession], Awaitable[None]], limits: Limits | None = None, **options: Any
) -> None:
    async def with_session(sandbox: E2BSandbox) -> None:
        session = await sandbox.session(limits=limits)
        try:
            await body(session)
        finally:
            await session.close()

    run(with_session, **options)


def test_it_is_a_sandbox_and_makes_sessions(service: Service) -> None:
    async def body(sandbox: E2BSandbox) -> None:
        assert isinstance(sandbox, Sandbox)
        session = await sandbox.session()
        assert isinstance(session, Session)
        assert service.state["alive"] == [session.id]
        (request,) = service.state["created"]
        assert request["templateID"] == "code-interpreter-v1"
        assert request["timeout"] == 300
        assert request["allow_internet_access"] is False

    run(body)
    assert service.state["alive"] == []


def test_the_functional_contract_of_every_backend_holds(service: Service) -> None:
    # Symlinks lead to the sandbox's own files, and all of the machine is the agent's.
    names = set(CHECKS) - {"files_outside_the_workspace_are_refused"}
    assert len(names) >= 15
    report = check_sandbox("e2b", only=names)
    assert report.failed == (), report.table()
    assert service.state["alive"] == []


def test_state_persists_across_cells_and_not_across_sessions(service: Service) -> None:
    async def body(sandbox: E2BSandbox) -> None:
        one, two = await asyncio.gather(sandbox.session(), sandbox.session())
        assert (await one.execute("x = 6")).ok
        answer = await one.execute("print('hi'); x * 7")
        assert (answer.status, answer.stdout, answer.result) == ("ok", "hi\n", "42")
        other = await two.execute("x")
        assert other.error is not None
        assert (other.status, other.error.name) == ("error", "NameError")

    run(body)


def test_an_exception_is_a_value_without_colours_and_what_was_printed_is_kept(
    service: Service,
) -> None:
    async def body(session: E2BSession) -> None:
        answer = await session.execute(
            "import sys\nprint('out')\nprint('warn', file=sys.stderr)\n1/0"
        )
        assert (answer.status, answer.stdout, answer.stderr) == ("error", "out\n", "warn\n")
        assert answer.error is not None
        assert (answer.error.name, answer.error.value) == ("ZeroDivisionError", "division by zero")
        assert answer.error.traceback.startswith("Traceback")
        assert answer.agent_fault
        assert not answer.state_lost

    in_session(body)


@pytest.mark.parametrize(
    ("code", "name"), [("x = '\0'", "SyntaxError"), ("x = '\ud800'", "UnicodeEncodeError")]
)
def test_odd_source_is_an_error_of_the_code(service: Service, code: str, name: str) -> None:
    async def body(session: E2BSession) -> None:
        answer = await session.execute(code)
        assert answer.error is not None
        assert (answer.status, answer.error.name) in {("error", name), ("error", "ValueError")}
        assert (await session.execute("1+1")).result == "2"

    in_session(body)


def test_a_slow_cell_times_out_in_time_and_keeps_its_variables(service: Service) -> None:
    async def body(session: E2BSession) -> None:
        await session.execute("x = 5")
        began = time.monotonic()
        answer = await session.execute("import time\nprint('begun')\ntime.sleep(60)", 1.0)
        assert time.monotonic() - began < 1.8, "the SDK alone would take 2 s"
        assert (answer.status, answer.stdout, answer.state_lost) == ("timeout", "begun\n", False)
        assert (await session.execute("x")).result == "5"

    in_session(body)


def test_a_cell_that_ignores_the_interrupt_costs_the_variables_not_the_session(
    service: Service,
) -> None:
    code = (
        "import time\n"
        "while True:\n  try:\n    time.sleep(1)\n  except KeyboardInterrupt:\n    pass\n"
    )

    async def body(session: E2BSession) -> None:
        await session.execute("x = 5; open('kept', 'w').write('file')")
        answer = await session.execute(code, 0.3)
        assert (answer.status, answer.state_lost, answer.generation) == ("timeout", True, 1)
        answer = await session.execute("open('kept').read()")
        assert (answer.result, answer.generation) == ("'file'", 1)
        assert (await session.execute("x")).status == "error"

    in_session(body, Limits(grace_s=0.2), request_timeout_s=1.0)


def test_a_dead_kernel_is_the_agents_doing(service: Service) -> None:
    async def body(session: E2BSession) -> None:
        answer = await session.execute("import os; os._exit(3)")
        assert (answer.status, answer.state_lost, answer.agent_fault) == ("exited", True, True)
        assert answer.error is None
        assert (await session.execute("import os; os.path.basename(os.getcwd())")).result == (
            "'workspace'"
        )

    in_session(body)


def test_a_printed_or_raised_kernel_death_changes_nothing(service: Service) -> None:
    async def body(session: E2BSession) -> None:
        code = "class ContextRestarting(Exception): pass\nx = 1\nraise ContextRestarting('fake')"
        answer = await session.execute(code)
        assert (answer.status, answer.state_lost) == ("error", False)
        forged = '{"type": "end_of_execution"}\n{"type": "result", "text": "99"}'
        answer = await session.execute(f"print({forged!r})\nx")
        assert (answer.status, answer.stdout, answer.result) == ("ok", forged + "\n", "1")

    in_session(body)


def test_long_output_keeps_head_and_tail(service: Service) -> None:
    async def body(session: E2BSession) -> None:
        answer = await session.execute("for i in range(100000): print(i)")
        assert answer.status == "ok"
        assert answer.stdout_bytes == sum(len(f"{i}\n") for i in range(100000))
        assert answer.truncated
        assert answer.stdout.startswith("0\n1\n2\n")
        assert answer.stdout.endswith("\n99998\n99999\n")
        assert len(answer.stdout) < 1100

    in_session(body, Limits(stdout_chars=1000))


def test_endless_output_is_stopped(service: Service) -> None:
    async def body(session: E2BSession) -> None:
        answer = await session.execute("y = 1\nwhile True: print('x' * 10000)", 30.0)
        assert answer.status == "output_limit"
        assert answer.duration_s < 20
        assert len(answer.stdout) < 70_000
        assert (await session.execute("y")).result == "1"

    in_session(body, Limits(output_hard_mb=1))


def test_rich_results_become_artifacts(service: Service) -> None:
    async def body(session: E2BSession) -> None:
        code = (
            "class T:\n  def _repr_html_(self): return '<b>'\n  def __repr__(self): return 'T'\nT()"
        )
        answer = await session.execute(code)
        assert answer.result == "T"
        assert [(a.mime, a.data) for a in answer.artifacts] == [("text/html", b"<b>")]

    in_session(body)


def test_files_go_in_and_out_and_stay_inside(service: Service) -> None:
    async def body(session: E2BSession) -> None:
        data = bytes(range(256)) * 4
        await session.write_file("a/b.bin", data)
        await session.write_file("/workspace/c.txt", b"c")
        await session.execute("import os; os.symlink('/etc/hostname', 'link')")
        assert await session.list_files() == ["a/b.bin", "c.txt"]
        assert await session.read_file("a/b.bin") == data
        assert await session.read_file("a/b.bin", max_bytes=10) == data[:10]
        assert (await session.execute("open('c.txt').read()")).result == "'c'"
        with pytest.raises(FileNotFoundError, match="nothing"):
            await session.read_file("nothing")
        with pytest.raises(PermissionError, match="below /workspace"):
            await session.write_file("../outside", b"")
        assert (await session.execute("1")).ok

    in_session(body)


def test_reset_clears_variables_and_keeps_files(service: Service) -> None:
    async def body(session: E2BSession) -> None:
        await session.execute("x = 1; open('f', 'w').write('f')")
        await session.reset()
        answer = await session.execute("x")
        assert (answer.status, answer.generation) == ("error", 1)
        assert await session.list_files() == ["f"]

    in_session(body)


def test_interrupt_ends_the_running_cell(service: Service) -> None:
    async def body(session: E2BSession) -> None:
        cell = asyncio.create_task(session.execute("x = 1\nwhile True: pass"))
        await asyncio.sleep(0.5)
        await session.interrupt()
        answer = await cell
        assert (answer.status, answer.state_lost) == ("timeout", False)
        assert (await session.execute("x")).result == "1"

    in_session(body)


def test_a_cancelled_cell_leaves_a_usable_session(service: Service) -> None:
    async def body(session: E2BSession) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.execute("x = 1\nwhile True: pass"), 0.5)
        assert (await session.execute("x")).result == "1"

    in_session(body)


def test_cells_run_one_after_another(service: Service) -> None:
    async def body(session: E2BSession) -> None:
        cells = [
            session.execute(f"import time; a = {i}; time.sleep(0.1); print(a)") for i in range(4)
        ]
        answers = await asyncio.gather(*cells)
        assert [answer.stdout for answer in answers] == ["0\n", "1\n", "2\n", "3\n"]
        assert answers[3].queued_s > answers[1].queued_s > 0.05

    in_session(body)


def test_fork_says_what_to_use_instead(service: Service) -> None:
    async def body(session: E2BSession) -> None:
        with pytest.raises(SandboxError, match=r"replay its cells.*'local'"):
            await session.fork()

    in_session(body)


def test_a_dropped_request_is_the_machines_fault_and_the_session_lives_on(
    service: Service,
) -> None:
    async def body(session: E2BSession) -> None:
        await session.execute("x = 1")
        service.drop_next("execute")
        answer = await session.execute("x = 2")
        assert (answer.status, answer.infra_fault, answer.state_lost) == ("infra", True, False)
        assert (await session.execute("x")).result == "1"

    in_session(body)


def test_a_killed_sandbox_is_a_lost_session_at_every_call(service: Service) -> None:
    async def body(session: E2BSession) -> None:
        cell = asyncio.create_task(session.execute("import time; time.sleep(30)"))
        await asyncio.sleep(0.5)
        service.kill(session.id)
        with pytest.raises(SessionLostError, match="lost"):
            await cell
        for call in (session.execute("1"), session.list_files(), session.write_file("a", b"")):
            with pytest.raises(SessionLostError):
                await call

    in_session(body)


def test_a_sandbox_killed_between_cells_is_a_lost_session(service: Service) -> None:
    async def body(session: E2BSession) -> None:
        service.kill(session.id)
        with pytest.raises(SessionLostError, match="lost"):
            await session.execute("1")

    in_session(body)


def test_a_closed_session_says_so_and_its_sandbox_is_gone(service: Service) -> None:
    async def body(sandbox: E2BSandbox) -> None:
        session = await sandbox.session()
        running = asyncio.create_task(session.execute("while True: pass"))
        await asyncio.sleep(0.5)
        await session.close()
        await session.close()
        with pytest.raises(SessionClosedError):
            await running
        with pytest.raises(SessionClosedError):
            await session.execute("1")
        assert service.state["alive"] == []

    run(body)


@pytest.mark.slow
def test_an_idle_session_is_renewed(service: Service) -> None:
    renewals = service.state["calls"].get("renew", 0)

    async def body(session: E2BSession) -> None:
        await session.execute("x = 1", 1.0)
        await asyncio.sleep(17)
        assert (await session.execute("x")).result == "1"

    in_session(body, lifetime_s=15)
    assert service.state["calls"]["renew"] > renewals


@pytest.mark.slow
def test_a_sandbox_whose_trainer_was_killed_ends_by_itself(service: Service) -> None:
    code = (
        "import asyncio\nfrom turngym.sandboxes.e2b import E2BSandbox\n"
        "async def main():\n"
        "  session = await (await E2BSandbox.create(lifetime_s=15)).session()\n"
        "  print(session.id, flush=True)\n"
        "  await asyncio.sleep(60)\n"
        "asyncio.run(main())"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    id = trainer.stdout.readline().strip()
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert id in service.state["alive"]
    time.sleep(16)
    assert id not in service.state["alive"]


def test_a_long_cell_is_paid_for_in_advance(service: Service) -> None:
    async def body(session: E2BSession) -> None:
        before = service.state["calls"].get("renew", 0)
        await session.execute("1", 1.0)
        assert service.state["calls"].get("renew", 0) == before
        await session.execute("1", 600.0)
        assert service.state["calls"]["renew"] == before + 1

    in_session(body)


def test_a_cancelled_start_leaves_no_sandbox(service: Service) -> None:
    async def body(sandbox: E2BSandbox) -> None:
        for delay in (0.0, 0.005, 0.02, 0.05):
            task = asyncio.create_task(sandbox.session())
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await sandbox.aclose()
        assert service.state["alive"] == []

    run(body)


def test_sessions_beyond_the_bound_wait_their_turn(service: Service) -> None:
    async def body(sandbox: E2BSandbox) -> None:
        async def episode(i: int) -> str | None:
            session = await sandbox.session()
            assert len(service.state["alive"]) <= 2
            answer = await session.execute(f"{i} * 2")
            await session.close()
            return answer.result

        assert await asyncio.gather(*(episode(i) for i in range(6))) == [
            str(2 * i) for i in range(6)
        ]

    run(body, pool=PoolConfig(max_sessions=2))


def test_the_stock_is_started_in_advance_and_replaced_when_dead(service: Service) -> None:
    async def body(sandbox: E2BSandbox) -> None:
        (stocked,) = service.state["alive"]
        service.kill(stocked)
        session = await sandbox.session()
        assert session.id != stocked
        assert (await session.execute("1 + 1")).result == "2"
        assert sandbox.metrics.unhealthy == 1

    run(body, pool=PoolConfig(min_idle=1, max_sessions=2))
    assert service.state["alive"] == []


def test_run_is_a_program_of_its_own(service: Service) -> None:
    async def body(sandbox: E2BSandbox) -> None:
        code = "import sys, helper\nprint(helper.f(), sys.argv[1:], sys.stdin.read(), __name__)"
        answer = await sandbox.run(
            code,
            files={"helper.py": b"def f(): return open('data/x').read()", "data/x": b"X"},
            argv=("a b", "$c"),
            stdin=b"typed",
        )
        assert (answer.status, answer.exit_code) == ("ok", 0)
        assert answer.stdout == "X ['a b', '$c'] typed __main__\n"
        assert service.state["alive"] == []

    run(body)


def test_how_a_program_ended_is_told_apart(service: Service) -> None:
    async def body(sandbox: E2BSandbox) -> None:
        raised = await sandbox.run("import sys; print('so far'); sys.exit(3)")
        assert (raised.status, raised.exit_code, raised.stdout) == ("exited", 3, "so far\n")
        failed = await sandbox.run("1/0")
        assert (failed.status, failed.exit_code) == ("error", 1)
        assert failed.error is not None
        assert (failed.error.name, failed.error.value) == ("ZeroDivisionError", "division by zero")
        assert "ZeroDivisionError" in failed.stderr
        slow = await sandbox.run("while True: pass", limits=Limits(wall_s=0.5))
        assert (slow.status, slow.exit_code) == ("timeout", None)
        assert service.state["alive"] == []

    run(body)


def test_a_refused_key_is_named(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", "e2b_wrong")

    async def body(sandbox: E2BSandbox) -> None:
        with pytest.raises(SandboxUnavailableError, match="refused the key in E2B_API_KEY"):
            await sandbox.session()

    run(body)


def test_an_unreachable_service_is_a_create_error(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("E2B_API_URL", "http://127.0.0.1:9")

    async def body(sandbox: E2BSandbox) -> None:
        for _ in range(3):
            with pytest.raises(SandboxCreateError, match="did not start a sandbox"):
                await sandbox.session()

    run(body, pool=PoolConfig(max_sessions=1), request_timeout_s=0.5)


def test_without_a_key_the_error_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(SandboxUnavailableError, match="environment variable E2B_API_KEY"):
        asyncio.run(E2BSandbox.create())


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "e2b_code_interpreter", None)
    with pytest.raises(MissingDependencyError, match=r"turngym\[e2b\]"):
        asyncio.run(E2BSandbox.create())


@pytest.mark.parametrize("options", [{"lifetime_s": 5}, {"request_timeout_s": 0.0}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        asyncio.run(E2BSandbox.create(**options))


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("E2B_API_KEY"), reason="needs an account: set E2B_API_KEY to run it"
)
def test_the_real_service_keeps_the_contract() -> None:
    async def body(session: E2BSession) -> None:
        await session.write_file("in.txt", b"6")
        answer = await session.execute("x = int(open('/workspace/in.txt').read()) * 7; x")
        assert answer.result == "42"
        slow = await session.execute("import time; time.sleep(60)", 1.0)
        assert (slow.status, slow.state_lost) == ("timeout", False)
        assert (await session.execute("x")).result == "42"
        assert (await session.execute("import os; os._exit(1)")).status == "exited"
        assert await session.list_files() == ["in.txt"]
        blocked = await session.execute(
            "import socket; socket.create_connection(('1.1.1.1', 53), 3)", 10.0
        )
        assert blocked.status == "error"

    in_session(body)
