"""Programs that attack the driver, the walls or the network, and odd corners of the language."""

from turngym.sandboxes.checking.attack import Attack, program

__all__ = ["ESCAPE_PROGRAMS"]

_STOPPED = ("timeout",)

_DRIVER = [
    program(
        "speaks_on_every_descriptor",
        "driver",
        """
        import os, struct
        for fd in range(3, 64):
            for frame in (struct.pack('>I', 1 << 30), struct.pack('>I', 0), b'{"status": "ok"}'):
                try: os.write(fd, frame)
                except OSError: pass
        1 / 0
        """,
        kind=("protocol", "exited", "error", "timeout"),
        timeout_s=1.5,
    ),
    program(
        "moves_its_channel",
        "driver",
        "import os\nos.dup2(1, 3)\n'still here'",
        kind=("protocol", "exited", "timeout"),
        timeout_s=1.5,
    ),
    program(
        "empties_sys_modules",
        "driver",
        "import sys; sys.modules.clear()\n3",
        kind=("ok", "error", "exited"),
    ),
    program(
        "poisons_imports",
        "driver",
        """
        import sys
        class Finder:
            def find_spec(self, *a): raise RuntimeError('no imports today')
        sys.meta_path.insert(0, Finder()); sys.path_hooks.clear(); sys.path.clear()
        4
        """,
        kind=("ok",),
        result="4",
    ),
    program(
        "blocks_the_interrupt",
        "driver",
        """
        import signal, threading
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        threading.Event().wait()
        """,
        kind=_STOPPED,
        timeout_s=0.5,
    ),
    program(
        "fork_answers_twice",
        "driver",
        ["import os\nos.fork()\nvalue = os.getpid()\nvalue > 0", "'second'"],
        kind=("ok",),
        result="'second'",
        needs="fork",
    ),
]

_ESCAPE = [
    program(
        "only_its_own_descriptors",
        "escape",
        """
        import os
        names = [os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')
                 if os.path.exists(f'/proc/self/fd/{fd}')]
        odd = [n for n in names if not n.startswith(('/dev/null', 'pipe:', 'socket:', '/proc'))]
        sockets = [n for n in names if n.startswith('socket:')]
        print('ESCAPED' if odd or len(sockets) > 1 else 'clean', odd, len(sockets))
        """,
        kind=("ok", "error"),
    ),
    program(
        "new_mounts",
        "escape",
        """
        import ctypes
        libc = ctypes.CDLL(None)
        for kind in (b'tmpfs', b'proc', b'sysfs', b'overlay'):
            if libc.mount(b'x', b'/workspace', kind, 0, None) == 0: print('ESCAPED', kind)
        if libc.unshare(0x10000000) == 0 or libc.unshare(0x20000) == 0: print('ESCAPED unshare')
        print('done')
        """,
        kind=("ok",),
        has="done",
    ),
    program(
        "traces_others",
        "escape",
        """
        import ctypes, os
        libc = ctypes.CDLL(None)
        for pid in [1, os.getppid()]:
            if libc.ptrace(16, pid, None, None) == 0: print('ESCAPED', pid)
        print('done')
        """,
        kind=("ok",),
        has="done",
    ),
    program(
        "kernel_settings",
        "escape",
        """
        for path in ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/dev/kmsg',
                     '/proc/sys/vm/overcommit_memory', '/sys/fs/cgroup/cgroup.procs'):
            try: open(path, 'w').write('0'); print('ESCAPED', path)
            except OSError: pass
        print('done')
        """,
        kind=("ok",),
        has="done",
    ),
    program(
        "raises_its_limits",
        "escape",
        """
        import resource
        for kind in (resource.RLIMIT_DATA, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE):
            soft, hard = resource.getrlimit(kind)
            try: resource.setrlimit(kind, (hard * 2, hard * 2)); print('ESCAPED', kind)
            except (OSError, ValueError): pass
        print('done')
        """,
        kind=("ok",),
        has="done",
    ),
    program(
        "signals_every_number",
        "escape",
        """
        import os, signal
        for pid in range(1, 4000):
            if pid != os.getpid():
                try: os.kill(pid, signal.SIGKILL)
                except OSError: pass
        'done'
        """,
        kind=("ok",),
        result="'done'",
    ),
    program(
        "reads_the_host_file",
        "escape",
        "print('ESCAPED' if 'SECRET' in open('@CANARY@').read() else '')",
        kind=("error",),
        harmless=True,
    ),
    program(
        "reads_it_through_a_link",
        "escape",
        "import os; os.symlink('@CANARY@', 'l'); print('ESCAPED', open('l').read())",
        kind=("error",),
        harmless=True,
    ),
    program(
        "sees_the_host_process",
        "escape",
        """
        try: print('ESCAPED' if 'run_attacks' in open('/proc/@HOSTPID@/cmdline').read() else '')
        except OSError: pass
        """,
        kind=("ok",),
        harmless=True,
    ),
    program(
        "capabilities_and_flags",
        "escape",
        """
        status = dict(l.split(':', 1) for l in open('/proc/self/status'))
        caps = [status[k].strip() for k in ('CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb')]
        flags = status['NoNewPrivs'].strip(), status['Seccomp'].strip()
        print('ESCAPED' if any(int(c, 16) for c in caps) or flags != ('1', '2') else 'none')
        """,
        kind=("ok", "error"),
        harmless=True,
    ),
]

