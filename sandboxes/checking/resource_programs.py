"""Programs that use up time, processes, memory, disk or output."""

from turngym.sandboxes.checking.attack import Attack, program

__all__ = ["RESOURCE_PROGRAMS"]

_STOPPED = ("timeout",)
_GONE = ("exited", "memory")

_TIME = [
    program("c_loop", "time", "sum(range(10**12))", kind=_STOPPED, timeout_s=0.5),
    program(
        "swallows_every_exception",
        "time",
        """
        while True:
            try:
                while True: pass
            except BaseException: pass
        """,
        kind=_STOPPED,
        timeout_s=0.5,
    ),
    program(
        "waits_for_a_child",
        "time",
        "import subprocess; subprocess.run(['sleep', '600'])",
        kind=_STOPPED,
        timeout_s=0.5,
        needs="fork",
    ),
    program(
        "waits_for_busy_threads",
        "time",
        """
        import threading
        def spin():
            while True: pass
        threads = [threading.Thread(target=spin) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        """,
        kind=_STOPPED,
        timeout_s=0.5,
    ),
    program(
        "awaits_for_ever",
        "time",
        "import asyncio\nawait asyncio.Event().wait()",
        kind=_STOPPED,
        timeout_s=0.5,
    ),
    program(
        "repr_hangs",
        "time",
        """
        class Slow:
            def __repr__(self):
                while True: pass
        Slow()
        """,
        kind=_STOPPED,
        timeout_s=0.5,
    ),
    program(
        "exception_text_hangs",
        "time",
        """
        class Slow(Exception):
            def __str__(self):
                while True: pass
        raise Slow()
        """,
        kind=("timeout", "error"),
        timeout_s=0.5,
    ),
    program(
        "import_hangs",
        "time",
        "open('hang.py', 'w').write('while True: pass')\nimport hang",
        kind=_STOPPED,
        timeout_s=0.5,
    ),
]

_PROCESSES = [
    program(
        "detached_children_and_a_loop",
        "proc",
        """
        import subprocess
        for _ in range(3): subprocess.Popen(['sleep', '600'], start_new_session=True)
        while True: pass
        """,
        kind=_STOPPED,
        max_wall=2.0,
        timeout_s=1.0,
        needs="fork",
    ),
    program(
        "daemon_outlives_the_cell",
        "proc",
        """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(600)
            os._exit(0)
        os.wait()
        print('started')
        """,
        kind=("ok",),
        has="started",
        needs="fork",
    ),
    program(
        "children_ignore_signals",
        "proc",
        """
        import os, signal, time
        for _ in range(5):
            if os.fork() == 0:
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    signal.signal(number, signal.SIG_IGN)
                time.sleep(600)
        """,
        kind=("ok",),
        needs="fork",
    ),
    program(
        "zombies_are_collected",
        "proc",
        """
        import os
        for _ in range(3):
            for _ in range(30):
                if os.fork() == 0:
                    if os.fork() == 0: os._exit(0)
                    os._exit(0)
            for _ in range(30): os.wait()
        print('done')
        """,
        kind=("ok",),
        has="done",
        needs="fork",
        timeout_s=10.0,
    ),
    program("segfault", "proc", "import ctypes; ctypes.string_at(0)", kind=("exited",)),
    program("abort", "proc", "import os; os.abort()", kind=("exited",), state_lost=True),
    program(
        "exits_from_a_thread",
        "proc",
        """
        import os, threading, time
        threading.Thread(target=lambda: os._exit(9)).start()
        time.sleep(5)
        """,
        kind=("exited",),
    ),
    program(
        "stops_everything",
        "proc",
        """
        import os, signal
        if os.fork() == 0:
            os.kill(-1, signal.SIGSTOP)
        while True: pass
        """,
        kind=("timeout", "exited"),
        timeout_s=0.7,
        needs="fork",
    ),
]

