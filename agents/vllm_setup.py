"""How vLLM is started: its arguments, its environment, and what it leaves behind undone."""

import contextlib
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from turngym.agents.config import EngineConfig
from turngym.agents.vllm_backend import EngineSpec
from turngym.errors import ConfigError

__all__ = ["engine_args", "vllm_environment"]

_BATCHED_TOKENS = 4096
"""Most tokens of one step on a CPU, at least a whole context: prompts are not split there."""

_CPU_BLOCK = 32
"""Tokens of a block of the prefix cache on a CPU. vLLM's 128 would miss most of a turn."""

_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM makes room for."""

_QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}
"""Environment variables set unless the user has."""


def engine_args(engine: EngineConfig, spec: EngineSpec, *, is_cpu: bool) -> dict[str, Any]:
    """Return the arguments of vLLM's engine.

    Raises:
        ConfigError: they ask for what vLLM cannot do.
    """
    if spec.deterministic and not is_cpu:
        raise ConfigError("deterministic sampling needs vLLM on a CPU, this one runs on a GPU")
    args: dict[str, Any] = {
        "model": str(spec.model_path),
        "skip_tokenizer_init": True,
        "dtype": spec.dtype,
        "seed": spec.seed,
        "max_model_len": spec.max_context,
        "max_num_seqs": spec.rows,
        # Of the distribution that is sampled from, temperature applied.
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": max(1, spec.topk),
        # What is cached was computed beside other rows than what is computed anew.
        "enable_prefix_caching": not spec.deterministic,
        "worker_extension_cls": "turngym.agents.vllm_worker.WeightReceiver",
        "disable_log_stats": True,
        "generation_config": "vllm",
        "use_tqdm_on_load": False,
    }
    if is_cpu:
        args |= {
            "enforce_eager": True,
            # Its kernels cannot go on with a seeded draw in the middle of a prompt.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(_BATCHED_TOKENS, _context(spec)),
            "kv_cache_memory_bytes": int(engine.kv_gib * 2**30),
            "block_size": _CPU_BLOCK,
        }
    else:
        args["gpu_memory_utilization"] = engine.gpu_memory
    if spec.lora_rank:
        if spec.lora_rank > _LORA_RANKS[-1]:
            raise ConfigError(f"vLLM takes adapters up to rank 512, got {spec.lora_rank}")
        args |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_cpu_loras": 2,
            "max_lora_rank": next(rank for rank in _LORA_RANKS if rank >= spec.lora_rank),
        }
    return args


def _context(spec: EngineSpec) -> int:
    if spec.max_context is not None:
        return spec.max_context
    from transformers import AutoConfig

    return int(
        AutoConfig.from_pretrained(spec.model_path).get_text_config().max_position_embeddings
    )


@contextlib.contextmanager
def vllm_environment(*, deterministic: bool) -> Iterator[None]:
    """Start vLLM with the environment it needs, and undo what it does to its process."""
    environment = dict(os.environ)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    set_num_threads, excepthook = torch.set_num_threads, sys.excepthook
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if deterministic:
        # Splitting the keys of a long context among threads makes a sum depend on the batch.
        os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
    try:
        yield
    finally:
        torch.set_num_threads, sys.excepthook = set_num_threads, excepthook
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        os.environ.clear()
        os.environ.update(environment)
