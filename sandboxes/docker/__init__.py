"""The `docker` backend: one container per session, through the `docker` SDK."""

from turngym.sandboxes.docker.image import build_image

__all__ = ["build_image"]
