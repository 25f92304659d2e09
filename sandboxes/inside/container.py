"""The driver of a container: init as its PID 1, spoken to over stdin and stdout."""

from typing import Any, NoReturn

from turngym.sandboxes.inside.confine import Confinement
from turngym.sandboxes.inside.init import Init, protect

__all__ = ["main"]


def main(config: dict[str, Any]) -> NoReturn:
    """Serve one session until stdin closes.

    Args:
        config: nothing so far; limits and workspace come in the first frame.
    """
    protect()
    # RLIMIT_NPROC counts every process of the uid on the machine, other containers included.
    confinement = Confinement(count_processes=False)
    Init(0, 1, confinement.apply, isolated=True).run()
