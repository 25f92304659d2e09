"""Images for the `docker` backend: built from the Dockerfile, or imported where nothing can be.

Both ways talk to the engine that `DOCKER_HOST` names.
"""

import logging
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from turngym.errors import SandboxUnavailableError
from turngym.sandboxes.docker.engine import connect

__all__ = ["DEFAULT_IMAGE", "build_image"]

logger = logging.getLogger(__name__)

DEFAULT_IMAGE = "turngym-python:latest"


def build_image(
    tag: str = DEFAULT_IMAGE,
    *,
    base: str = "python:3.12-slim",
    packages: Sequence[str] = ("numpy", "sympy"),
    rootfs: Path | str | None = None,
) -> str:
    """Make the image that sessions run in, on the engine that `DOCKER_HOST` names.

    Args:
        tag: name of the image.
        base: image to start from; any with python3 (3.10 or newer), and pip if there are
            `packages`.
        packages: Python packages to install.
        rootfs: a tar file with a whole file system, imported in place of building; for engines
            that reach no registry (`scripts/docker_engine.sh rootfs` packs one).

    Returns:
        The id of the image.

    Raises:
        MissingDependencyError: the `docker` package is not installed.
        SandboxUnavailableError: no engine answers, or it cannot build the image.
    """
    client, _ = connect()
    try:
        if rootfs is not None:
            return _import(client, tag, Path(rootfs))
        return _build(client, tag, base, packages)
    finally:
        client.close()


def _import(client: Any, tag: str, rootfs: Path) -> str:
    repository, _, version = tag.partition(":")
    answer = client.import_image(src=str(rootfs), repository=repository, tag=version or "latest")
    if '"error"' in answer:
        raise SandboxUnavailableError(f"the engine cannot import {rootfs}: {answer.strip()}")
    return str(client.inspect_image(tag)["Id"])


def _build(client: Any, tag: str, base: str, packages: Sequence[str]) -> str:
    dockerfile = resources.files("turngym.sandboxes") / "images" / "Dockerfile"
    with resources.as_file(dockerfile) as path:
        steps = client.build(
            path=str(path.parent),
            tag=tag,
            buildargs={"BASE": base, "PACKAGES": " ".join(packages)},
            decode=True,
            rm=True,
            forcerm=True,
        )
        for step in steps:
            if "error" in step:
                raise SandboxUnavailableError(
                    f"the engine cannot build {tag}: {step['error']}; without a registry, "
                    "import a root file system with build_image(rootfs=...)"
                )
            logger.debug("%s", step.get("stream", "").rstrip())
    return str(client.inspect_image(tag)["Id"])
