"""A local server that speaks the part of E2B's protocol that the `e2b` backend uses.

Control plane (create, kill, info, time-out, connect) and data plane (health, files, contexts,
execute, one command) on one loopback port, in a process of its own. Code runs in real, stateful
interpreters, without any confinement: only for code that the tests themselves wrote.

Started as a script it prints its address and serves until its standard input closes.
"""

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import struct
import sys
import tempfile
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

from aiohttp import web

KEY = "e2b_" + "0" * 40

# What is written to `sys.stdout` and to descriptor 1 is collected now and then, as ipykernel does;
# every message carries the id of its request, so that what an abandoned cell still says is not
# taken for its successor's.
KERNEL = r"""
import ast, json, os, signal, sys, threading, time, traceback
wire = os.fdopen(os.dup(1), "w", buffering=1)
request = {"id": None}
writing = threading.Lock()
def send(kind, **fields):
    # A line is written whole: an interrupt in the midst of it would cut it off.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with writing:
            wire.write(json.dumps({"type": kind, "id": request["id"], **fields}) + "\n")
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
class Stream:
    def __init__(self, kind, fd):
        self.kind, self.parts, self.lock = kind, [], threading.Lock()
        self.pipe, end = os.pipe()
        os.set_blocking(self.pipe, False)
        os.dup2(end, fd)
    def write(self, text):
        self.parts.append(text)
        if len(self.parts) > 1000: self.flush()
        return len(text)
    def flush(self):
        with self.lock:
            parts, self.parts = self.parts, []
            try: parts.append(os.read(self.pipe, 1 << 16).decode("utf-8", "replace"))
            except BlockingIOError: pass
            if parts: send(self.kind, text="".join(parts), timestamp=0)
def flush_now_and_then():
    while True:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        time.sleep(0.05)
        sys.stdout.flush(), sys.stderr.flush()
sys.stdout, sys.stderr = Stream("stdout", 1), Stream("stderr", 2)
threading.Thread(target=flush_now_and_then, daemon=True).start()
main = {"__name__": "__main__"}
def run(code):
    tree = ast.parse(code, "cell")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), main)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), main)
        if value is not None:
            rich = {"html": value._repr_html_()} if hasattr(value, "_repr_html_") else {}
            send("result", text=repr(value), is_main_result=True, **rich)
signal.signal(signal.SIGINT, signal.SIG_IGN)
for count, line in enumerate(sys.stdin, 1):
    request = json.loads(line)
    send("number_of_executions", execution_count=count)
    try:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            run(request["code"])
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except BaseException as error:
        text = "\x1b[0;31m" + "".join(traceback.format_exception(error)) + "\x1b[0m"
        send("error", name=type(error).__name__, value=str(error), traceback=text)
    sys.stdout.flush(), sys.stderr.flush()
    send("end_of_execution")
"""


class Kernel:
    """One context: an interpreter that is replaced when it dies, as Jupyter does."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        self.lock = asyncio.Lock()
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-u", "-c", KERNEL),
            cwd=self.cwd,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 26,
        )

    async def stop(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()

    async def execute(self, code: str, response: web.StreamResponse) -> None:
        async def say(message: dict[str, Any]) -> None:
            await response.write(json.dumps(message).encode() + b"\n")

        async with self.lock:
            process = self.process
            assert process is not None
            assert process.stdin is not None
            assert process.stdout is not None
            token = uuid.uuid4().hex
            process.stdin.write(json.dumps({"id": token, "code": code}).encode() + b"\n")
            try:
                while line := await process.stdout.readline():
                    message = json.loads(line)
                    if message.pop("id") != token:
                        continue
                    await say(message)
                    if message["type"] == "end_of_execution":
                        return
            except (asyncio.CancelledError, ConnectionResetError):
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGINT)
                raise
            await process.wait()
            await self.start()
            await say({"type": "error", "name": "ContextRestarting", "value": "", "traceback": ""})
            await say({"type": "end_of_execution"})


class Machine:
    """One sandbox: a folder, its contexts, and the moment at which it is killed."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.id = "i" + uuid.uuid4().hex[:19]
        self.token = uuid.uuid4().hex
        self.body = body
        self.root = Path(tempfile.mkdtemp(prefix="e2b-"))
        self.contexts: dict[str, Kernel] = {}
        self.commands: list[int] = []
        self.timer: asyncio.TimerHandle | None = None

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    async def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        for group in self.commands:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        await asyncio.gather(*(kernel.stop() for kernel in self.contexts.values()))
        shutil.rmtree(self.root, ignore_errors=True)


