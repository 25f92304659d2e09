"""The docker backend on a real engine; skipped where `DOCKER_HOST` names none.

`scripts/docker_engine.sh` starts an engine and packs an image's files where nothing can be pulled:

    scripts/docker_engine.sh start
    scripts/docker_engine.sh rootfs /tmp/rootfs.tar
    DOCKER_HOST=... TURNGYM_ROOTFS=/tmp/rootfs.tar python -m pytest -m docker tests
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from turngym.errors import (
    ConfigError,
    MissingDependencyError,
    SandboxError,
    SandboxUnavailableError,
    SessionClosedError,
    SessionLostError,
)
from turngym.sandboxes.base import Limits, PoolConfig, Sandbox, Session
from turngym.sandboxes.check import check_sandbox

docker = pytest.importorskip("docker")

from turngym.sandboxes.docker import (  # noqa: E402  # only where the SDK is installed
    DEFAULT_IMAGE,
    DockerSandbox,
    DockerSession,
    build_image,
)
from turngym.sandboxes.docker.engine import (  # noqa: E402
    OWNER_LABEL,
    connect,
    owner_of_this_process,
)

needs_engine = pytest.mark.docker


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    """A client of the engine, which has the image."""
    if not os.environ.get("DOCKER_HOST") and not os.path.exists("/var/run/docker.sock"):
        pytest.skip("no engine: set DOCKER_HOST (scripts/docker_engine.sh start makes one)")
    try:
        client, _ = connect()
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    try:
        if not client.images(name=DEFAULT_IMAGE):
            if "TURNGYM_ROOTFS" not in os.environ:
                pytest.skip(f"no image {DEFAULT_IMAGE}: build it, or set TURNGYM_ROOTFS")
            build_image(rootfs=os.environ["TURNGYM_ROOTFS"])
        yield client
    finally:
        client.close()


def is_podman(client: Any) -> bool:
    return any("Podman" in part["Name"] for part in client.version()["Components"])


def ours(client: Any) -> list[str]:
    filters = {"label": f"{OWNER_LABEL}={owner_of_this_process()}"}
    return [container["Id"] for container in client.containers(all=True, filters=filters)]


def run(body: Callable[[DockerSandbox], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        sandbox = await DockerSandbox.create(**{"preload": ()} | options)
        try:
            await body(sandbox)
        finally:
            await sandbox.aclose()

    asyncio.run(main())


def in_session(body: Callable[[DockerSession], Awaitable[None]], **options: Any) -> None:
    async def with_session(sandbox: DockerSandbox) -> None:
        session = await sandbox.session()
        try:
            await body(session)
        finally:
            await session.close()

    run(with_session, **options)


@needs_engine
def test_it_is_a_sandbox_that_proved_its_walls(engine: Any) -> None:
    async def body(sandbox: DockerSandbox) -> None:
        assert isinstance(sandbox, Sandbox)
        found = sandbox.guarantees
        assert (found.backend, found.level, found.fork) == ("docker", "container", False)
        assert {found.filesystem, found.network, found.session_isolation} == {"hard"}
        assert {found.memory, found.processes} == {"hard"}
        assert found.disk == ("soft" if is_podman(engine) else "hard")

    run(body)


@needs_engine
def test_state_persists_across_cells_and_not_across_sessions(engine: Any) -> None:
    async def body(sandbox: DockerSandbox) -> None:
        one, two = await asyncio.gather(sandbox.session(), sandbox.session())
        assert isinstance(one, Session)
        await one.execute("x = 6; open('f', 'w').write('f')")
        answer = await one.execute("print('hi'); x * 7")
        assert (answer.status, answer.stdout, answer.result) == ("ok", "hi\n", "42")
        assert (await two.execute("x")).status == "error"
        assert await two.list_files() == []

    run(body)


@needs_engine
def test_a_container_is_set_up_as_promised(engine: Any) -> None:
    async def body(session: DockerSession) -> None:
        seen = engine.inspect_container(session.container_id)
        host = seen["HostConfig"]
        assert host["NetworkMode"] == "none"
        assert host["ReadonlyRootfs"] is True
        status = (await session.execute("open('/proc/self/status').read()")).result or ""
        assert "CapBnd:\\t0000000000000000" in status
        assert "no-new-privileges" in host["SecurityOpt"]
        assert host["Memory"] == host["MemorySwap"] == (100 + 2 * 16 + 128) << 20
        assert host["PidsLimit"] == 33
        assert host["NanoCpus"] == 500_000_000
        assert host["AutoRemove"] is True
        writable = [path for path, how in host["Tmpfs"].items() if "ro" not in how.split(",")]
        assert set(writable) == {"/workspace", "/tmp"}
        assert seen["Config"]["User"] == "1000:1000"
        ulimits = {
            limit["Name"].removeprefix("RLIMIT_").lower(): limit["Hard"]
            for limit in host["Ulimits"]
        }
        assert ulimits == {"nofile": 1024, "nproc": 4096, "core": 0}

    limits = Limits(memory_mb=100, disk_mb=16, processes=32, open_files=128)
    in_session(body, limits=limits, cpus=0.5)


@needs_engine
def test_nothing_but_the_promised_folders_is_writable(engine: Any) -> None:
    code = """
