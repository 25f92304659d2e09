import contextlib
import json
import os
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from turngym.sandboxes.docker.watcher import Watcher

OWNER = """
import sys, time
from turngym.sandboxes.docker.watcher import Watcher
watcher = Watcher("label=mine", sys.argv[1])
watcher.start()
with watcher.request("answered"):
    pass
with watcher.request("open"):
    print(watcher._process.pid, flush=True)
    {end}
"""


class Containers(BaseHTTPRequestHandler):
    """The two calls of an engine that the watcher makes."""

    labels: dict[str, str]

    def do_GET(self) -> None:
        filters = json.loads(parse_qs(urlsplit(self.path).query)["filters"][0])
        (label,) = filters["label"]
        names = [name for name, its in self.labels.items() if its == label]
        self.answer(json.dumps([{"Id": f"id-{name}", "Names": [f"/{name}"]} for name in names]))

    def do_DELETE(self) -> None:
        del self.labels[urlsplit(self.path).path.removeprefix("/containers/id-")]
        self.answer("")

    def answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def address_string(self) -> str:
        return "peer"

    def log_message(self, format: str, *args: object) -> None:
        return


class UnixHTTPServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


@pytest.fixture(params=["unix", "tcp"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    labels: dict[str, str] = {}
    handler = type("Handler", (Containers,), {"labels": labels})
    server: HTTPServer | UnixHTTPServer
    if request.param == "unix":
        server = UnixHTTPServer(str(tmp_path / "socket"), handler)
        url = f"http+unix://{tmp_path}/socket"
    else:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield url, labels
    server.shutdown()
    server.server_close()
    thread.join()


@contextlib.contextmanager
def owner(url: str, end: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-c", OWNER.format(end=end), url]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())


def within(seconds: float, holds: object) -> bool:
    assert callable(holds)
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(holds())


def is_gone(pid: int) -> bool:
    """Nobody collects an orphan's status at once, so a zombie counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_what_a_killed_owner_made_is_removed_and_nothing_else(
    engine: tuple[str, dict[str, str]],
) -> None:
    url, labels = engine
    labels |= {"answered": "label=mine", "open": "label=mine", "theirs": "label=other"}
    with owner(url, "time.sleep(60)") as (process, watcher):
        assert len(labels) == 3
        os.killpg(process.pid, signal.SIGKILL)
    assert within(2.0, lambda: labels == {"theirs": "label=other"})
    assert within(2.0, lambda: is_gone(watcher))


def test_a_container_that_appears_after_its_owner_is_dead_is_removed_too(
    engine: tuple[str, dict[str, str]],
) -> None:
    url, labels = engine
    with owner(url, "time.sleep(60)") as (process, watcher):
        process.kill()
    time.sleep(0.5)
    assert not is_gone(watcher)
    labels["open"] = "label=mine"
    assert within(2.0, lambda: not labels and is_gone(watcher))


def test_a_fork_that_outlives_its_owner_does_not_keep_the_containers(
    engine: tuple[str, dict[str, str]],
) -> None:
    url, labels = engine
    labels["open"] = "label=mine"
    end = "import os; fork = os.fork(); fork and print(fork, flush=True); time.sleep(60)"
    with owner(url, end) as (process, watcher):
        assert process.stdout is not None
        fork = int(process.stdout.readline())
        process.kill()
        try:
            assert within(2.0, lambda: not labels and is_gone(watcher))
        finally:
            os.kill(fork, signal.SIGKILL)


def test_a_dismissed_watcher_ends_at_once_and_removes_nothing(
    engine: tuple[str, dict[str, str]],
) -> None:
    url, labels = engine
    labels["mine"] = "label=mine"
    watcher = Watcher("label=mine", url)
    watcher.start()
    watcher.dismiss()
    watcher.dismiss()
    assert labels == {"mine": "label=mine"}
