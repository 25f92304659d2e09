"""System-call filters for the worker, assembled as classic BPF.

A deny list by number, for x86_64 and aarch64. Calls newer than the newest one reviewed, and those
of the x32 ABI, answer ENOSYS; a foreign architecture ends the process.
"""

import ctypes
import errno
import functools
import os
import platform
import struct
import sys
from collections.abc import Callable

__all__ = ["install", "prepare"]

# name, number on x86_64, number on aarch64; resolved with libseccomp
_TABLE = """
    _sysctl 156 -; acct 163 89; add_key 248 217; adjtimex 159 171; bind 49 200; bpf 321 280;
    chmod 90 -; chown 92 -; chroot 161 51; clock_adjtime 305 266; clock_settime 227 112;
    clone 56 220; clone3 435 435; connect 42 203; create_module 174 -; delete_module 176 106;
    execve 59 221; execveat 322 281; fanotify_init 300 262; fanotify_mark 301 263;
    fchmodat 268 53; fchmodat2 452 452; fchownat 260 54; finit_module 313 273; fork 57 -;
    fsconfig 431 431; fsmount 432 432; fsopen 430 430; fspick 433 433; futimesat 261 -;
    get_kernel_syms 177 -; init_module 175 105; io_uring_enter 426 426; io_uring_register 427 427;
    io_uring_setup 425 425; ioctl 16 29; ioperm 173 -; iopl 172 -; ioprio_set 251 30;
    kcmp 312 272; kexec_file_load 320 294; kexec_load 246 104; keyctl 250 219; kill 62 129;
    lchown 94 -; lookup_dcookie 212 18; lremovexattr 198 15; lsetxattr 189 6;
    memfd_create 319 279; memfd_secret 447 447; migrate_pages 256 238; modify_ldt 154 -;
    mount 165 40; mount_setattr 442 442; move_mount 429 429; move_pages 279 239; msgctl 71 187;
    msgget 68 186; msgrcv 70 188; msgsnd 69 189; name_to_handle_at 303 264; nfsservctl 180 42;
    open_by_handle_at 304 265; open_tree 428 428; open_tree_attr 467 467; perf_event_open 298 241;
    personality 135 92; pidfd_getfd 438 438; pidfd_open 434 434; pidfd_send_signal 424 424;
    pivot_root 155 41; prlimit64 302 261; process_madvise 440 440; process_mrelease 448 448;
    process_vm_readv 310 270; process_vm_writev 311 271; ptrace 101 117; query_module 178 -;
    quotactl 179 60; quotactl_fd 443 443; reboot 169 142; removexattr 197 14;
    removexattrat 466 466; request_key 249 218; rt_sigqueueinfo 129 138;
    rt_tgsigqueueinfo 297 240; sched_setaffinity 203 122; sched_setattr 314 274;
    sched_setparam 142 118; sched_setscheduler 144 119; semctl 66 191; semget 64 190;
    semop 65 193; semtimedop 220 192; sendmmsg 307 269; sendmsg 46 211; sendto 44 206;
    setdomainname 171 162; sethostname 170 161; setpriority 141 140; settimeofday 164 170;
    setxattr 188 5; setxattrat 463 463; shmat 30 196; shmctl 31 195; shmdt 67 197; shmget 29 194;
    socket 41 198; swapoff 168 225; swapon 167 224; sysfs 139 -; syslog 103 116; tgkill 234 131;
    tkill 200 130; truncate 76 45; umount2 166 39; unshare 272 97; uselib 134 -;
    userfaultfd 323 282; ustat 136 -; utime 132 -; utimensat 280 88; utimes 235 -; vfork 58 -;
    vhangup 153 58
"""
_NUMBERS = {name: (x86, arm) for name, x86, arm in (row.split() for row in _TABLE.split(";"))}
_NEWEST_REVIEWED = 467  # open_tree_attr, Linux 6.15; the tables agree from 424 on

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}


def _words(text: str) -> list[str]:
    return text.split()


