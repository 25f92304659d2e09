"""Weights on their way to vLLM: what names and shapes must be, and files that hold them."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from turngym.errors import ConfigError, WeightSyncError

__all__ = ["check_adapter", "check_weights", "trainer_shapes", "write_adapter", "write_weights"]

Named = Sequence[tuple[str, Any]]

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_PEFT = "base_model.model."


def trainer_shapes(model_path: Path) -> dict[str, tuple[int, ...]]:
    """Return the parameters that a trainer's model of this folder has, tied ones once.

    Raises:
        ConfigError: the folder holds no causal language model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model_path, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot read a causal LM in {str(model_path)!r}: {error}") from error
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def check_weights(named: Named, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that these are all weights of a model, before an engine's are touched.

    Raises:
        WeightSyncError: one is unknown, missing, or of another shape; the message names it.
    """
    pushed = {name: tuple(tensor.shape) for name, tensor in named}
    for name, shape in pushed.items():
        if name not in shapes:
            hint = "; this engine was opened for full weights" if ".lora_" in name else ""
            raise WeightSyncError(f"pushed {name!r}, which the engine's model does not have{hint}")
        if shape != shapes[name]:
            raise WeightSyncError(
                f"pushed {name!r} of shape {shape}, the engine's model has {shapes[name]}"
            )
    if missing := [name for name in shapes if name not in pushed]:
        raise WeightSyncError(
            f"{len(missing)} of {len(shapes)} weights were not pushed, such as {missing[0]!r}; "
            "push them all (frozen ones too), or train adapters"
        )


def check_adapter(named: Named, rank: int) -> None:
    """Check that these are adapters that fit an engine opened for a rank.

    Raises:
        WeightSyncError: one is none, or its rank is larger; the message names it.
    """
    for name, tensor in named:
        is_a, is_b = ".lora_A." in name, ".lora_B." in name
        if not is_a and not is_b:
            raise WeightSyncError(
                f"pushed {name!r} to an engine opened for adapters (lora_rank={rank}): push the "
                "peft model's lora_A and lora_B tensors only, or open it with lora_rank=0"
            )
        own = tensor.shape[0 if is_a else 1]
        if own != rank:
            raise WeightSyncError(
                f"pushed {name!r} of rank {own}, the engine was opened for lora_rank={rank}"
            )


def write_weights(path: str | Path, named: Named) -> None:
    """Write weights as a safetensors file, in place: the path may be that of a descriptor.

    Raises:
        WeightSyncError: there is no room for it, or it cannot be written.
    """
    entries: dict[str, Any] = {}
    end = 0
    for name, tensor in named:
        start, end = end, end + tensor.numel() * tensor.element_size()
        if tensor.dtype not in _DTYPES:
            raise WeightSyncError(f"pushed {name!r} of {tensor.dtype}, which engines do not take")
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    try:
        with open(path, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for _, tensor in named:
                plain = tensor.detach().to("cpu").contiguous()
                file.write(plain.reshape(-1).view(torch.uint8).numpy())
    except OSError as error:
        raise WeightSyncError(
            f"cannot write {end / 2**20:.1f} MiB of weights to {path}: {error}; the old weights "
            "stay in use"
        ) from error


def write_adapter(folder: Path, named: Named, *, rank: int, alpha: float) -> None:
    """Write adapters as `PeftModel.save_pretrained` does.

    Args:
        folder: exists, and is empty.
        named: under peft's names, such as `base_model.model.….lora_A.default.weight`.
        rank: of the adapters.
        alpha: their product is scaled by alpha / rank.

    Raises:
        WeightSyncError: there is no room for it, or it cannot be written.
    """
    plain = [(_adapter_name(name), tensor) for name, tensor in named]
    modules = {name.removeprefix(_PEFT).split(".lora_")[0].split(".")[-1] for name, _ in plain}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
    }
    write_weights(folder / "adapter_model.safetensors", plain)
    try:
        (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    except OSError as error:
        raise WeightSyncError(f"cannot write the adapter's settings: {error}") from error


def _adapter_name(name: str) -> str:
    """Drop peft's name of the adapter: `….lora_A.default.weight` is stored as `….lora_A.weight`."""
    stem, _, rest = name.partition(".lora_")
    letter, *_ = rest.split(".")
    return f"{stem}.lora_{letter}.weight"


def scratch_root() -> str | None:
    """Return a folder in memory for short-lived files; None = the system's temporary folder."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
