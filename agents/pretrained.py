"""What is read of a model's folder without loading its weights."""

import os
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from turngym.errors import ConfigError

__all__ = ["load_tokenizer"]


def load_tokenizer(path: str | os.PathLike[str]) -> Any:
    """Load a tokenizer alone.

    Args:
        path: a folder (nothing is looked up elsewhere), or a hub id.

    Raises:
        ConfigError: there is none.
    """
    local = Path(path).is_dir()
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=local)
    except (OSError, ValueError) as error:
        where = "folder" if local else "hub id (no folder of that name exists here)"
        raise ConfigError(
            f"cannot load a tokenizer from {where} {str(path)!r}: {error}; name another with "
            "--tokenizer"
        ) from error