import os
places = {line.split()[1] for line in open('/proc/mounts')} | {'/run', '/var/tmp', '/etc', '/home'}
[place for place in sorted(places) if os.path.isdir(place) and os.access(place, os.W_OK)]
"""

    async def body(session: DockerSession) -> None:
        seen = (await session.execute(code)).result
        # Message queues belong to the container's own IPC namespace and are bounded by a ulimit.
        assert seen == "['/dev/mqueue', '/dev/shm', '/tmp', '/workspace']"

    in_session(body)


@needs_engine
def test_files_go_in_and_out_though_the_root_is_read_only(engine: Any) -> None:
    async def body(session: DockerSession) -> None:
        data = bytes(range(256)) * 8192
        await session.write_file("a/b.bin", data)
        assert await session.read_file("a/b.bin", 1 << 22) == data
        assert (await session.execute("len(open('/workspace/a/b.bin', 'rb').read())")).result == (
            str(len(data))
        )
        assert await session.list_files() == ["a/b.bin"]
        with pytest.raises(FileNotFoundError):
            await session.read_file("nothing")
        answer = await session.execute("open('/usr/x', 'w')")
        assert answer.error is not None
        assert answer.error.name == "OSError"

    in_session(body)


@needs_engine
def test_a_time_out_keeps_state_and_a_reset_keeps_files(engine: Any) -> None:
    async def body(session: DockerSession) -> None:
        await session.execute("x = 5; open('f', 'w').write('f')")
        began = time.monotonic()
        answer = await session.execute("import time; time.sleep(60)", 0.5)
        assert time.monotonic() - began < 2
        assert (answer.status, answer.state_lost) == ("timeout", False)
        assert (await session.execute("x")).result == "5"
        await session.reset()
        assert (await session.execute("x")).status == "error"
        assert (await session.execute("open('f').read()")).result == "'f'"

    in_session(body)


@needs_engine
def test_memory_is_the_agents_fault_whoever_the_kernel_kills(engine: Any) -> None:
    # Children that the kernel kills one by one, and then init itself: their score is lowered.
    code = """
import os, time
for child in range(40):
    if os.fork() == 0:
        block = bytearray(24 << 20)
        for place in range(0, len(block), 4096):
            block[place] = 1
        time.sleep(20)
        os._exit(0)
time.sleep(3)
"""

    async def body(session: DockerSession) -> None:
        answer = await session.execute("x = bytearray(10 ** 9)", 10.0)
        assert answer.error is not None
        assert (answer.status, answer.error.name) == ("error", "MemoryError")
        answer = await session.execute(code, 20.0)
        assert answer.status in {"ok", "memory", "exited", "error"}
        assert not answer.infra_fault
        assert (await session.execute("1 + 1")).result == "2"

    in_session(body, limits=Limits(memory_mb=64, disk_mb=8))


@needs_engine
def test_a_container_that_ran_out_of_memory_is_replaced(engine: Any) -> None:
    if is_podman(engine):
        pytest.skip("Podman keeps no record of why a container died")

    async def body(session: DockerSession) -> None:
        await session.execute("x = 1; import os; os._exit(0)")
        await session.write_file("f", b"f")
        first = session.container_id
        running = asyncio.create_task(session.execute("import time; time.sleep(30)", 30.0))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(starve, engine, first)
        answer = await running
        assert (answer.status, answer.state_lost) == ("memory", True)
        assert answer.lost == ("files in /workspace and /tmp",)
        assert answer.generation == 2
        assert session.container_id != first
        assert await session.list_files() == []
        answer = await session.execute("1 + 1")
        assert (answer.result, answer.generation) == ("2", 2)

    in_session(body, preload=())


def starve(client: Any, container: str) -> None:
    """Let the container run out of memory, with init as the kernel's first choice."""
    code = "open('/proc/1/oom_score_adj', 'w').write('1000'); b'x' * (2 << 30)"
    command = client.exec_create(container, ["python3", "-c", code], user="0")
    client.exec_start(command["Id"])


