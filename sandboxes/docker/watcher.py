"""A small process beside the owner of containers, which removes them when the owner is killed.

A container ends with its owner's connection only once its PID 1 runs. One that was made and not
yet started, or is being made, would stay. So whoever makes containers has a watcher: it is in a
session of its own, reached by no signal to the owner's process group, and ends when its work is
done.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

__all__ = ["Watcher"]

_PROGRAM = Path(__file__).with_name("watcher_program.py")
_END_S = 5.0


class Watcher:
    """A watcher of this process's containers that carry one label.

    Args:
        label: `name=value`.
        engine: where the engine listens: ``http+unix:///path`` or ``http://host:port``.
    """

    def __init__(self, label: str, engine: str) -> None:
        url = urlsplit(engine)
        is_unix = url.scheme.endswith("unix")
        where = ["unix", url.path] if is_unix else ["tcp", url.hostname, url.port]
        words = [_PROGRAM, os.getpid(), label, *where]
        self._command = [sys.executable, "-I", "-S", *map(str, words)]

    def start(self) -> None:
        """Start the process; to be called before the first request."""
        theirs, ours = os.pipe()
        os.set_blocking(ours, False)
        self._pipe = os.fdopen(ours, "wb", buffering=0)
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        except BaseException:
            self._pipe.close()
            raise
        finally:
            os.close(theirs)

    @contextlib.contextmanager
    def request(self, name: str) -> Iterator[None]:
        """Cover the request for the container `name`, whose answer a killed owner will not get."""
        self._tell(f"+{name}\n")
        try:
            yield
        finally:
            self._tell(f"-{name}\n")

    def _tell(self, line: str) -> None:
        # Somebody may have killed or stopped the watcher; the next owner cleans up then.
        with contextlib.suppress(BrokenPipeError):
            self._pipe.write(line.encode("ascii"))

    def dismiss(self) -> None:
        """End the watcher once no container is left. Idempotent; blocks for milliseconds."""
        if self._pipe.closed:
            return
        self._tell(".\n")
        self._pipe.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