class Server:
    """The two planes; `faults` are taken one at a time by the next call of their name."""

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self.calls: Counter[str] = Counter()
        self.created: list[dict[str, Any]] = []
        self.faults: list[str] = []
        self.stopping: set[asyncio.Task[None]] = set()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28, middlewares=[self.guard])
        app.add_routes(
            [
                web.post("/v2/sandboxes", self.create),
                web.get("/sandboxes/{id}", self.info),
                web.delete("/sandboxes/{id}", self.kill),
                web.post("/sandboxes/{id}/timeout", self.renew),
                web.post("/v2/sandboxes/{id}/connect", self.connect),
                web.get("/health", self.health),
                web.get("/files", self.read),
                web.post("/files", self.write),
                web.post("/filesystem.Filesystem/MakeDir", self.make_dir),
                web.post("/filesystem.Filesystem/ListDir", self.list_dir),
                web.post("/process.Process/Start", self.command),
                web.post("/contexts", self.new_context),
                web.delete("/contexts/{context}", self.drop_context),
                web.post("/execute", self.execute),
                web.get("/test/state", self.state),
                web.post("/test/fault", self.plan_fault),
            ]
        )
        return app

    @web.middleware  # type: ignore[untyped-decorator]
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        name = handler.__name__
        self.calls[name] += 1
        if name in self.faults:
            self.faults.remove(name)
            assert request.transport is not None
            request.transport.abort()
        if name in ("create", "info", "kill", "renew", "connect"):
            if request.headers.get("X-API-Key") != KEY:
                return web.json_response({"code": 401, "message": "bad key"}, status=401)
            machine = self.machines.get(request.match_info.get("id", ""))
            if machine is None and name != "create":
                return web.json_response({"code": 404, "message": "no such sandbox"}, status=404)
            request["machine"] = machine
        elif name not in ("state", "plan_fault"):
            id = request.headers["E2b-Sandbox-Id"]
            if id not in self.machines:
                return web.json_response({"message": f"sandbox {id} was not found"}, status=502)
            request["machine"] = self.machines[id]
            if name not in ("new_context", "drop_context"):
                assert request.headers["X-Access-Token"] == request["machine"].token
        answer: web.StreamResponse = await handler(request)
        return answer

    def arm(self, machine: Machine, seconds: float) -> None:
        if machine.timer is not None:
            machine.timer.cancel()
        loop = asyncio.get_running_loop()
        machine.timer = loop.call_later(seconds, self.end, machine)

    def end(self, machine: Machine) -> None:
        if self.machines.pop(machine.id, None):
            task = asyncio.create_task(machine.stop())
            self.stopping.add(task)
            task.add_done_callback(self.stopping.discard)

    def describe(self, machine: Machine) -> dict[str, Any]:
        return {
            "templateID": machine.body["templateID"],
            "sandboxID": machine.id,
            "clientID": "local",
            "envdVersion": "0.6.7",
            "envdAccessToken": machine.token,
            "domain": None,
        }

    async def create(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.created.append(body)
        machine = Machine(body)
        self.machines[machine.id] = machine
        self.arm(machine, body["timeout"])
        return web.json_response(self.describe(machine), status=201)

    async def connect(self, request: web.Request) -> web.Response:
        self.arm(request["machine"], (await request.json())["timeout"])
        return web.json_response(self.describe(request["machine"]))

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response(self.describe(request["machine"]))

    async def kill(self, request: web.Request) -> web.Response:
        self.end(request["machine"])
        return web.Response(status=204)

    async def renew(self, request: web.Request) -> web.Response:
        self.arm(request["machine"], (await request.json())["timeout"])
        return web.Response(status=204)

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=204)

    async def read(self, request: web.Request) -> web.StreamResponse:
        path = request["machine"].path(request.query["path"])
        if not path.is_file():
            return web.json_response({"code": 404, "message": "no such file"}, status=404)
        return web.FileResponse(path)

    async def write(self, request: web.Request) -> web.Response:
        path: Path = request["machine"].path(request.query["path"])
        path.parent.mkdir(parents=True, exist_ok=True)
        if request.content_type.startswith("multipart/"):
            part = await (await request.multipart()).next()
            data = await part.read()
        else:
            data = await request.read()
        path.write_bytes(data)
        return web.json_response([{"name": path.name, "type": "file", "path": str(path)}])

    async def make_dir(self, request: web.Request) -> web.Response:
        request["machine"].path((await request.json())["path"]).mkdir(parents=True)
        return web.json_response({})

    async def list_dir(self, request: web.Request) -> web.Response:
        machine = request["machine"]
        top = machine.path((await request.json())["path"])
        entries = [
            {
                "name": path.name,
                "path": "/" + str(path.relative_to(machine.root)),
                "type": "FILE_TYPE_DIRECTORY" if path.is_dir() else "FILE_TYPE_FILE",
            }
            | ({"isSymlink": True, "symlinkTarget": "?"} if path.is_symlink() else {})
            for path in top.rglob("*")
        ]
        return web.json_response({"entries": entries})

    async def command(self, request: web.Request) -> web.StreamResponse:
        frame = await request.read()
        start = json.loads(frame[5:])["process"]
        machine = request["machine"]
        response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        await response.prepare(request)

        async def say(message: dict[str, Any], flags: int = 0) -> None:
            data = json.dumps(message).encode()
            await response.write(struct.pack(">BI", flags, len(data)) + data)

        # The stand-in for a file system of its own: absolute paths of the machine are spelt out.
        line = start["args"][-1].replace("/tmp/", f"{machine.root}/tmp/")
        process = await asyncio.create_subprocess_exec(
            *("/bin/bash", "-c", line),
            cwd=machine.path(start["cwd"]),
            env=os.environ
            | {name: str(machine.path(path)) for name, path in start["envs"].items()},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        machine.commands.append(process.pid)
        await say({"event": {"start": {"pid": process.pid}}})
        out, err = await process.communicate()
        for name, data in (("stdout", out), ("stderr", err)):
            await say({"event": {"data": {name: base64.b64encode(data).decode()}}})
        code = process.returncode or 0
        end = {"exitCode": max(code, -1), "exited": code >= 0, "status": f"exit status {code}"}
        await say({"event": {"end": end | ({"error": f"signal: {-code}"} if code < 0 else {})}})
        await say({}, flags=2)
        return response

    async def new_context(self, request: web.Request) -> web.Response:
        cwd = (await request.json())["cwd"]
        kernel = Kernel(request["machine"].path(cwd))
        await kernel.start()
        id = str(uuid.uuid4())
        request["machine"].contexts[id] = kernel
        return web.json_response({"id": id, "language": "python", "cwd": cwd})

    async def drop_context(self, request: web.Request) -> web.Response:
        await request["machine"].contexts.pop(request.match_info["context"]).stop()
        return web.Response(status=204)

    async def execute(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        response = web.StreamResponse()
        await response.prepare(request)
        await request["machine"].contexts[body["context_id"]].execute(body["code"], response)
        return response

    async def state(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"alive": list(self.machines), "calls": self.calls, "created": self.created}
        )

    async def plan_fault(self, request: web.Request) -> web.Response:
        self.faults.append((await request.json())["call"])
        return web.Response()


async def serve() -> None:
    """Serve on a free loopback port until standard input closes."""
    server = Server()
    runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    sys.stdout.write(f"http://127.0.0.1:{runner.addresses[0][1]}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    for machine in list(server.machines.values()):
        await machine.stop()
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve())
