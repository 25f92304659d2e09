"""What runs on the far side of the wall: init, worker, zygote. Standard library only.

These modules are shipped as source text (`turngym.sandboxes.bundle`) and run under any
CPython >= 3.10 without turngym being installed there. They import nothing but the standard
library and one another, and know nothing of asyncio or of the host's types.
"""
