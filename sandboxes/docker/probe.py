"""What the engine really gave a session, looked at from inside a first one."""

from collections.abc import Mapping, Sequence
from typing import Any

from turngym.errors import SandboxUnavailableError
from turngym.sandboxes.base import Guarantees, Limits, Strength

__all__ = ["PROBE", "guarantees_of"]

PROBE = """
import json, os, sys

def read(*paths):
    for path in paths:
        try:
            with open(path) as file:
                return file.read().strip()
        except OSError:
            continue
    return None

def writable(path):
    try:
        open(path, "w").close()
    except OSError:
        return False
    os.unlink(path)
    return True

def number(text):
    return int(text) if text and text.isdigit() else None

status = dict(line.split(":\\t", 1) for line in read("/proc/self/status").splitlines())
disk = os.statvfs("/workspace")
print(json.dumps({
    "uid": os.getuid(),
    "capabilities": status["CapBnd"],
    "no_new_privs": status["NoNewPrivs"],
    "seccomp": status["Seccomp"],
    "pid1": read("/proc/1/comm"),
    "root_writable": any(writable(folder + "/.probe") for folder in ("", "/usr", "/etc", "/var")),
    "interfaces": sorted(os.listdir("/sys/class/net")),
    "memory": number(read("/sys/fs/cgroup/memory.max",
                          "/sys/fs/cgroup/memory/memory.limit_in_bytes")),
    "pids": number(read("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max")),
    "disk": disk.f_blocks * disk.f_frsize,
    "inodes": disk.f_files,
    "modules": sorted(sys.modules),
}))
"""
"""Run as a cell in a session that no agent has touched, so its answer can be believed."""


def guarantees_of(
    facts: Mapping[str, Any], limits: Limits, preload: Sequence[str], podman: bool
) -> Guarantees:
    """Judge the facts that `PROBE` printed.

    Raises:
        SandboxUnavailableError: the session is not walled off; limits that are merely not
            enforced are reported, not refused.
    """
    walls = {
        "it runs as root": facts["uid"] == 0,
        "it keeps capabilities": int(facts["capabilities"], 16) != 0,
        "it may gain privileges": facts["no_new_privs"] != "1",
        "it can write to the image's files": facts["root_writable"],
        f"it has the interfaces {facts['interfaces']}": _reaches_out(facts["interfaces"]),
    }
    if broken := [what for what, holds in walls.items() if holds]:
        raise SandboxUnavailableError(
            f"the engine does not wall its containers off: {'; '.join(broken)}. Check the "
            "daemon's defaults, or use sandbox='local'"
        )
    notes = []
    memory, pids = facts["memory"], facts["pids"]
    bounded = memory is not None and memory < (limits.memory_mb << 20) * 16
    if not bounded:
        notes.append("the engine sets no memory cgroup: memory is watched, not enforced")
    counted = pids is not None and pids <= limits.processes + 1
    if not counted:
        notes.append("the engine sets no pids cgroup: processes are not counted")
    sized = facts["disk"] <= limits.disk_mb << 20
    numbered = not podman and facts["inodes"] <= limits.inodes
    if not numbered:
        notes.append("the engine bounds no inodes, only bytes")
    if missing := sorted(set(preload) - set(facts["modules"])):
        notes.append(f"not in the image, so not preloaded: {', '.join(missing)}")
    return Guarantees(
        backend="docker",
        level="container",
        filesystem="hard",
        network="hard",
        processes=_strength(counted),
        memory="hard" if bounded else "soft",
        disk=_strength(sized) if numbered or not sized else "soft",
        session_isolation="hard",
        notes=tuple(notes),
    )


def _strength(holds: bool) -> Strength:
    return "hard" if holds else "none"


def _reaches_out(interfaces: Sequence[str]) -> bool:
    """Tell whether any interface is more than loopback or an unconfigured tunnel stub."""
    stubs = ("lo", "sit0", "tunl0", "gre0", "ip6tnl0", "ip_vti0", "ip6_vti0", "erspan0", "gretap0")
    return not set(interfaces) <= set(stubs)