@needs_engine
def test_a_container_removed_from_outside_is_a_lost_session(engine: Any) -> None:
    async def body(session: DockerSession) -> None:
        running = asyncio.create_task(session.execute("import time; time.sleep(30)"))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(engine.remove_container, session.container_id, force=True)
        with pytest.raises(SessionLostError, match="is gone"):
            await running
        with pytest.raises(SessionLostError):
            await session.execute("1")
        await session.close()
        with pytest.raises(SessionClosedError):
            await session.execute("1")

    in_session(body)


@needs_engine
def test_run_is_a_program_of_its_own_and_leaves_nothing(engine: Any) -> None:
    async def body(sandbox: DockerSandbox) -> None:
        code = "import sys, helper\nprint(helper.f(), sys.argv[1:], sys.stdin.read(), __name__)"
        answer = await sandbox.run(
            code, files={"helper.py": b"def f(): return 'X'"}, argv=("a b",), stdin=b"typed"
        )
        assert (answer.status, answer.exit_code) == ("ok", 0)
        assert answer.stdout == "X ['a b'] typed __main__\n"
        assert ours(engine) == []

    run(body)


@needs_engine
def test_the_pool_hands_out_containers_that_wait(engine: Any) -> None:
    async def body(sandbox: DockerSandbox) -> None:
        assert len(ours(engine)) >= 2
        began = time.monotonic()
        session = await sandbox.session()
        assert (await session.execute("1 + 1")).result == "2"
        assert time.monotonic() - began < 0.25, "a container takes longer to start"
        assert sandbox.metrics.reused == 1
        await session.close()

    run(body, pool=PoolConfig(min_idle=2, max_sessions=4))


@needs_engine
def test_closing_leaves_neither_container_nor_descriptor_nor_thread(engine: Any) -> None:
    async def body(sandbox: DockerSandbox) -> None:
        sessions = await asyncio.gather(*(sandbox.session() for _ in range(3)))
        await sessions[0].close()
        await sessions[1].execute("x = 1")

    run(body)
    before = os.listdir("/proc/self/fd")
    run(body)
    assert ours(engine) == []
    assert len(os.listdir("/proc/self/fd")) <= len(before)


@needs_engine
def test_a_cancelled_start_leaves_no_container(engine: Any) -> None:
    async def body(sandbox: DockerSandbox) -> None:
        for delay in (0.0, 0.05, 0.15, 0.3):
            task = asyncio.create_task(sandbox.session())
            await asyncio.sleep(delay)
            task.cancel()
            for outcome in await asyncio.gather(task, return_exceptions=True):
                if not isinstance(outcome, BaseException):
                    await outcome.close()  # it had started before it was cancelled
        deadline = time.monotonic() + 5
        while ours(engine) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        assert ours(engine) == []

    run(body)


@needs_engine
@pytest.mark.slow
def test_the_sandbox_check_finds_neither_fault_nor_breach(engine: Any, shared: Path) -> None:
    attacks = shared / "cases" / "sandbox" / "attacks.jsonl"
    report = check_sandbox("docker", attacks=attacks)
    assert report.failed == (), report.table()
    assert report.count("pass") > 150
    assert ours(engine) == []


TRAINER = """
import asyncio
from turngym.sandboxes.base import PoolConfig
from turngym.sandboxes.docker import DockerSandbox
async def main():
    sandbox = await DockerSandbox.create(pool=PoolConfig(min_idle=1))
    session = await sandbox.session()
    print(session.container_id, flush=True)
    await session.execute("import subprocess; subprocess.run(['sleep', '100'])", 100.0)
asyncio.run(main())
"""


@needs_engine
def test_nothing_survives_a_trainer_killed_by_sigkill(engine: Any) -> None:
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    id = trainer.stdout.readline().strip()
    labels = engine.inspect_container(id)["Config"]["Labels"]
    filters = {"label": f"{OWNER_LABEL}={labels[OWNER_LABEL]}"}
    assert len(engine.containers(all=True, filters=filters)) >= 1
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    deadline = time.monotonic() + 4
    while engine.containers(all=True, filters=filters) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert engine.containers(all=True, filters=filters) == []


