"""Hostile programs that end themselves as if somebody outside had killed them: that would spare them their 0."""

# ruff: noqa: E501  # a program is easier to read on its line
DEATHS: list[tuple[str, str, str]] = [
    ("sigkill", "failed", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"),
    ("sigkill_to_its_group", "failed", "import os, signal\nos.killpg(0, signal.SIGKILL)"),
    ("sigkill_by_c", "forbidden", "import ctypes, os\nctypes.CDLL(None).kill(os.getpid(), 9)"),
    ("sigkill_to_all_by_c", "forbidden", "import ctypes\nctypes.CDLL(None).kill(-1, 9)"),
    ("sigkill_to_a_thread", "forbidden", "import signal, threading\nsignal.pthread_kill(threading.get_ident(), 9)"),
    ("sigkill_by_a_threads_number", "forbidden", """
import ctypes, threading
held = threading.Event()
thread = threading.Thread(target=held.wait, daemon=True)
thread.start()
ctypes.CDLL(None).kill(thread.native_id, 9)
"""),
    ("sigkill_by_tkill", "forbidden", "import ctypes, os\nctypes.CDLL(None).syscall(200, os.getpid(), 9)"),
    ("sigkill_by_descriptor", "forbidden", "import os, signal\nsignal.pidfd_send_signal(os.pidfd_open(os.getpid()), 9)"),
    ("sigkill_queued", "forbidden", """
import ctypes, os
ctypes.CDLL(None).syscall(129, os.getpid(), 9, (ctypes.c_int * 32)(9, 0, -1))
"""),
    ("sigkill_by_a_child", "wrong", """
import ctypes, os
if not os.fork():
    ctypes.CDLL(None).kill(os.getppid(), 9); os._exit(0)
os.wait()
"""),
    ("sigkill_with_other_upper_bits", "forbidden", """
import ctypes, os
ctypes.CDLL(None).syscall(62, os.getpid(), ctypes.c_long(0x500000009))
"""),
    ("sigkill_by_a_timer", "forbidden", """
import ctypes, time
libc, timer = ctypes.CDLL(None), ctypes.c_void_p()
libc.timer_create(0, (ctypes.c_int * 16)(0, 0, 9, 0), ctypes.byref(timer))
libc.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 0, 0, 10**7), None)
time.sleep(9)
"""),
    ("sigkill_by_input", "forbidden", """
import fcntl, os
read, write = os.pipe()
fcntl.fcntl(read, fcntl.F_SETOWN, os.getpid())
fcntl.fcntl(read, 10, 9)
fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC)
os.write(write, b"x")
"""),
    ("sigkill_by_the_end_of_a_child", "forbidden", """
import ctypes, os, time
if not ctypes.CDLL(None).syscall(56, 9, 0, 0, 0, 0): os._exit(0)
time.sleep(9)
"""),
    ("sigkill_by_a_limit_of_cpu_time", "failed", """
import resource
resource.setrlimit(resource.RLIMIT_CPU, (0, 0))
while True: pass
"""),
    ("sigkill_by_an_older_call_for_that_limit", "wrong", """
import ctypes, time
print(ctypes.CDLL(None).syscall(160, 0, (ctypes.c_ulong * 2)(0, 0)))
"""),
    ("sigkill_by_strict_mode", "wrong", "import ctypes, os\nprint(ctypes.CDLL(None).prctl(22, 1, 0, 0, 0))\nos.getppid()"),
    ("sigkill_at_the_end_of_its_parent", "wrong", "import ctypes\nprint(ctypes.CDLL(None).prctl(1, 9, 0, 0, 0))"),
]  # fmt: skip
