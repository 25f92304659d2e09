from typing import Any

from fake_vllm import FakeVLLM

from turngym.agents.config import EngineConfig
from turngym.agents.vllm_server import ServerBackend
from turngym.agents.vllm_transfer import GpuTransfer, ServerControl, Tensors


class Wire:
    """Our side of a transfer, without GPUs: sends the numbers themselves."""

    def __init__(self, kind: str, *, client: ServerControl, source: Tensors, workers: int) -> None:
        self.client, self.source, self.workers = client, source, workers
        self.client.init_weight_transfer_engine({"rank_offset": 1, "world_size": workers + 1})

    def send_weights(self) -> None:
        self.client.start_weight_update()
        for meta, (name, tensor) in zip(self.source.metadata(), self.source, strict=True):
            assert meta == (name, tensor.dtype, tuple(tensor.shape))
            self.client.update_weights({"names": [name], "ipc_handles": tensor.tolist()})
        self.client.finish_weight_update()


def transfer(backend: ServerBackend, connect: Any = Wire, timeout_s: float = 5.0) -> GpuTransfer:
    control = ServerControl(backend.everywhere, timeout_s=timeout_s)
    return GpuTransfer("nccl", control, timeout_s=timeout_s, connect=connect)


def connect(servers: list[FakeVLLM]) -> ServerBackend:
    urls = tuple(one.url for one in servers)
    return ServerBackend(EngineConfig(kind="vllm", urls=urls, timeout_s=5.0))
