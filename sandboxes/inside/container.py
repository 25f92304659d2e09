"""The driver of a container: init as its PID 1, spoken to over stdin and stdout."""

import os
import select
from typing import Any, NoReturn

from turngym.sandboxes.inside.confine import Confinement
from turngym.sandboxes.inside.init import Init, protect

__all__ = ["main"]

_FIRST_WORD_S = 60.0


def main(config: dict[str, Any]) -> NoReturn:
    """Serve one session until stdin closes.

    Args:
        config: nothing so far; limits and workspace come in the first frame.
    """
    if not select.select([0], [], [], _FIRST_WORD_S)[0]:
        # The host died while the engine was starting us: engines lose such an early end of stdin.
        os._exit(0)
    protect()
    # RLIMIT_NPROC counts every process of the uid on the machine, other containers included.
    confinement = Confinement(count_processes=False)

    def confine(limits: dict[str, Any]) -> None:
        # Init shares the container's processor and memory limits with the worker: it must be the
        # first to run, so that it can end a fork bomb, and the last to be killed.
        os.nice(19)
        confinement.apply(limits)
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")

    Init(0, 1, confine, isolated=True).run()
