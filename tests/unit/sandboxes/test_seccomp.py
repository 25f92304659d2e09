import errno
import struct

import pytest

from turngym.sandboxes.inside.seccomp import _NUMBERS, _assemble

ALLOW, KILL = 0x7FFF0000, 0x80000000
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
EPERM, ENOSYS = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS


def decide(
    machine: str, number: int, *arguments: int, lone: int | None = None, arch: int = 0
) -> int:
    """Run the filter on one call, as the kernel would."""
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("<IIQ6Q", number, arch or ARCH[machine], 0, *padded)
    program, at, accumulator = _assemble(machine, lone), 0, 0
    while True:
        code, jump_true, jump_false, value = program[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x06:
            return value
        else:
            test = {
                0x15: accumulator == value,
                0x25: accumulator > value,
                0x45: bool(accumulator & value),
            }[code]
            at += jump_true if test else jump_false


def number(machine: str, name: str) -> int:
    return int(_NUMBERS[name][list(ARCH).index(machine)])


@pytest.fixture(params=list(ARCH))
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_ordinary_calls_pass(machine: str) -> None:
    assert decide(machine, {"x86_64": 0, "aarch64": 63}[machine], 3, 0, 10) == ALLOW  # read


@pytest.mark.parametrize("name", ["mount", "ptrace", "bpf", "unshare", "keyctl", "chroot"])
def test_dangerous_calls_are_refused(machine: str, name: str) -> None:
    assert decide(machine, number(machine, name)) == EPERM


@pytest.mark.parametrize("name", ["io_uring_setup", "clone3", "memfd_create", "shmget"])
def test_optional_calls_look_absent(machine: str, name: str) -> None:
    assert decide(machine, number(machine, name)) == ENOSYS


def test_calls_of_the_future_and_of_other_abis_look_absent(machine: str) -> None:
    assert decide(machine, 468) == ENOSYS
    assert decide(machine, 0x40000000 | 1) == ENOSYS
    assert decide(machine, 1, arch=0x40000003) == KILL


def test_threads_and_forks_pass_but_namespaces_do_not(machine: str) -> None:
    clone = number(machine, "clone")
    assert decide(machine, clone, 0x3D0F00) == ALLOW
    assert decide(machine, clone, 17) == ALLOW
    for flag in (0x00020000, 0x10000000, 0x20000000, 0x40000000):
        assert decide(machine, clone, flag | 17) == EPERM


def test_only_four_socket_families_exist(machine: str) -> None:
    call = number(machine, "socket")
    allowed = {family for family in range(50) if decide(machine, call, family, 1, 0) == ALLOW}
    assert allowed == {1, 2, 10, 16}
    assert decide(machine, call, 16, 3, 12) != ALLOW


def test_a_lone_worker_reaches_nobody(machine: str) -> None:
    def ask(name: str, *arguments: int) -> int:
        return decide(machine, number(machine, name), *arguments, lone=77)

    assert ask("kill", 77, 9) == ALLOW
    assert ask("kill", 0, 9) == ALLOW
    assert ask("kill", 78, 9) == EPERM
    assert ask("kill", 0xFFFFFFFF, 9) == EPERM
    assert ask("clone", 17) == EPERM
    assert ask("clone", 0x3D0F00) == ALLOW
    assert ask("socket", 2) == EPERM
    assert ask("execve") == EPERM
    assert ask("sendto", 3, 0, 0, 0, 0) == ALLOW
    assert ask("sendto", 3, 0, 0, 0, 1 << 40) == EPERM
    assert ask("prlimit64", 0) == ALLOW
    assert ask("prlimit64", 1) == EPERM
    assert ask("fchmodat", 0) == 0x00050000