_DENIED = _words(
    """
    mount umount2 pivot_root chroot open_tree open_tree_attr move_mount fsopen fsconfig fsmount
    fspick mount_setattr swapon swapoff quotactl quotactl_fd acct unshare init_module finit_module
    delete_module kexec_load kexec_file_load reboot syslog bpf perf_event_open userfaultfd keyctl
    add_key request_key lookup_dcookie nfsservctl iopl ioperm modify_ldt personality ptrace
    process_vm_readv process_vm_writev process_madvise process_mrelease kcmp pidfd_getfd move_pages
    migrate_pages settimeofday clock_settime clock_adjtime adjtimex sethostname setdomainname
    vhangup open_by_handle_at name_to_handle_at fanotify_init fanotify_mark uselib ustat sysfs
    _sysctl create_module get_kernel_syms query_module
    """
)
_ABSENT = _words(
    """
    memfd_create memfd_secret io_uring_setup io_uring_enter io_uring_register clone3
    shmget shmat shmctl shmdt semget semop semctl semtimedop msgget msgsnd msgrcv msgctl
    """
)

# Without namespaces a call must not reach the trainer's files and processes: no new process, no
# socket, signals and scheduling of oneself only, and no change of metadata, which Landlock does
# not cover.
_LONE_DENIED = _words(
    """
    fork vfork execve execveat socket connect bind sendmsg sendmmsg tkill pidfd_send_signal
    pidfd_open setpriority ioprio_set chown lchown fchownat setxattr lsetxattr setxattrat
    removexattr lremovexattr removexattrat truncate
    """
)
_LONE_PRETENDED = _words("chmod fchmodat fchmodat2 utime utimes futimesat utimensat")
_LONE_SELF_ONLY = _words(
    """
    kill tgkill rt_sigqueueinfo rt_tgsigqueueinfo prlimit64 sched_setaffinity sched_setparam
    sched_setscheduler sched_setattr
    """
)

_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_CLONE_THREAD = 0x00010000
_AF_NETLINK = 16
_FAMILIES = (1, 2, 10, _AF_NETLINK)  # unix, inet, inet6; vsock is not isolated by a net namespace
_TIOCSTI = 0x5412

_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_NR, _ARCH, _ARGS = 0, 4, 16

_LOAD, _JEQ, _JGT, _JSET, _RET = 0x20, 0x15, 0x25, 0x45, 0x06
Instruction = tuple[int, int, int, int]
Rule = Callable[[str, list[Instruction]], None]


def install(*, lone: bool = False) -> None:
    """Filter this process and its children; cannot be undone.

    Args:
        lone: also cut the process off from all others; for sessions without namespaces.

    Raises:
        OSError: the architecture has no table, or the kernel refuses.
    """
    raw = _program(platform.machine(), os.getpid() if lone else None)
    buffer = ctypes.create_string_buffer(raw, len(raw))
    libc = ctypes.CDLL(None, use_errno=True)
    program = struct.pack("HxxxxxxP", len(raw) // 8, ctypes.addressof(buffer))
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):  # NO_NEW_PRIVS, SECCOMP
        number = ctypes.get_errno()
        raise OSError(number, "the kernel refused the system-call filter")


def prepare() -> None:
    """Assemble the common filter now, so that processes forked later need not."""
    _program(platform.machine(), None)


@functools.cache
def _program(machine: str, lone_pid: int | None) -> bytes:
    return b"".join(struct.pack("=HBBI", *line) for line in _assemble(machine, lone_pid))


