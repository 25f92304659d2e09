"""Weights from GPU to GPU, through vLLM's registry of weight-transfer engines: NCCL, CUDA IPC.

Needs GPUs, and vLLM beside the trainer. Of the registry only the public interface is used:
`trainer_init` and `send_weights` here, and five routes of each server (`--weight-transfer-config
'{"backend": "nccl"}'`).
"""

import base64
import contextlib
import pickle
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol

from turngym.agents.http_client import HttpClient
from turngym.errors import EngineError, MissingDependencyError, WeightSyncError

__all__ = ["GpuTransfer", "ServerControl", "Tensors", "open_trainer"]


class Everywhere(Protocol):
    """Does a piece of work on all servers and waits; see `Fleet.everywhere`."""

    def __call__(
        self, work: Callable[[HttpClient], Awaitable[None]], *, heals: bool = False
    ) -> None: ...


class Parameter(NamedTuple):
    """What the other side must know before a tensor comes."""

    name: str
    dtype: Any
    shape: tuple[int, ...]


class Tensors:
    """The tensors of an update, as vLLM's `WeightSource` has them: read again at every update."""

    def __init__(self) -> None:
        self._named: dict[str, Any] = {}

    def set(self, named: Iterable[tuple[str, Any]]) -> None:
        """Send these from now on."""
        self._named = {name: tensor.detach() for name, tensor in named}

    def metadata(self) -> list[Parameter]:
        """Names, dtypes and shapes, in the order of iteration."""
        return [Parameter(n, one.dtype, tuple(one.shape)) for n, one in self._named.items()]

    def held_names(self) -> None:
        """All of them."""
        return None

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self._named.items())


class Trainer(Protocol):
    """Our side of vLLM's transfer, ready to send."""

    def send_weights(self) -> None:
        """Send what the source yields and see the update through."""
        ...


class ServerControl:
    """The control plane of several servers as that of one: vLLM's `VLLMWeightSyncClient`.

    Args:
        everywhere: reaches the servers.
        timeout_s: of a call.
    """

    def __init__(self, everywhere: Everywhere, *, timeout_s: float) -> None:
        self._everywhere = everywhere
        self._timeout_s = timeout_s
        self._sizes: dict[str, int] = {}

    def count_workers(self) -> int:
        """Return how many workers the servers have in all."""

        async def ask(client: HttpClient) -> None:
            told = await client.call("/get_world_size", timeout_s=self._timeout_s)
            self._sizes[client.url] = int(told["world_size"])

        self._sizes.clear()
        self._everywhere(ask, heals=True)
        return sum(self._sizes.values())

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let every worker join, each server's after those of the servers before it."""
        offsets, taken = {}, 0
        for url in sorted(self._sizes):
            offsets[url] = taken
            taken += self._sizes[url]

        def body(url: str) -> dict[str, Any]:
            moved = {"rank_offset": init_info["rank_offset"] + offsets[url]}
            return {"init_info": init_info | (moved if "rank_offset" in init_info else {})}

        self._post("/init_weight_transfer_engine", body)

    def start_weight_update(self) -> None:
        """Hold sampling and begin an update."""
        self._post("/pause?mode=keep", lambda _: {})
        self._post("/start_weight_update", lambda _: {})

    def update_weights(self, update_info: Any) -> None:
        """Announce tensors; returns when they have arrived."""
        self._post("/update_weights", lambda _: {"update_info": _plain(update_info)})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Put them in use and let sampling go on."""
        self._post("/finish_weight_update", lambda _: {"weight_version": weight_version})
        self._post("/resume", lambda _: {})

    def give_up(self) -> None:
        """After a failure: let sampling go on, and every worker leave. Best effort."""
        for path in ("/resume", "/shutdown_weight_transfer_engine"):
            with contextlib.suppress(EngineError):
                self._post(path, lambda _: {})

    def _post(self, path: str, body: Callable[[str], Mapping[str, Any]]) -> None:
        async def post(client: HttpClient) -> None:
            await client.call(path, body(client.url), timeout_s=self._timeout_s)

        self._everywhere(post)


OpenTrainer = Callable[..., Trainer]


class GpuTransfer:
    """Sends weights; joins the servers' workers at the first update, and again after a failure.

    Args:
        kind: `nccl` between GPUs, `ipc` on one GPU that trainer and server share.
        control: the servers.
        timeout_s: seconds an update may take.
        connect: makes our side; None = `open_trainer`.
    """

    def __init__(
        self,
        kind: Literal["nccl", "ipc"],
        control: ServerControl,
        *,
        timeout_s: float,
        connect: OpenTrainer | None = None,
    ) -> None:
        self._kind = kind
        self._control = control
        self._timeout_s = timeout_s
        self._open = connect or open_trainer
        self._source = Tensors()
        self._trainer: Trainer | None = None

    def send(self, named: Iterable[tuple[str, Any]]) -> None:
        """Bring tensors to every worker and put them in use.

        Raises:
            WeightSyncError: it failed, or took too long.
            MissingDependencyError: vLLM is not installed here.
        """
        self._source.set(named)
        failure: list[BaseException] = []

        def work() -> None:
            try:
                if self._trainer is None:
                    self._trainer = self._open(
                        self._kind,
                        client=self._control,
                        source=self._source,
                        workers=self._control.count_workers(),
                    )
                self._trainer.send_weights()
            except BaseException as error:
                failure.append(error)

        # A collective that a worker does not enter cannot be cancelled: its thread is abandoned.
        thread = threading.Thread(target=work, name=f"turngym-{self._kind}", daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        if thread.is_alive() or failure:
            self._trainer = None
            self._control.give_up()
        if thread.is_alive():
            raise WeightSyncError(
                f"the {self._kind} transfer took more than {self._timeout_s:g} s; a worker may not "
                "have joined: are its GPU and port reachable from here?"
            )
        if failure:
            (error,) = failure
            if isinstance(error, (EngineError, MissingDependencyError)):
                raise error
            raise WeightSyncError(f"the {self._kind} transfer failed: {error}") from error


def open_trainer(
    kind: Literal["nccl", "ipc"], *, client: ServerControl, source: Tensors, workers: int
) -> Trainer:
    """Make our side of a transfer with vLLM's own classes.

    Raises:
        MissingDependencyError: vLLM is not installed, or is one without these classes.
    """
    try:
        from vllm.distributed.weight_transfer import ipc_engine, nccl_engine
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    except ImportError as error:
        raise MissingDependencyError(
            f"engine.transfer={kind!r} needs vLLM 0.32 beside the trainer (pip install "
            f"'turngym[vllm]'): {error}"
        ) from error
    if kind == "ipc":
        info: Any = ipc_engine.IPCTrainerInitInfo(rank=0)
    else:
        address = socket.gethostbyname(socket.gethostname())
        info = nccl_engine.NCCLTrainerInitInfo(
            master_address=address, master_port=_free_port(), world_size=workers + 1, rank=0
        )
    trainer: Trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    return trainer


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _plain(update: Any) -> Any:
    """Write CUDA handles as text, as servers with VLLM_ALLOW_INSECURE_SERIALIZATION=1 read them."""
    if isinstance(update, list):
        return [_plain(one) for one in update]
    handles = update.get("ipc_handles")
    rest = {name: value for name, value in update.items() if name != "ipc_handles"}
    if handles is None:
        return rest
    return rest | {"ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode()}
