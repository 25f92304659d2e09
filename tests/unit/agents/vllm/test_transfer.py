import base64
import pickle
import time
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from fake_vllm import FakeVLLM, fail, serving

from turngym.agents.config import EngineConfig
from turngym.agents.vllm_server import ServerBackend
from turngym.agents.vllm_transfer import GpuTransfer, ServerControl, Tensors
from turngym.errors import EngineError, MissingDependencyError, WeightSyncError


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


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.full((2, 3), value)), ("b", torch.full((4,), value))]


def test_workers_of_all_servers_join_with_ranks_of_their_own_and_once() -> None:
    with serving(2) as servers:
        servers[0].workers, servers[1].workers = 2, 3
        backend = connect(servers)
        sender = transfer(backend)
        sender.send(weights(1.0))
        sender.send(weights(2.0))
        joined = [
            body["init_info"] for one in servers for path, body in one.transfers if "init" in path
        ]
        assert [info["world_size"] for info in joined] == [6, 6]
        offsets = {
            info["rank_offset"]: one.workers for info, one in zip(joined, servers, strict=True)
        }
        first, second = sorted(offsets)
        assert (first, second) == (1, 1 + offsets[first])
        for one in servers:
            assert [path for path, _ in one.transfers].count("/finish_weight_update") == 2
            assert not one.is_paused
        backend.close()


def test_handles_travel_as_text() -> None:
    with serving() as (server,):
        backend = connect([server])
        transfer(backend).send(weights(1.0))
        sent = [body["update_info"] for path, body in server.transfers if path == "/update_weights"]
        assert [info["names"] for info in sent] == [["a"], ["b"]]
        handles = [pickle.loads(base64.b64decode(info["ipc_handles_pickled"])) for info in sent]
        assert handles == [tensor.tolist() for _, tensor in weights(1.0)]
        backend.close()


class Stuck(Wire):
    def send_weights(self) -> None:
        self.client.start_weight_update()
        time.sleep(2)


class Broken(Wire):
    def send_weights(self) -> None:
        self.client.start_weight_update()
        raise RuntimeError("NCCL says no")


@pytest.mark.parametrize(
    ("kind", "says"), [(Stuck, "took more than 0.3 s"), (Broken, "NCCL says no")]
)
def test_a_transfer_that_fails_is_ended_and_begun_anew(kind: Any, says: str) -> None:
    with serving() as (server,):
        backend = connect([server])
        made: list[str] = []

        def choose(*args: Any, **kwargs: Any) -> Any:
            made.append("bad" if not made else "good")
            return (kind if made == ["bad"] else Wire)(*args, **kwargs)

        sender = transfer(backend, choose, timeout_s=0.3)
        with pytest.raises(WeightSyncError, match=says):
            sender.send(weights(1.0))
        assert not server.is_paused
        assert server.transfers[-1][0] == "/shutdown_weight_transfer_engine"
        sender.send(weights(1.0))
        assert made == ["bad", "good"]
        backend.close()


def test_a_refusal_keeps_the_servers_words() -> None:
    with serving() as (server,):
        backend = connect([server])
        server.faults["/init_weight_transfer_engine"] = [
            fail(500, "Weight transfer not configured")
        ]
        with pytest.raises(EngineError, match="Weight transfer not configured"):
            transfer(backend).send(weights(1.0))
        backend.close()


def test_settings_choose_the_way_weights_take() -> None:
    with serving() as (server,):
        engine = EngineConfig(kind="vllm", urls=(server.url,), transfer="nccl", timeout_s=5.0)
        backend = ServerBackend(engine)
        if find_spec("vllm") is None:
            with pytest.raises(MissingDependencyError, match=r"engine.transfer='nccl' needs vLLM"):
                backend.load(weights(1.0), version=1)
        backend.close()