def _assemble(machine: str, lone_pid: int | None) -> list[Instruction]:
    if machine not in _ARCHITECTURES or sys.byteorder != "little":
        raise OSError(errno.ENOSYS, f"no system-call table for {machine}")
    arch, column = _ARCHITECTURES[machine]
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_JEQ, 1, 0, arch),
        (_RET, 0, 0, _KILL),
        (_LOAD, 0, 0, _NR),
        (_JGT, 0, 1, _NEWEST_REVIEWED),
        (_RET, 0, 0, _errno(errno.ENOSYS)),
    ]

    def rule(name: str, body: list[Instruction]) -> None:
        """If the call is `name`, run `body`, which always returns."""
        number = _NUMBERS[name][column]
        if number != "-":
            code.extend([(_JEQ, 0, len(body), int(number)), *body])

    if lone_pid is not None:
        _add_lone_rules(rule, lone_pid)
    for name in _DENIED:
        rule(name, [(_RET, 0, 0, _errno(errno.EPERM))])
    for name in _ABSENT:
        rule(name, [(_RET, 0, 0, _errno(errno.ENOSYS))])
    rule("clone", _if_set(0, _NEW_NAMESPACES))
    rule("ioctl", _if_equal(1, (_TIOCSTI,)))
    rule("socket", _socket_body())
    code.append((_RET, 0, 0, _ALLOW))
    return code


def _add_lone_rules(add: Rule, pid: int) -> None:
    for name in _LONE_DENIED:
        add(name, [(_RET, 0, 0, _errno(errno.EPERM))])
    for name in _LONE_PRETENDED:
        add(name, [(_RET, 0, 0, _errno(0))])
    for name in _LONE_SELF_ONLY:
        # For kill, 0 is the process group: the worker leads its own and is alone in it.
        zero_is_self = name.startswith(("kill", "prlimit", "sched"))
        add(name, _unless_equal(0, (pid, 0) if zero_is_self else (pid,)))
    add("clone", _unless_set(0, _CLONE_THREAD))
    add("sendto", _unless_null(4))


def _errno(number: int) -> int:
    return 0x00050000 | number


def _argument(index: int) -> Instruction:
    return (_LOAD, 0, 0, _ARGS + 8 * index)


def _if_set(index: int, bits: int) -> list[Instruction]:
    deny = (_RET, 0, 0, _errno(errno.EPERM))
    return [_argument(index), (_JSET, 0, 1, bits), deny, (_RET, 0, 0, _ALLOW)]


def _unless_set(index: int, bits: int) -> list[Instruction]:
    deny = (_RET, 0, 0, _errno(errno.EPERM))
    return [_argument(index), (_JSET, 1, 0, bits), deny, (_RET, 0, 0, _ALLOW)]


def _if_equal(index: int, values: tuple[int, ...]) -> list[Instruction]:
    deny = (_RET, 0, 0, _errno(errno.EPERM))
    tests = [line for value in values for line in ((_JEQ, 0, 1, value), deny)]
    return [_argument(index), *tests, (_RET, 0, 0, _ALLOW)]


def _unless_equal(index: int, values: tuple[int, ...]) -> list[Instruction]:
    allow = (_RET, 0, 0, _ALLOW)
    tests = [line for value in values for line in ((_JEQ, 0, 1, value), allow)]
    return [_argument(index), *tests, (_RET, 0, 0, _errno(errno.EPERM))]


def _unless_null(index: int) -> list[Instruction]:
    """Both halves of a pointer are zero."""
    deny = (_RET, 0, 0, _errno(errno.EPERM))
    high = (_LOAD, 0, 0, _ARGS + 8 * index + 4)
    allow = (_RET, 0, 0, _ALLOW)
    return [_argument(index), (_JEQ, 1, 0, 0), deny, high, (_JEQ, 1, 0, 0), deny, allow]


def _socket_body() -> list[Instruction]:
    """Known families only; of netlink only routing, since packet filters are attack surface."""
    allow, absent = (_RET, 0, 0, _ALLOW), (_RET, 0, 0, _errno(errno.EAFNOSUPPORT))
    plain = [family for family in _FAMILIES if family != _AF_NETLINK]
    tests = [line for family in plain for line in ((_JEQ, 0, 1, family), allow)]
    return [
        _argument(0),
        *tests,
        (_JEQ, 1, 0, _AF_NETLINK),
        absent,
        _argument(2),
        (_JEQ, 0, 1, 0),
        allow,
        absent,
    ]
