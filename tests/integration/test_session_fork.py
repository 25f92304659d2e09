import asyncio
import os
import time
import uuid
from collections.abc import Iterator

import pytest

from turngym.errors import SandboxError
from turngym.sandboxes import Limits, PoolConfig, SyncSandbox, SyncSession, create
from turngym.sandboxes.checking.leaks import gone_within, marked

MARK = f"turngym-fork-{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[SyncSandbox]:
    with SyncSandbox("local", preload=("numpy",), env={"MARK": MARK}) as running:
        yield running
    assert gone_within(MARK, 2.0) == {}


@pytest.fixture
def session(sandbox: SyncSandbox) -> Iterator[SyncSession]:
    with sandbox.session() as one:
        yield one


def values(*sessions: SyncSession, code: str) -> list[str | None]:
    return [session.execute(code, 20.0).result for session in sessions]


def test_variables_and_random_numbers_go_on_from_where_they_were(session: SyncSession) -> None:
    session.execute("import random, numpy\nrandom.seed(1); numpy.random.seed(1); x = {'a': [1]}")
    draw = "(x, random.random(), float(numpy.random.rand()))"
    with session.fork() as one, session.fork() as two:
        first, second, third = values(session, one, two, code=draw)
    assert first == second == third == "({'a': [1]}, 0.13436424411240122, 0.417022004702574)"


def test_branches_diverge(session: SyncSession) -> None:
    session.execute("x = [0]; open('f', 'w').write('0')")
    with session.fork() as one, session.fork() as two:
        for name, branch in (("p", session), ("a", one), ("b", two)):
            branch.execute(f"x.append({name!r}); open('f', 'w').write({name!r})")
        found = values(session, one, two, code="(x, open('f').read())")
    assert found == ["([0, 'p'], 'p')", "([0, 'a'], 'a')", "([0, 'b'], 'b')"]


def test_all_private_folders_are_copied(session: SyncSession) -> None:
    session.execute(
        "import os\nos.makedirs('d/e'); open('d/e/f', 'w').write('deep'); os.symlink('d', 'l')\n"
        "open('/tmp/t', 'w').write('tmp'); open('/dev/shm/s', 'w').write('shm'); os.chdir('d')"
    )
    look = "(open('../l/e/f').read(), open('/tmp/t').read(), open('/dev/shm/s').read())"
    with session.fork() as copy:
        assert copy.execute(look).result == "('deep', 'tmp', 'shm')"
        assert copy.list_files() == ["d/e/f"]
        copy.write_file("d/e/f", b"new")
    assert session.read_file("d/e/f") == b"deep"


def test_open_files_keep_their_place_and_are_not_shared(session: SyncSession) -> None:
    session.execute(
        "open('f', 'w').write('abcdefgh')\n"
        "r = open('f', 'rb', buffering=0); _ = r.read(3)\n"
        "a = open('log', 'ab', buffering=0); _ = a.write(b'1')"
    )
    with session.fork() as copy:
        assert copy.execute("r.read(2), a.write(b'c')").result == "(b'de', 1)"
        assert session.execute("r.read(2), a.write(b'p')").result == "(b'de', 1)"
        assert (copy.read_file("log"), session.read_file("log")) == (b"1c", b"1p")
        assert copy.execute("r.tell()").lost == ()


def test_what_cannot_be_copied_is_told_once_on_both_sides(session: SyncSession) -> None:
    session.execute(
        "import mmap, os, socket, subprocess, threading, time\n"
        "thread = threading.Thread(target=time.sleep, args=(600,), daemon=True); thread.start()\n"
        "child = subprocess.Popen(['sleep', '601'])\n"
        "left, right = socket.socketpair()\n"
        "memory = mmap.mmap(-1, 4096); memory[:3] = b'abc'\n"
        "gone = open('gone', 'w+'); gone.write('x'); os.remove('gone')"
    )
    with session.fork() as copy:
        for side in (copy, session):
            lost = " | ".join(side.execute("1").lost)
            for word in ("1 background thread", "sleep 601", "socket:", "memory", "gone"):
                assert word in lost, (word, lost)
            assert side.execute("1").lost == ()
        copy.execute("memory[:3] = b'XYZ'")
        assert values(session, copy, code="bytes(memory[:3])") == ["b'abc'", "b'XYZ'"]
        broken = copy.execute("left.send(b'x')")
        assert broken.error is not None
        assert "Bad file descriptor" in broken.error.value


def test_mapped_files_belong_to_the_branch(session: SyncSession) -> None:
    session.execute(
        "import mmap\nopen('m', 'wb').write(b'0' * 4096); f = open('m', 'r+b')\n"
        "shared = mmap.mmap(f.fileno(), 4096)"
    )
    with session.fork() as copy:
        copy.execute("shared[:1] = b'C'")
        session.execute("shared[:1] = b'P'")
        assert (copy.read_file("m", 1), session.read_file("m", 1)) == (b"C", b"P")


