"""What the worker processes of `turngym.rewards.equivalence` import, once, before they fork."""

import logging

from turngym.rewards.maths import symbolic
from turngym.rewards.maths.grade import grade

__all__ = ["grade", "symbolic"]

# math-verify warns on every call that it was asked to use no timer.
logging.getLogger("math_verify").setLevel(logging.ERROR)