CHURNING_TRAINER = """
import asyncio
from turngym.sandboxes.base import PoolConfig
from turngym.sandboxes.docker import DockerSandbox
from turngym.sandboxes.docker.engine import owner_of_this_process
async def churn(sandbox):
    while True:
        await (await sandbox.session()).close()
async def main():
    sandbox = await DockerSandbox.create(preload=(), pool=PoolConfig(min_idle=2))
    print(owner_of_this_process(), flush=True)
    await asyncio.gather(*(churn(sandbox) for _ in range(3)))
asyncio.run(main())
"""


@needs_engine
@pytest.mark.parametrize("delay_s", [0.0, 0.2, 0.5])
def test_a_kill_amid_the_making_of_containers_leaves_none(engine: Any, delay_s: float) -> None:
    command = [sys.executable, "-c", CHURNING_TRAINER]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    filters = {"label": f"{OWNER_LABEL}={trainer.stdout.readline().strip()}"}
    time.sleep(delay_s)
    assert engine.containers(all=True, filters=filters) != []
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    empty_since = deadline = time.monotonic() + 4
    while time.monotonic() < min(deadline, empty_since + 0.5):
        if engine.containers(all=True, filters=filters):
            empty_since = deadline
        else:
            empty_since = min(empty_since, time.monotonic())
        time.sleep(0.05)
    assert engine.containers(all=True, filters=filters) == []


@needs_engine
def test_what_dead_owners_left_is_removed_and_what_living_ones_have_is_not(engine: Any) -> None:
    boot, namespace, _, start = owner_of_this_process().split("/")
    owners = {
        "dead": f"{boot}/{namespace}/{os.getpid()}/1",
        "alive": owner_of_this_process(),
        "elsewhere": f"another-boot/{namespace}/1/{start}",
    }
    made = {
        name: engine.create_container(DEFAULT_IMAGE, ["sleep", "60"], labels={OWNER_LABEL: owner})[
            "Id"
        ]
        for name, owner in owners.items()
    }
    try:

        async def body(sandbox: DockerSandbox) -> None:
            left = {container["Id"] for container in engine.containers(all=True)}
            assert {name for name, id in made.items() if id in left} == {"alive", "elsewhere"}

        run(body)
    finally:
        for name in ("alive", "elsewhere"):
            engine.remove_container(made[name], force=True)


@needs_engine
def test_a_missing_image_says_how_to_make_it(engine: Any) -> None:
    with pytest.raises(SandboxUnavailableError, match=r"no image 'nowhere/none:1'.*build_image"):
        asyncio.run(DockerSandbox.create(image="nowhere/none:1"))


@needs_engine
def test_an_image_is_built_from_the_dockerfile(engine: Any) -> None:
    tag = "turngym-test:built"
    build_image(tag, base=DEFAULT_IMAGE, packages=())
    try:

        async def body(session: DockerSession) -> None:
            assert (await session.execute("import getpass; getpass.getuser()")).result == (
                "'sandbox'"
            )

        in_session(body, image=tag)
    finally:
        engine.remove_image(tag)


@needs_engine
def test_a_failed_build_names_the_way_out(engine: Any) -> None:
    with pytest.raises(SandboxUnavailableError, match="rootfs"):
        build_image("turngym-test:broken", base=DEFAULT_IMAGE, packages=("no-such-package-9",))


@needs_engine
def test_fork_says_what_to_use_instead(engine: Any) -> None:
    async def body(session: DockerSession) -> None:
        with pytest.raises(SandboxError, match="replay"):
            await session.fork()

    in_session(body)


@needs_engine
def test_a_process_may_end_without_closing_its_sandbox(engine: Any) -> None:
    script = """
from turngym.sandboxes import SyncSandbox
from turngym.sandboxes.docker.engine import owner_of_this_process
sandbox = SyncSandbox("docker", preload=())
session = sandbox.session()
print(session.execute("6 * 7").result, owner_of_this_process())
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    answer, owner = run.stdout.split()
    assert (answer, run.stderr, run.returncode) == ("42", "", 0)
    assert engine.containers(all=True, filters={"label": f"{OWNER_LABEL}={owner}"}) == []


def test_without_an_engine_the_error_names_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(SandboxUnavailableError, match=r"unix:///nowhere/docker.sock.*'local'"):
        asyncio.run(DockerSandbox.create())


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(MissingDependencyError, match=r"turngym\[docker\]"):
        asyncio.run(DockerSandbox.create())


@pytest.mark.parametrize("options", [{"cpus": 0.0}, {"preload": ("os; x",)}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        asyncio.run(DockerSandbox.create(**options))
