"""The watcher's own program: standard library only, run by path in an interpreter of its own.

    python -I -S watcher_program.py OWNER_PID LABEL unix PATH | tcp HOST PORT

Standard input is a pipe from the owner. It writes a line ``+NAME`` before it asks for a container,
``-NAME`` once the engine has answered, and ``.`` when it has removed everything itself.
"""

import contextlib
import json
import os
import select
import socket
import sys
import time

_PAUSE_S = 0.05
_REMOVAL_S = 30.0
_LANDING_S = 10.0
"""How long a container that was asked for when the owner died may take to appear."""


def await_end(owner: int) -> set[str] | None:
    """Wait for the owner's end; returns the names asked for and not answered, None if all is done.

    A fork of the owner keeps the pipe open without being the owner, hence its PID.
    """
    poll = select.poll()
    poll.register(0, select.POLLIN)
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            poll.register(os.pidfd_open(owner), select.POLLIN)
    asked: set[str] = set()
    rest = b""
    while True:
        is_said = 0 in dict(poll.poll())
        data = os.read(0, 4096) if is_said else b""
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            word, name = line[:1], line[1:].decode("ascii")
            if word == b".":
                return None
            asked = asked | {name} if word == b"+" else asked - {name}
        if not data:
            return asked


def remove_all(label: str, address: list[str], asked: set[str]) -> None:
    """Remove the containers with `label` until none is listed and none can appear any more."""
    start = time.monotonic()
    while True:
        took_s = time.monotonic() - start
        with contextlib.suppress(OSError, ValueError):
            left = _listed(label, address)
            asked = asked - left.keys()
            if not left and (not asked or took_s > _LANDING_S):
                return
            for container in left.values():
                _request("DELETE", f"/containers/{container}?force=1&v=1", address)
        if took_s > _REMOVAL_S:
            return
        time.sleep(_PAUSE_S)


def _listed(label: str, address: list[str]) -> dict[str, str]:
    """Ids of the containers by name."""
    filters = json.dumps({"label": [label]}, separators=(",", ":"))
    quoted = "".join(c if c.isalnum() else f"%{ord(c):02X}" for c in filters)
    answer = _request("GET", f"/containers/json?all=1&filters={quoted}", address)
    return {one["Names"][0].lstrip("/"): one["Id"] for one in json.loads(answer)}


def _request(method: str, path: str, address: list[str]) -> bytes:
    """Send a request and return the body; HTTP/1.0 needs neither chunks nor kept connections."""
    kind, *where = address
    if kind == "unix":
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_LANDING_S)
        connection.connect(where[0])
    else:
        connection = socket.create_connection((where[0], int(where[1])), _LANDING_S)
    with connection:
        connection.sendall(f"{method} {path} HTTP/1.0\r\nHost: engine\r\n\r\n".encode("ascii"))
        answer = b""
        while data := connection.recv(1 << 16):
            answer += data
    return answer.partition(b"\r\n\r\n")[2]


def main(owner: str, label: str, *address: str) -> None:
    """Watch, then clean up."""
    asked = await_end(int(owner))
    if asked is not None:
        remove_all(label, list(address), asked)


if __name__ == "__main__":
    main(*sys.argv[1:])