def test_branches_neither_see_nor_reach_one_another(session: SyncSession) -> None:
    session.execute("import os, signal")
    look = "sorted(int(n) for n in os.listdir('/proc') if n.isdigit())"
    attack = (
        "for pid in range(2, 3000):\n"
        "    if pid != os.getpid():\n"
        "        try: os.kill(pid, signal.SIGKILL)\n"
        "        except OSError: pass"
    )
    with session.fork() as one, session.fork() as two:
        for branch in (session, one, two):
            assert len((branch.execute(look).result or "").split(",")) == 2
        one.execute(attack)
        assert values(session, one, two, code="1 + 1") == ["2", "2", "2"]
        assert not session.execute("1").state_lost


def test_a_branch_has_no_privileges_and_keeps_its_limits(session: SyncSession) -> None:
    with session.fork() as copy:
        found = copy.execute(
            "status = dict(l.split(':', 1) for l in open('/proc/self/status'))\n"
            "[int(status[k], 16) for k in ('CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb')], "
            "status['NoNewPrivs'].strip(), status['Seccomp'].strip()"
        )
        assert found.result == "([0, 0, 0, 0, 0], '1', '2')"
        bomb = copy.execute("x = bytearray(4 << 30)")
        assert bomb.error is not None
        assert bomb.error.name == "MemoryError"


def test_a_branch_outlives_its_parent(sandbox: SyncSandbox) -> None:
    parent = sandbox.session()
    parent.execute("x = 5")
    copy = parent.fork()
    grandchild = copy.fork()
    parent.close()
    copy.execute("x += 1")
    assert values(copy, grandchild, code="x") == ["6", "5"]
    copy.close()
    assert values(grandchild, code="x + 1") == ["6"]
    grandchild.close()


def test_a_snapshot_can_be_restored_many_times(session: SyncSession) -> None:
    session.execute("x = []")
    with session.fork() as snapshot:
        for number in range(5):
            with snapshot.fork() as run:
                run.execute(f"x.append({number})")
                assert run.execute("x").result == f"[{number}]"
        assert snapshot.execute("x").result == "[]"


def test_timeouts_exits_and_resets_work_in_a_branch(session: SyncSession) -> None:
    session.execute("x = 1; open('f', 'w').write('1')")
    with session.fork() as copy:
        assert copy.execute("import os; os._exit(3)").exit_code == 3
        lost = copy.execute("'x' in globals(), open('f').read()")
        assert (lost.result, lost.generation) == ("(False, '1')", 1)
        assert copy.execute("while True: pass", 0.3).status in ("timeout", "infra")
        copy.reset()
        assert copy.execute("2").generation == 2
        assert session.execute("x").result == "1"


@pytest.mark.slow
def test_too_deep_a_chain_is_refused_and_harms_nothing(sandbox: SyncSandbox) -> None:
    chain = [sandbox.session()]
    chain[0].execute("depth = 0")

    def grow() -> None:
        for _ in range(40):
            chain.append(chain[-1].fork())
            chain[-1].execute("depth += 1")

    with pytest.raises(SandboxError, match="replay its cells in a fresh session"):
        grow()
    assert len(chain) > 20
    assert chain[-1].execute("depth").result == str(len(chain) - 1)
    for link in chain:
        link.close()
    deadline = time.monotonic() + 2.0
    while len(marked(MARK)) > 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(marked(MARK)) == 2  # launcher and zygote


def test_forking_needs_a_free_place() -> None:
    async def scenario() -> None:
        sandbox = await create("local", preload=(), pool=PoolConfig(max_sessions=2))
        session = await sandbox.session()
        copy = await session.fork()
        with pytest.raises(SandboxError, match="max_sessions"):
            await session.fork()
        await copy.close()
        await (await session.fork()).close()
        await sandbox.aclose()

    asyncio.run(scenario())


def test_memory_of_many_branches_is_shared_until_written(sandbox: SyncSandbox) -> None:
    with sandbox.session(limits=Limits(memory_mb=256)) as session:
        session.execute("block = bytearray(100 << 20)\nblock[::4096] = b'x' * len(block[::4096])")
        branches = [session.fork() for _ in range(4)]
        assert values(*branches, code="block[4096]") == ["120"] * 4
        pss = 0
        for pid in marked(MARK):
            try:
                with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
                    pss += sum(int(line.split()[1]) for line in file if line.startswith("Pss:"))
            except OSError:
                assert os.geteuid() != 0
        assert pss < 350 << 10
        for branch in branches:
            branch.close()
