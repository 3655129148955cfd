"""Programs that try to pass without solving anything, to get out, or to bring the machine down.

Every one is asked for the secret: the expected value of its test, which also stands in a file, a variable of the
environment, behind a port and in the memory of processes outside. So whoever gets out passes, and is seen.

`find(text)` gives the secret in a text or None. `<path>`, `<port>`, `<pid>`, `<mark>` are the file with the secret, the
port that tells it, a process to be left alive, and a file that must not come to be. A program with a `solve` is called,
any other is judged by what it prints. The part named with it must be told in the verdict.
"""

# ruff: noqa: E501  # a program is easier to read on its line
HOSTILE: list[tuple[str, str, str]] = [
    # ---- values that claim to be equal
    ("int_equal_to_all", "wrong", """
class Yes(int):
    def __eq__(self, other): return True
    def __hash__(self): return 0
def solve(x): return Yes(1)
"""),
    ("str_equal_to_all", "wrong", """
class Yes(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
def solve(x): return Yes("x")
"""),
    ("list_equal_to_all", "wrong", """
class Yes(list):
    def __eq__(self, other): return True
    def __len__(self): return 0
def solve(x): return Yes()
"""),
    ("dict_with_forged_items", "wrong", """
class Yes(dict):
    def __eq__(self, other): return True
    def items(self): return [("value", "secret")]
def solve(x): return Yes(a=1)
"""),
    ("object_equal_to_all", "failed", """
class Yes:
    def __eq__(self, other): return True
def solve(x): return Yes()
"""),
    ("float_subclass_repr", "wrong", """
class Yes(float):
    def __repr__(self): return "true"
def solve(x): return Yes(1.5)
"""),
    ("nan", "failed", "def solve(x): return float('nan')"),
    ("infinity", "failed", "def solve(x): return [float('inf')]"),
    ("true_for_anything", "wrong", "def solve(x): return True"),
    ("deeply_nested", "failed", """
def solve(x):
    value = []
    for _ in range(100000): value = [value]
    return value
"""),
    ("nested_within_limits_of_json", "wrong", """
def solve(x):
    value = "x"
    for _ in range(900): value = [value]
    return value
"""),
    ("self_containing", "failed", """
def solve(x):
    value = []
    value.append(value)
    return value
"""),
    ("huge_integer", "failed", "def solve(x): return 10 ** 100000"),
    ("huge_value", "output", "def solve(x): return 'x' * (20 << 20)"),
    ("generator_of_all", "failed", "def solve(x):\n    while True: yield x"),
    ("metaclass_instance_check", "failed", """
class Meta(type):
    def __instancecheck__(cls, other): return True
    def __eq__(cls, other): return True
    __hash__ = type.__hash__
class Yes(metaclass=Meta): pass
def solve(x): return Yes
"""),
    # ---- the harness and its memory
    ("frame_walk", "wrong", """
import sys
def solve(x):
    frame, seen = sys._getframe(), []
    while frame:
        seen += [repr(frame.f_locals), repr(frame.f_globals), repr(frame.f_code.co_consts)]
        frame = frame.f_back
    return find(" ".join(seen))
"""),
    ("inspect_stack", "wrong", """
import inspect
def solve(x): return find(repr([f.frame.f_locals for f in inspect.stack()]))
"""),
    ("traceback_walk", "wrong", """
def solve(x):
    try: raise ValueError
    except ValueError as error:
        frame, seen = error.__traceback__.tb_frame, ""
        while frame: seen += repr(frame.f_globals); frame = frame.f_back
        return find(seen)
"""),
    ("gc_walk", "wrong", """
import gc
def solve(x): return find(" ".join(repr(o)[:2000] for o in gc.get_objects() if isinstance(o, (list, dict, tuple))))
"""),
    ("referrers_walk", "wrong", """
import gc
def solve(x): return find(repr(gc.get_referrers(x))[:100000])
"""),
    ("subclasses_walk", "wrong", """
def solve(x):
    seen = []
    for kind in object.__subclasses__():
        try: seen.append(repr(vars(kind)))
        except Exception: pass
    return find(" ".join(seen))
"""),
    ("modules_walk", "wrong", """
import sys
def solve(x): return find(repr([vars(m) for m in list(sys.modules.values()) if m is not None])[:1000000])
"""),
    ("own_memory_by_ctypes", "wrong", """
import ctypes
def solve(x):
    return find(ctypes.string_at(id(x) & -4096, 4096).decode("latin-1"))  # this page is there wherever it lies
"""),
    ("own_memory_to_its_end", "failed", """
import ctypes
def solve(x):
    at, found = id(x) & -4096, None
    while not found:
        found, at = find(ctypes.string_at(at, 4096).decode("latin-1")), at + 4096
    return found
"""),
    ("proc_self_mem", "failed", """
def solve(x):
    with open("/proc/self/mem", "rb") as memory: return find(memory.read(1 << 20).decode("latin-1"))
"""),
    ("null_pointer", "failed", "import ctypes\ndef solve(x): return ctypes.string_at(0)"),
    ("nonce_by_descriptors", "wrong", """
import os
seen = b""
for fd in list(range(3, 256)):
    try:
        os.set_blocking(fd, False)
        seen += os.read(fd, 1 << 16)
    except OSError: pass
print(find(seen.decode("latin-1")) or seen)
"""),
    ("nonce_guessed", "failed", """
import json, os, struct
head = json.dumps({"nonce": "00" * 16, "limit": "", "exit": 0, "seconds": 0.1, "clean": True, "sizes": [0, 0, 1]})
for fd in range(3, 256):
    try: os.write(fd, struct.pack(">I", len(head)) + head.encode() + b"V")
    except OSError: pass
def solve(x): raise SystemExit(1)
"""),
    ("reply_forged_on_stdout", "wrong", """
import json, struct, sys
head = json.dumps({"nonce": "00" * 16, "limit": "", "exit": 0, "seconds": 0.1, "clean": True, "sizes": [0, 0, 0]})
sys.stdout.buffer.write(struct.pack(">I", len(head)) + head.encode() + b"R")
"""),
    ("a_word_that_takes_long_to_read", "wrong", "print('1' * 1000000 + 'x')"),
    ("killed_by_itself_at_the_last_moment", "failed", """
import os, signal, time
time.sleep(0.6)
os.kill(os.getpid(), signal.SIGKILL)
"""),
    ("value_forged_on_report", "wrong", """
import os
def solve(x):
    os.write(3, b'V"secret"')
    os._exit(0)
"""),
    ("report_of_two_values", "wrong", """
import os
os.write(3, b'V')
def solve(x): return "secret"
"""),
    ("json_patched", "wrong", """
import json
json.dumps = lambda *a, **k: '{"passed": true, "expected": "secret"}'
json.loads = lambda *a, **k: [1]
def solve(x): return 1
"""),
    ("json_encoder_patched", "wrong", """
import json.encoder
json.encoder.JSONEncoder.encode = lambda self, value: "true"
json.encoder.c_make_encoder = None
def solve(x): return 1
"""),
    ("builtins_patched", "failed", """
import builtins
builtins.len = lambda x: 0
builtins.isinstance = builtins.issubclass = lambda *a: True
builtins.type = lambda x: bool
builtins.print = lambda *a, **k: None
def solve(x): return object()
"""),
    ("import_hook", "failed", """
import sys
class Hook:
    def find_spec(self, name, path=None, target=None): raise ImportError(name)
sys.meta_path.insert(0, Hook())
sys.modules.clear()
def solve(x): return "secret"
"""),
    ("os_patched", "wrong", """
import os, sys
os.write = lambda fd, data: len(data)
os._exit = sys.exit = lambda *a: None
def solve(x): raise RuntimeError
"""),
    ("main_module_patched", "wrong", """
import sys
def solve(x):
    frame = sys._getframe(1)
    frame.f_globals.update(_say=lambda text: None, _report=lambda kind: None, json=None)
    frame.f_globals["_say"](b"V1")
"""),
    ("trace_function", "wrong", """
import sys
seen = []
def trace(frame, event, argument):
    seen.append(repr(argument)); return trace
sys.settrace(trace); sys.setprofile(lambda f, e, a: seen.append(repr(a)))
def solve(x): return find(" ".join(seen))
"""),
    ("audit_hook", "wrong", """
import sys
seen = []
sys.addaudithook(lambda event, arguments: seen.append(repr(arguments)))
def solve(x): return find(" ".join(seen))
"""),
    ("code_object_swapped", "wrong", """
import sys
def other(request): return None
def solve(x):
    sys._getframe(1).f_globals["run"].__code__ = other.__code__
    return "secret"
"""),
    ("at_exit", "wrong", """
import atexit, os
atexit.register(lambda: os._exit(0))
print("secret")
"""),
    ("descriptors_closed", "failed", """
import os
os.closerange(0, 4096)
def solve(x): return 1
"""),
    # ---- early ends
    ("exit_zero", "wrong", "import sys\nsys.exit(0)"),
    ("exit_at_once", "wrong", "import os\nos._exit(0)"),
    ("exit_in_call", "wrong", "import sys\ndef solve(x): sys.exit(0)"),
    ("exit_in_call_at_once", "wrong", "import os\ndef solve(x): os._exit(0)"),
    ("exit_in_class", "wrong", "class Solution:\n    def __init__(self): raise SystemExit\n    def solve(self, x): pass"),
    ("keyboard_interrupt", "failed", "def solve(x): raise KeyboardInterrupt"),
    ("exception_with_exit", "wrong", """
import os
class Bad(Exception):
    def __str__(self): os._exit(0)
def solve(x): raise Bad
"""),
    ("abort", "failed", "import os\nos.abort()"),
    ("exec_of_true", "wrong", "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'pass'])"),
    # ---- floods and bombs
    ("stdout_flood", "output", "while True: print('x' * 10000)"),
    ("stderr_flood", "output", "import sys\nwhile True: sys.stderr.write('x' * 10000)"),
    ("report_flood", "output", "import os\nwhile True: os.write(3, b'V' * 10000)"),
    ("fork_bomb", "timeout", "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"),
    ("fork_and_sleep", "wrong", """
import os, time
for _ in range(100):
    try:
        if not os.fork(): os.setsid(); time.sleep(100)
    except OSError: pass
"""),
    ("memory_bomb", "memory", "x = bytearray(100 << 30)"),
    ("memory_bomb_of_lists", "memory", "x = []\nwhile True: x.append([0] * 1000000)"),
    ("memory_bomb_of_many", "memory", """
import os, time
for _ in range(8):
    if not os.fork():
        x = bytearray(200 << 20); time.sleep(9)
time.sleep(9)
"""),
    ("shared_memory", "wrong", """
import mmap
held = []
try:
    while True: held.append(mmap.mmap(-1, 16 << 20)); held[-1].write(b"x" * (16 << 20))
except (OSError, MemoryError): pass
"""),
    ("shared_memory_of_many", "memory", """
import mmap, os, time
for _ in range(8):
    if not os.fork():
        held = [mmap.mmap(-1, 10 << 20) for _ in range(15)]
        for one in held: one.write(b"x" * (10 << 20))
        time.sleep(9)
time.sleep(9)
"""),
    ("folder_closed", "wrong", "import os\nopen('/tmp/x', 'w').close()\nos.chmod('/tmp', 0)"),
    ("folders_without_end", "", """
import os
while True:
    os.mkdir("d"); os.chdir("d")
"""),
    ("odd_names", "wrong", "import os\nfor i in range(1, 47): open(b'/tmp/' + bytes([i, 255]), 'w').close()"),
    ("stdin_closed", "wrong", "import os\nos.close(0)"),
    ("crash", "failed", "import ctypes\nctypes.string_at(1)"),
    ("compile_bomb", "", "x = " + "(" * 5000 + ")" * 5000),
    ("constant_bomb", "", "x = ((1,) * 10000000 for _ in ())\ny = 'a' * 4096 * 4096 * 4096\nprint(len(y))"),
    ("regex_bomb", "timeout", "import re\nre.match('(a+)+$', 'a' * 60 + 'b')"),
    ("integer_bomb", "timeout", "x = 7 ** (7 ** 9)\nprint(len(hex(x ** 9)))"),
    ("sleep", "timeout", "import time\nwhile True: time.sleep(100)"),
    ("sleep_with_signals_blocked", "timeout", """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True: signal.sigwait([signal.SIGTERM])
"""),
    ("threads_that_never_end", "timeout", """
import threading
for _ in range(8): threading.Thread(target=threading.Event().wait).start()
"""),
    ("busy_threads", "timeout", """
import threading
def spin():
    while True: pass
for _ in range(4): threading.Thread(target=spin).start()
"""),
    ("stdin_waited_for", "wrong", "import sys\nsys.stdin.read(); input_again = sys.stdin.read()"),
    ("recursion", "failed", "def f(): f()\nf()"),
    ("recursion_in_c", "failed", "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return repr(x)\nclass A:\n"
     "    def __repr__(self): return repr([self])\nrepr(A())"),
    ("file_flood", "output", "i = 0\nwhile True:\n    open(f'/tmp/{i}', 'w').close(); i += 1"),
    ("disk_filled", "failed", "for i in range(100): open(f'/tmp/{i}', 'wb').write(bytes(4 << 20))"),
    ("file_too_large", "failed", "open('/tmp/x', 'wb').truncate(1 << 40)"),
    ("cpu_limit_raised", "failed", """
import resource
resource.setrlimit(resource.RLIMIT_CPU, (1000, 1000))
"""),
]  # fmt: skip
