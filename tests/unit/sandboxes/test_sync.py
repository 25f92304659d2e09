import asyncio
import gc
import threading
import weakref

import pytest

from turngym.errors import SandboxError, SessionClosedError
from turngym.sandboxes import EchoSandbox, ExecResult, SyncSandbox


def test_the_facade_answers_in_a_plain_script() -> None:
    with SyncSandbox(EchoSandbox()) as sandbox, sandbox.session() as session:
        assert session.execute("hello").stdout == "hello"
        session.write_file("a.txt", b"1")
        assert session.list_files() == ["a.txt"]
        assert sandbox.run("program").stdout == "program"
        assert sandbox.guarantees.backend == "echo"


def test_the_facade_works_inside_a_running_loop() -> None:
    async def caller() -> str:
        with SyncSandbox(EchoSandbox()) as sandbox:
            return sandbox.session().execute("inside").stdout

    assert asyncio.run(caller()) == "inside"


def test_the_facade_serves_many_threads() -> None:
    seen: list[str] = []
    with SyncSandbox(EchoSandbox()) as sandbox:
        threads = [
            threading.Thread(target=lambda n=n: seen.append(sandbox.run(str(n)).stdout))
            for n in range(20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(seen, key=int) == [str(n) for n in range(20)]


def test_a_closed_facade_refuses_and_closing_again_does_nothing() -> None:
    sandbox = SyncSandbox(EchoSandbox())
    session = sandbox.session()
    sandbox.close()
    sandbox.close()
    session.close()
    with pytest.raises(SandboxError, match="closed"):
        sandbox.run("1")


def test_a_dropped_facade_closes_its_backend() -> None:
    backend = EchoSandbox()
    facade = SyncSandbox(backend)
    gone = weakref.ref(facade)
    del facade
    gc.collect()
    assert gone() is None
    with pytest.raises(SandboxError, match="closed"):
        asyncio.run(backend.session())


def test_the_fake_follows_its_script_and_counts_sessions() -> None:
    async def scenario() -> None:
        fake = EchoSandbox({"boom": ExecResult(status="timeout", state_lost=True)})
        session = await fake.session()
        assert (await session.execute("boom")).agent_fault
        await session.write_file("/workspace/f", b"x")
        twin = await session.fork()
        await twin.write_file("g", b"y")
        assert await session.list_files() == ["f"]
        assert fake.open_sessions == 2
        await session.close()
        await session.close()
        assert fake.open_sessions == 1
        with pytest.raises(SessionClosedError):
            await session.execute("1")
        assert fake.executed == ["boom"]

    asyncio.run(scenario())
