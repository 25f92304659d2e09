"""The child end of an isolated engine: `python -m turngym.agents.vllm_child DESCRIPTOR PARENT`.

It holds a backend of its own and speaks with `IsolatedBackend` in pickled lists of tuples. It ends
with its parent, however that ends.
"""

import contextlib
import ctypes
import importlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Protocol

from turngym.agents.vllm_backend import Backend, Sample, SampleRequest
from turngym.errors import EngineError, TurngymError

__all__ = ["Outbox", "SteppedBackend", "send_batches"]

BEAT_S = 1.0
"""Seconds between two signs of life."""

Outbox = queue.SimpleQueue[list[Any] | None]
"""Batches of messages to send; None = the end."""


class SteppedBackend(Backend, Protocol):
    """A backend that shows whether it is alive."""

    @property
    def steps(self) -> int:
        """Steps taken so far."""
        ...


def send_batches(connection: Connection, outbox: Outbox) -> None:
    """Send what is queued, all there is at once, until a None; the other end may be gone."""
    with contextlib.suppress(OSError):
        while (batch := outbox.get()) is not None:
            while not outbox.empty():
                more = outbox.get()
                if more is None:
                    connection.send(batch)
                    return
                batch += more
            connection.send(batch)


class _Child:
    """The other end: a backend that answers messages."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._outbox: Outbox = queue.SimpleQueue()
        self._futures: dict[int, Future[Sample]] = {}
        threading.Thread(target=send_batches, args=(connection, self._outbox), daemon=True).start()

    def run(self) -> None:
        """Answer until told to close or until the other end is gone."""
        _, factory, engine, spec, files, held = self._connection.recv()[0]
        module, _, name = factory.partition(":")
        try:
            backend = getattr(importlib.import_module(module), name)(engine, spec)
            if held is not None:
                self._load(backend, files, *held)
        except Exception as error:
            self._connection.send([("failed", _portable(error))])
            return
        self._outbox.put([("ready", backend.max_context, backend.vocab, backend.version)])
        threading.Thread(target=self._beat, args=(backend,), daemon=True).start()
        while True:
            for kind, *content in self._connection.recv():
                if kind == "close":
                    return
                getattr(self, f"_on_{kind}")(backend, files, *content)

    def _on_sample(
        self, backend: Backend, files: Sequence[int], number: int, request: SampleRequest
    ) -> None:
        try:
            future = backend.submit(request)
        except EngineError as error:
            self._outbox.put([("answer", number, error)])
            return
        self._futures[number] = future
        future.add_done_callback(partial(self._deliver, number))

    def _deliver(self, number: int, future: "Future[Sample]") -> None:
        self._futures.pop(number, None)
        if not future.cancelled():
            error = future.exception()
            value = future.result() if error is None else _portable(error)
            self._outbox.put([("answer", number, value)])

    def _on_cancel(self, backend: Backend, files: Sequence[int], number: int) -> None:
        if (future := self._futures.get(number)) is not None:
            future.cancel()

    def _on_call(
        self, backend: Backend, files: Sequence[int], number: int, name: str, *arguments: Any
    ) -> None:
        work: Callable[[], Any] = backend.interrupt
        if name == "load":
            work = partial(self._load, backend, files, *arguments)
        try:
            value = work()
        except Exception as error:
            value = _portable(error)
        self._outbox.put([("answer", number, value)])

    @staticmethod
    def _load(backend: Backend, files: Sequence[int], which: int, version: int) -> int:
        from safetensors.torch import load_file

        tensors = load_file(f"/proc/self/fd/{files[which]}")
        backend.load(list(tensors.items()), version=version)
        return backend.version

    def _beat(self, backend: SteppedBackend) -> None:
        while True:
            self._outbox.put([("beat", backend.steps)])
            time.sleep(BEAT_S)


def _portable(error: BaseException) -> BaseException:
    """Return an error that pickles."""
    if isinstance(error, TurngymError):
        return type(error)(str(error))
    return EngineError(f"{type(error).__name__}: {error}")


def _die_with(parent: int) -> None:
    """Be killed when the parent is, however it ends."""
    set_death_signal = 1
    ctypes.CDLL(None, use_errno=True).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Be the child: `python -m turngym.agents.vllm_child DESCRIPTOR PARENT`."""
    _die_with(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, OSError):
        _Child(connection).run()
    # Not by way of the interpreter: an engine that hangs must not keep it.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
