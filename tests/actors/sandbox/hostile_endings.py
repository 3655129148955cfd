"""Hostile programs whose end never comes, is told in endless words, or is not what it seems."""

# ruff: noqa: E501  # a program is easier to read on its line
ENDINGS: list[tuple[str, str, str]] = [
    # ---- that never come
    ("stopped_by_itself", "timeout", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"),
    ("flush_without_end", "timeout", """
import sys
class Out:
    def write(self, text): pass
    def flush(self):
        while True: pass
sys.stdout = Out()
"""),
    ("at_exit_without_end", "timeout", "import atexit\n@atexit.register\ndef spin():\n    while True: pass"),
    ("deleted_without_end", "timeout", "class A:\n    def __del__(self):\n        while True: pass\na = A()"),
    ("words_of_an_exception_without_end", "timeout", "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E"),
    ("pipe_that_nobody_opens", "timeout", "import os\nos.mkfifo('/tmp/f')\nopen('/tmp/f').read()"),
    ("signals_to_itself_without_end", "timeout", """
import os, signal
def again(number, frame): os.kill(os.getpid(), number)
signal.signal(signal.SIGUSR1, again)
again(signal.SIGUSR1, None)
while True: pass
"""),
    ("clocks_that_stand", "timeout", "import time\ntime.time = time.monotonic = lambda: 0\nwhile True: pass"),
    ("processes_left_stopped", "wrong", """
import os, signal
for _ in range(5):
    if not os.fork(): os.kill(os.getpid(), signal.SIGSTOP)
"""),
    ("processes_left_dead", "wrong", """
import os
try:
    while os.fork(): pass
    os._exit(0)
except OSError: pass
"""),
    # ---- in endless words
    ("words_of_an_exception_too_long", "output", "raise ValueError('x' * (64 << 20))"),
    ("last_words_too_long", "output", "import sys\nsys.exit('x' * (50 << 20))"),
    ("output_past_python", "output", "import os\nzero = os.open('/dev/zero', os.O_RDONLY)\nwhile True: os.sendfile(1, zero, None, 1 << 30)"),
    ("list_that_never_ends", "", "class Endless(list):\n    def __iter__(self):\n        while True: yield 1\ndef solve(x): return Endless([1])"),
    ("map_that_never_ends", "", "class Endless(dict):\n    def items(self):\n        while True: yield 'a', 1\ndef solve(x): return Endless(a=1)"),
    ("packed_bomb", "memory", """
import zlib
packed, held = zlib.compress(bytes(32 << 20), 1), []
while True: held.append(zlib.decompress(packed))
"""),
    # ---- that are not what they seem
    ("keys_that_are_one_in_json", "wrong", "def solve(x): return {1: x, '1': x}"),
    ("report_closed", "failed", "import os\nos.close(3)\ndef solve(x): return x"),
    ("report_to_a_file", "wrong", "import os\nos.dup2(os.open('/tmp/r', os.O_CREAT | os.O_RDWR), 3)\ndef solve(x): return x"),
    ("exit_by_a_class_of_classes", "wrong", """
class Meta(type):
    def __call__(cls): raise SystemExit(0)
class Solution(metaclass=Meta):
    def solve(self, x): return x
"""),
    ("exit_with_an_object", "wrong", """
class Zero(int):
    def __and__(self, other): return 0
    def __bool__(self): return True
raise SystemExit(Zero(5))
"""),
    ("builtins_gone", "failed", "import builtins\nbuiltins.__dict__.clear()\ndef solve(x): return x"),
    # ---- for others
    ("disks_of_the_host_written_out", "failed", """
import ctypes, os
if ctypes.CDLL(None).syncfs(os.open("/", os.O_RDONLY)): raise OSError
"""),
    ("memory_of_who_hides_from_its_user", "memory", """
import ctypes, mmap, time
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
held = []
for _ in range(40):
    held.append(mmap.mmap(-1, 10 << 20))
    held[-1].write(b"x" * (10 << 20)); held[-1].madvise(mmap.MADV_DONTNEED)
time.sleep(9)
"""),
    ("filter_of_its_own", "failed", """
import ctypes, os
rule = ctypes.create_string_buffer((0x0005000100000006).to_bytes(8, "little"), 8)  # every call fails
class Program(ctypes.Structure): _fields_ = [("length", ctypes.c_ushort), ("rules", ctypes.c_void_p)]
ctypes.CDLL(None).prctl(22, 2, ctypes.byref(Program(1, ctypes.addressof(rule))))
os.write(1, b"x")
"""),
]  # fmt: skip
