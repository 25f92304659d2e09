import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_vllm import serving
from safetensors.torch import load_file

from turngym.agents.base import Sampling
from turngym.agents.config import EngineConfig
from turngym.agents.handover import Handover
from turngym.agents.vllm_backend import SampleRequest
from turngym.agents.vllm_server import ServerBackend
from turngym.errors import WeightSyncError

WEIGHTS = [("a", torch.arange(6.0).reshape(2, 3))]
ADAPTER = [
    (f"base_model.model.table.lora_{letter}.default.weight", torch.ones(shape))
    for letter, shape in (("A", (2, 16)), ("B", (16, 2)))
]


def test_a_file_of_weights_is_gone_once_it_was_read(tmp_path: Path) -> None:
    handover = Handover(tmp_path)
    with handover.weights(WEIGHTS, 3) as path:
        assert torch.equal(load_file(path)["a"], WEIGHTS[0][1])
    assert not path.exists()
    handover.close()
    handover.close()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_is_removed_and_a_living_ones_kept(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from turngym.agents.handover import Handover\n"
        "print(Handover(Path(sys.argv[1])).folder, flush=True)\n"
        "sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[4] / "src")},
    )
    assert other.stdin is not None
    assert other.stdout is not None
    folder = Path(other.stdout.readline().strip())
    Handover(tmp_path).close()
    assert folder.is_dir()
    other.send_signal(signal.SIGKILL)
    other.wait(10)
    other.stdin.close()
    other.stdout.close()
    assert folder.is_dir()
    Handover(tmp_path).close()
    assert not folder.exists()


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    handover = Handover(tmp_path)
    (handover.folder / "weights-1.safetensors").symlink_to("/dev/full")
    with (
        pytest.raises(WeightSyncError, match="cannot write"),
        handover.weights(WEIGHTS, 1),
    ):
        pass
    assert [path.name for path in handover.folder.iterdir()] == ["owner"]
    handover.close()


def test_a_folder_that_cannot_be_is_named_with_its_setting(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match=r"engine\.folder"):
        Handover(tmp_path / "missing")


def test_adapters_that_cannot_be_written_leave_the_old_ones_in_use(tmp_path: Path) -> None:
    def sample(backend: ServerBackend) -> list[float]:
        request = SampleRequest(ids=[1], sampling=Sampling(max_tokens=8), seed=1, version=1)
        found: list[float] = backend.submit(request).result(10).logp.tolist()
        return found

    with serving() as (server,):
        engine = EngineConfig(kind="vllm", urls=(server.url,), folder=tmp_path, timeout_s=5.0)
        backend = ServerBackend(engine)
        backend.load(ADAPTER, version=1)
        before = sample(backend)
        (folder,) = tmp_path.iterdir()
        shutil.rmtree(folder)
        with pytest.raises(WeightSyncError, match="cannot write"):
            backend.load(ADAPTER, version=2)
        assert backend.version == 1
        assert sample(backend) == before
        backend.close()