_MEMORY = [
    program(
        "shared_memory_bomb",
        "mem",
        """
        import mmap
        held = []
        for _ in range(400):
            block = mmap.mmap(-1, 32 << 20)
            for at in range(0, len(block), 4096): block[at] = 1
            held.append(block)
        print('ESCAPED')
        """,
        kind=("memory", "error", *_GONE),
        timeout_s=30.0,
    ),
    program(
        "children_share_the_limit",
        "mem",
        """
        import os, time
        for _ in range(16):
            if os.fork() == 0:
                block = bytearray(200 << 20)
                for at in range(0, len(block), 4096): block[at] = 1
                time.sleep(30)
                os._exit(0)
        time.sleep(30)
        """,
        kind=("memory", *_GONE),
        timeout_s=30.0,
        needs="fork",
    ),
    program("string_product", "mem", "'x' * 10**11", kind=("error",), error=("MemoryError",)),
    program(
        "usable_after_memory_error",
        "mem",
        ["kept = 1", "x = bytearray(4 << 30)", "kept"],
        kind=("ok",),
        result="1",
    ),
    program(
        "thread_stacks",
        "mem",
        """
        import threading, time
        threading.stack_size(64 << 20)
        held = []
        try:
            for _ in range(500):
                thread = threading.Thread(target=time.sleep, args=(20,), daemon=True)
                thread.start()
                held.append(thread)
            print('ESCAPED')
        except (RuntimeError, MemoryError):
            print('capped')
        """,
        kind=("ok", *_GONE),
        timeout_s=10.0,
    ),
]

_DISK = [
    program(
        "many_files",
        "disk",
        """
        try:
            for n in range(100_000): open(f'f{n}', 'w').close()
            print('ESCAPED')
        except OSError as error: print('capped', error)
        """,
        kind=("ok",),
        has="capped",
        timeout_s=20.0,
        needs="quota",
    ),
    program(
        "every_writable_folder_is_bounded",
        "disk",
        """
        import tempfile
        for folder in ('/tmp', '/dev/shm', '/workspace'):
            try:
                for n in range(4):
                    with open(f'{folder}/big{n}', 'wb') as file:
                        for _ in range(60): file.write(bytes(1 << 20))
                print('ESCAPED', folder)
            except OSError as error: print('capped', error)
        """,
        kind=("ok",),
        has="capped",
        timeout_s=20.0,
        needs="quota",
    ),
    program(
        "huge_sparse_file",
        "disk",
        "open('sparse', 'wb').truncate(1 << 44)",
        kind=("error", "exited"),
    ),
]

_OUTPUT = [
    program(
        "prints_without_end",
        "out",
        "while True: print('x' * 100_000)",
        kind=("output_limit", "timeout"),
        max_out=200_000,
        timeout_s=5.0,
    ),
    program(
        "child_floods_after_the_cell",
        "out",
        [
            "import subprocess; child = subprocess.Popen(['sh', '-c', 'yes flood'])",
            "child.kill()\n'alive'",
        ],
        kind=("ok", "output_limit"),
        max_out=200_000,
        needs="fork",
    ),
    program(
        "closes_its_streams",
        "out",
        ["import sys; sys.stdout.close(); sys.stderr.close()", "print('back')"],
        kind=("ok",),
        has="back",
    ),
    program(
        "replaces_its_streams",
        "out",
        """
        import sys
        class Broken:
            def __getattr__(self, name): raise RuntimeError('broken stream')
        sys.stdout = sys.stderr = Broken()
        5
        """,
        kind=("ok", "error", "exited"),
        after=False,
    ),
    program(
        "repr_prints_and_lies",
        "out",
        """
        class Liar:
            def __repr__(self):
                print('inside')
                return 'line\\n[timed out]\\n' * 100_000
        Liar()
        """,
        kind=("ok",),
        has="inside",
    ),
]

RESOURCE_PROGRAMS: tuple[Attack, ...] = (*_TIME, *_PROCESSES, *_MEMORY, *_DISK, *_OUTPUT)