_NETWORK = [
    program(
        "loopback_tcp",
        "net",
        "import socket; socket.create_connection(('127.0.0.1', @PORT@), 2); print('ESCAPED')",
        kind=("error",),
        harmless=True,
    ),
    program(
        "loopback_udp",
        "net",
        """
        import socket
        try: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', @UDP@))
        except OSError: pass
        """,
        kind=("ok",),
        harmless=True,
    ),
    program(
        "unix_socket",
        "net",
        "import socket; socket.socket(socket.AF_UNIX).connect('@UNIX@'); print('ESCAPED')",
        kind=("error",),
        harmless=True,
    ),
    program(
        "abstract_socket",
        "net",
        "import socket; socket.socket(socket.AF_UNIX).connect('\\0@ABSTRACT@'); print('ESCAPED')",
        kind=("error",),
        harmless=True,
    ),
    program(
        "datagram_from_a_pair",
        "net",
        """
        import socket
        one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        for target in ('@UNIX@', '\\0@ABSTRACT@'):
            try: one.sendto(b'x', target); print('ESCAPED')
            except OSError: pass
        print('done')
        """,
        kind=("ok", "error"),
        harmless=True,
    ),
    program(
        "packet_filters",
        "net",
        """
        import socket
        for family, kind, protocol in ((16, 3, 12), (16, 3, 9), (17, 3, 0), (40, 1, 0), (38, 5, 0)):
            try: socket.socket(family, kind, protocol); print('ESCAPED', family, protocol)
            except OSError: pass
        print('done')
        """,
        kind=("ok",),
        has="done",
    ),
    program(
        "private_loopback_works",
        "net",
        """
        import socket
        server = socket.create_server(('127.0.0.1', 0))
        client = socket.create_connection(server.getsockname(), 2)
        server.accept()[0].sendall(b'hello')
        client.recv(5)
        """,
        kind=("ok",),
        result="b'hello'",
        needs="netns",
    ),
]

_LANGUAGE = [
    program(
        "raises_a_base_exception",
        "lang",
        "class Odd(BaseException): pass\nraise Odd('x')",
        kind=("error",),
        error=("Odd",),
    ),
    program(
        "removes_builtins",
        "lang",
        ["import builtins\ndel builtins.print, builtins.len, builtins.Exception", "1 + 2"],
        kind=("ok",),
        result="3",
    ),
    program(
        "recursive_repr",
        "lang",
        "class R:\n    def __repr__(self): return repr(self)\nR()",
        kind=("error", "exited"),
        timeout_s=6.0,
    ),
    program(
        "dataclass_and_pickle",
        "lang",
        """
        import dataclasses, pickle
        @dataclasses.dataclass
        class Point:
            x: int
        pickle.loads(pickle.dumps(Point(3)))
        """,
        kind=("ok",),
        result="Point(x=3)",
    ),
    program(
        "process_pool",
        "lang",
        """
        import multiprocessing
        def square(n): return n * n
        with multiprocessing.Pool(2) as pool: result = pool.map(square, range(4))
        result
        """,
        kind=("ok",),
        result="[0, 1, 4, 9]",
        needs="fork",
        timeout_s=10.0,
    ),
]

ESCAPE_PROGRAMS: tuple[Attack, ...] = (*_DRIVER, *_ESCAPE, *_NETWORK, *_LANGUAGE)
