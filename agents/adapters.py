"""Folders that hold an adapter instead of a model: find the base, merge the two."""

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from torch import nn

from turngym.errors import ConfigError, MissingDependencyError

__all__ = ["find_base", "import_peft", "is_adapter", "merge_adapter", "quiet_peft"]

_SETTINGS = "adapter_config.json"


def import_peft() -> Any:
    """Return the peft package.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise MissingDependencyError(
            "LoRA needs peft: install it with `pip install turngym[peft]`"
        ) from error
    return peft


def quiet_peft() -> None:
    """Within `warnings.catch_warnings`: peft reads an attribute that transformers has renamed."""
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)


def is_adapter(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds an adapter, as `PeftModel.save_pretrained` writes it."""
    return Path(path, _SETTINGS).is_file()


def find_base(folder: str | os.PathLike[str]) -> str:
    """Return the folder, or else the hub id, of the model that an adapter belongs to.

    A relative path was written in another working directory, so it is also tried from the
    adapter's folder and each one above it. Then comes `base` in that folder or in one of the two
    above it, so that a run can be moved together with its base.

    Raises:
        ConfigError: the adapter does not say what it belongs to.
    """
    settings = Path(folder, _SETTINGS)
    name = json.loads(settings.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not name:
        raise ConfigError(f"{settings} has no base_model_name_or_path; write the base's path there")
    home = Path(folder).resolve()
    for place in _places(home, name):
        if place.resolve() != home and (is_adapter(place) or (place / "config.json").is_file()):
            return str(place)
    return str(name)


def _places(home: Path, name: str) -> Iterator[Path]:
    homes = [home, *home.parents]
    yield Path(name)
    yield from (place / name for place in homes)
    yield from (place / "base" for place in homes[:3])


def merge_adapter(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Add an adapter to the weights of its base, which is changed and returned.

    Args:
        model: the base, a causal LM.
        folder: holds the adapter.

    Raises:
        ConfigError: the adapter does not fit the model or cannot be merged.
        MissingDependencyError: peft is not installed.
    """
    peft = import_peft()
    try:
        with warnings.catch_warnings():
            quiet_peft()
            adapted = peft.PeftModel.from_pretrained(model, str(folder))
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the adapter in {str(folder)!r} does not fit its base "
            f"{getattr(model, 'name_or_path', '')!r}: {error}"
        ) from error
    if not hasattr(adapted.base_model, "merge_and_unload"):
        kind = adapted.active_peft_config.peft_type.value
        raise ConfigError(f"an adapter of type {kind} cannot be merged; {str(folder)!r} holds one")
    merged = cast(Any, adapted.merge_and_unload(safe_merge=True)).requires_grad_(True)
    # An adapter trained on top must name this folder, not the base without this adapter.
    merged.name_or_path = merged.config.name_or_path = str(folder)
    return cast(nn.Module, merged)
