"""The `e2b` backend: one cloud sandbox (a micro-VM) per session, through `e2b-code-interpreter`.

The SDK is used for what it does well and guarded where it is known to mislead:

* Its time-out of a cell is a time-out of the HTTP request, so the clock here is asyncio's. Giving
  up closes the stream, upon which the service interrupts the kernel; a probe then tells whether
  the variables survived, and a new kernel takes over where they did not.
* `TimeoutException` stands for a slow cell, a slow request and a dead sandbox alike; which of them
  it was is asked of the service before anything is blamed.
* Output is collected in callbacks, which keep head and tail and end a cell that prints too much.
* A sandbox lives on the service's clock. Its life is short and renewed while the session is open,
  so a trainer that dies leaves nothing behind for longer than `lifetime_s`.
"""

from turngym.sandboxes.e2b.backend import E2BSandbox
from turngym.sandboxes.e2b.session import E2BSession

__all__ = ["E2BSandbox", "E2BSession"]
