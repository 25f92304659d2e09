"""The functional contract of a sandbox, as checks that any backend can be put to.

A check returns an empty text when the promise is kept, a text beginning with "skip" when the
backend does not make it, else what went wrong.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from turngym.errors import SessionClosedError
from turngym.sandboxes.base import Sandbox, Session

__all__ = ["CHECKS", "Check"]

Check = Callable[[Sandbox], Awaitable[str]]

CHECKS: dict[str, Check] = {}


def _check(check: Check) -> Check:
    CHECKS[str(getattr(check, "__name__", check))] = check
    return check


def _differs(**pairs: tuple[object, object]) -> str:
    """Name the values that are not as expected; pairs are (found, expected)."""
    wrong = [
        f"{name} is {found!r}, expected {expected!r}"
        for name, (found, expected) in pairs.items()
        if found != expected
    ]
    return "; ".join(wrong)


@contextlib.asynccontextmanager
async def _open(sandbox: Sandbox) -> AsyncIterator[Session]:
    session = await sandbox.session()
    try:
        yield session
    finally:
        await session.close()


@_check
async def state_persists_across_cells(sandbox: Sandbox) -> str:
    async with _open(sandbox) as session:
        await session.execute("x = 20\ndef double(n): return 2 * n")
        result = await session.execute("double(x) + 2")
        return _differs(status=(result.status, "ok"), result=(result.result, "42"))


@_check
async def state_never_crosses_sessions(sandbox: Sandbox) -> str:
    async with _open(sandbox) as one, _open(sandbox) as two:
        await one.execute("x = 1\nopen('f', 'w').write('1')")
        seen = await two.execute("'x' in globals()")
        return _differs(variable=(seen.result, "False"), files=(await two.list_files(), []))


@_check
async def streams_and_result_are_apart(sandbox: Sandbox) -> str:
    async with _open(sandbox) as session:
        result = await session.execute("import sys\nprint('out')\nprint('err', file=sys.stderr)\n7")
        return _differs(
            stdout=(result.stdout, "out\n"),
            stderr=(result.stderr, "err\n"),
            result=(result.result, "7"),
            stdout_bytes=(result.stdout_bytes, 4),
            lost=(result.state_lost, False),
        )


@_check
async def errors_are_values(sandbox: Sandbox) -> str:
    async with _open(sandbox) as session:
        result = await session.execute("1 / 0")
        after = await session.execute("1 + 1")
        if result.error is None:
            return f"no error in {result}"
        return _differs(
            status=(result.status, "error"),
            name=(result.error.name, "ZeroDivisionError"),
            value=(result.error.value, "division by zero"),
            after=(after.result, "2"),
        )


@_check
async def a_failing_cell_runs_once(sandbox: Sandbox) -> str:
    async with _open(sandbox) as session:
        await session.execute("open('log', 'a').write('1')\nprint(undefined)")
        return _differs(log=(await session.read_file("log"), b"1"))


@_check
async def hard_bytes_are_data(sandbox: Sandbox) -> str:
    async with _open(sandbox) as session:
        bad = await session.execute("import os; _ = os.write(1, b'\\xff\\xfe ok\\x00')")
        nul = await session.execute("x = '\0'")
        surrogate = await session.execute("'\ud800'")
        text = await session.execute("print('é€😀')")
        return _differs(
            bad=(bad.status, "ok"),
            kept=(" ok" in bad.stdout, True),
            nul=(nul.status, "error"),
            surrogate=(surrogate.status, "error"),
            text=(text.stdout, "é€😀\n"),
        )


@_check
async def timeouts_end_the_cell_not_the_session(sandbox: Sandbox) -> str:
    async with _open(sandbox) as session:
        await session.execute("kept = 5")
        start = time.monotonic()
        result = await session.execute("while True: pass", 1.0)
        took = time.monotonic() - start
        after = await session.execute("'kept' in globals()")
        return _differs(
            fault=(result.status in ("timeout", "infra"), True),
            prompt=(took < 2.5, True),
            honest=(after.result, str(not result.state_lost)),
        )


@_check
async def interrupt_stops_the_cell(sandbox: Sandbox) -> str:
    async with _open(sandbox) as session:
        running = asyncio.create_task(session.execute("import time; time.sleep(60)", 30.0))
        await asyncio.sleep(0.3)
        await session.interrupt()
        result = await asyncio.wait_for(running, 10.0)
        after = await session.execute("1 + 1")
        return _differs(status=(result.status, "timeout"), after=(after.result, "2"))


@_check
async def cancelling_stops_the_cell(sandbox: Sandbox) -> str:
    async with _open(sandbox) as session:
        running = asyncio.create_task(session.execute("import time; time.sleep(60)", 30.0))
        await asyncio.sleep(0.3)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        start = time.monotonic()
        after = await session.execute("1 + 1")
        took = time.monotonic() - start
        return _differs(after=(after.result, "2"), prompt=(took < 5.0, True))


@_check
async def reset_forgets_variables_and_keeps_files(sandbox: Sandbox) -> str:
    async with _open(sandbox) as session:
        await session.execute("x = 1\nopen('f', 'w').write('kept')")
        await session.reset()
        result = await session.execute("'x' in globals()")
        return _differs(
            variable=(result.result, "False"), file=(await session.read_file("f"), b"kept")
        )


@_check
async def files_go_in_and_out(sandbox: Sandbox) -> str:
    async with _open(sandbox) as session:
        data = bytes(range(256)) * 16
        await session.write_file("a/b.bin", data)
        await session.write_file("/workspace/c.txt", b"1")
        seen = await session.execute("(len(open('a/b.bin', 'rb').read()), open('c.txt').read())")
        problem = _differs(
            seen=(seen.result, "(4096, '1')"),
            files=(await session.list_files(), ["a/b.bin", "c.txt"]),
            read=(await session.read_file("a/b.bin"), data),
            part=(await session.read_file("a/b.bin", max_bytes=3), data[:3]),
        )
        try:
            await session.read_file("absent")
        except FileNotFoundError:
            return problem
        return f"{problem}; reading an absent file did not raise FileNotFoundError"


@_check
async def files_outside_the_workspace_are_refused(sandbox: Sandbox) -> str:
    async with _open(sandbox) as session:
        await session.execute("import os; os.symlink('/etc/passwd', 'link'); os.symlink('/', 'd')")
        reached = []
        for path in ("../etc/passwd", "/etc/passwd", "link", "d/etc/passwd"):
            with contextlib.suppress(OSError):
                await session.read_file(path)
                reached.append(path)
        return f"read {reached}" if reached else ""


@_check
async def output_is_capped_with_head_and_tail(sandbox: Sandbox) -> str:
    async with _open(sandbox) as session:
        result = await session.execute("print('head'); print('x' * 2_000_000); print('tail')")
        return _differs(
            small=(len(result.stdout) < 200_000, True),
            head=(result.stdout[:4], "head"),
            tail=(result.stdout.rstrip()[-4:], "tail"),
            truncated=(result.truncated, True),
            counted=(result.stdout_bytes >= 2_000_000, True),
        )


@_check
async def exiting_is_reported_and_survived(sandbox: Sandbox) -> str:
    async with _open(sandbox) as session:
        result = await session.execute("print('said', flush=True)\nimport os; os._exit(7)")
        after = await session.execute("1 + 1")
        return _differs(
            status=(result.status, "exited"),
            said=(result.stdout, "said\n"),
            lost=(result.state_lost, True),
            after=(after.result, "2"),
        )


@_check
async def displays_become_artifacts(sandbox: Sandbox) -> str:
    async with _open(sandbox) as session:
        result = await session.execute(
            "class Table:\n    def _repr_html_(self): return '<b>1</b>'\nTable()"
        )
        found = [(one.mime, one.data) for one in result.artifacts]
        return _differs(html=(("text/html", b"<b>1</b>") in found, True))


@_check
async def cells_of_one_session_run_in_order(sandbox: Sandbox) -> str:
    async with _open(sandbox) as session:
        await session.execute("seen = []")
        await asyncio.gather(*(session.execute(f"seen.append({n})") for n in range(8)))
        result = await session.execute("seen")
        return _differs(seen=(result.result, str(list(range(8)))))


@_check
async def sessions_run_side_by_side(sandbox: Sandbox) -> str:
    async def one(number: int) -> str | None:
        async with _open(sandbox) as session:
            await session.execute(f"x = {number}")
            return (await session.execute("x * x")).result

    found = await asyncio.gather(*(one(n) for n in range(4)))
    return _differs(squares=(found, [str(n * n) for n in range(4)]))


@_check
async def closed_sessions_refuse(sandbox: Sandbox) -> str:
    session = await sandbox.session()
    await session.close()
    await session.close()
    try:
        await session.execute("1")
    except SessionClosedError:
        return ""
    return "a closed session executed a cell"


@_check
async def programs_get_arguments_stdin_and_files(sandbox: Sandbox) -> str:
    code = (
        "import sys\n"
        "if __name__ == '__main__':\n"
        "    print(sys.argv[1:], sys.stdin.read(), open('data.txt').read())\n"
        "    sys.exit(3)"
    )
    result = await sandbox.run(code, files={"data.txt": b"file"}, argv=("a", "b"), stdin=b"in")
    return _differs(
        stdout=(result.stdout, "['a', 'b'] in file\n"),
        status=(result.status, "exited"),
        code=(result.exit_code, 3),
    )


@_check
async def programs_end_by_exit_code(sandbox: Sandbox) -> str:
    good = await sandbox.run("print('done')")
    bad = await sandbox.run("raise ValueError('no')")
    return _differs(
        good=(good.status, "ok"),
        code=(good.exit_code, 0),
        bad=(bad.status, "error"),
        bad_code=(bad.exit_code, 1),
        told=("ValueError: no" in bad.stderr, True),
    )


@_check
async def forks_go_their_own_ways(sandbox: Sandbox) -> str:
    if not sandbox.guarantees.fork:
        return "skip: the backend does not fork"
    async with _open(sandbox) as session:
        await session.execute(
            "import random; random.seed(7); x = [1]\n"
            "open('f', 'w').write('abcdef'); f = open('f'); _ = f.read(2)"
        )
        copy = await session.fork()
        try:
            await session.execute("x.append('parent'); open('f', 'w').write('parent')")
            one = await copy.execute("(x, f.read(), random.random())")
            two = await session.execute("(x, f.tell(), random.random())")
            return _differs(
                copy=(one.result, "([1], 'cdef', 0.32383276483316237)"),
                parent=(two.result, "([1, 'parent'], 2, 0.32383276483316237)"),
            )
        finally:
            await copy.close()
