"""The `docker` backend: one container per session, through the `docker` SDK.

The container's PID 1 is our own init, spoken to over the attached standard input and output, so a
cell costs a round trip and no process. When that connection ends, for whatever reason, init ends,
and the engine removes the container: a trainer killed by SIGKILL leaves nothing behind.
"""

from turngym.sandboxes.docker.backend import DockerSandbox
from turngym.sandboxes.docker.image import DEFAULT_IMAGE, build_image
from turngym.sandboxes.docker.session import DockerSession

__all__ = ["DEFAULT_IMAGE", "DockerSandbox", "DockerSession", "build_image"]
