"""Programs that solve their task, in all the ways in which people and models write Python: every one must pass.

Each is a name, a source, and its tests: pairs of stdin and stdout, or of arguments and value for its `solve`.
"""

from typing import Any

# ruff: noqa: E501  # a program is easier to read on its line
HONEST: list[tuple[str, str, list[tuple[Any, Any]]]] = [
    # ---- stdin and stdout
    ("sum_of_two", "a, b = map(int, input().split())\nprint(a + b)", [("2 3\n", "5\n"), ("-1 1", "0"), ("10 20\n", "30")]),
    ("lines_until_end", "import sys\nprint(sum(int(line) for line in sys.stdin))", [("1\n2\n3\n", "6"), ("", "0")]),
    ("read_all", "import sys\nprint(len(sys.stdin.read().split()))", [("a b\nc", "3")]),
    ("binary_input", "import sys\nprint(len(sys.stdin.buffer.read()))", [("héllo", "6")]),
    ("input_until_error", "n = 0\ntry:\n    while True: input(); n += 1\nexcept EOFError: print(n)", [("a\nb\nc\n", "3")]),
    ("by_descriptor", "import os\nprint(len(os.read(0, 100)))", [("12345", "5")]),
    ("no_newline_at_end", "import sys\nsys.stdout.write('x')", [("", "x\n")]),
    ("spaces_at_ends", "print('x   ')\nprint()\nprint()", [("", "x")]),
    ("windows_lines", "print('a\\r')\nprint('b\\r')", [("", "a\nb\n")]),
    ("flushed_lines", "for i in range(5): print(i, flush=True)", [("", "0\n1\n2\n3\n4\n")]),
    ("main_guard", "def main():\n    print(int(input()) ** 2)\nif __name__ == '__main__':\n    main()", [("12", "144")]),
    ("exit_after_output", "import sys\nprint(7)\nsys.exit()", [("", "7")]),
    ("exit_zero_after_output", "print(7)\nexit_code = 0\nraise SystemExit(exit_code)", [("", "7")]),
    ("exit_at_once_after_flush", "import os, sys\nprint(7)\nsys.stdout.flush()\nos._exit(0)", [("", "7")]),
    ("noise_on_stderr", "import sys\nprint('debug', file=sys.stderr)\nprint(1)", [("", "1")]),
    ("warning", "import warnings\nwarnings.warn('old')\nprint(1)", [("", "1")]),
    ("unicode_text", "print(input()[::-1])", [("äöü→", "→üöä"), ("日本", "本日")]),
    ("large_output", "print('\\n'.join(map(str, range(60000))))", [("", "\n".join(map(str, range(60000))))]),
    ("large_input", "print(sum(map(int, input().split())))", [(" ".join(map(str, range(120000))), "7199940000")]),
    ("input_not_read", "print('done')", [("x" * 1000000, "done")]),
    ("floats", "print(1 / 3)\nprint(2 ** 0.5)", [("", "0.33333333\n1.41421356\n")]),
    ("formatted", "print(f'{3.14159:.2f} {42:05d} {1000000:,}')", [("", "3.14 00042 1,000,000")]),
    ("at_exit", "import atexit\natexit.register(lambda: print('end'))\nprint('begin')", [("", "begin\nend")]),
    ("thread_outlives_main", "import threading, time\ndef work():\n    time.sleep(0.05); print('late')\n"
     "threading.Thread(target=work).start()\nprint('main')", [("", "main\nlate")]),
    ("deep_recursion_in_thread", "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 26)\n"
     "def depth(n): return 0 if n == 0 else 1 + depth(n - 1)\n"
     "t = threading.Thread(target=lambda: print(depth(20000)))\nt.start(); t.join()", [("", "20000")]),
    ("deep_recursion", "import sys\nsys.setrecursionlimit(10**5)\ndef f(n): return n and f(n - 1) + 1\nprint(f(20000))",
     [("", "20000")]),
    ("file_in_tmp", "with open('/tmp/a.txt', 'w') as f: f.write('hi')\nprint(open('/tmp/a.txt').read())",
     [("", "hi"), ("", "hi")]),
    ("file_here", "open('a', 'x').write('hi')\nprint(open('a').read())", [("", "hi"), ("", "hi")]),
    ("temporary_file", "import tempfile\nwith tempfile.TemporaryFile() as f:\n    f.write(b'abc'); f.seek(0); print(f.read())",
     [("", "b'abc'")]),
    ("child_process", "import subprocess, sys\nprint(subprocess.check_output([sys.executable, '-c', 'print(6 * 7)']).decode())",
     [("", "42")]),
    ("child_killed_that_takes_too_long", "import subprocess, sys\ntry: subprocess.run([sys.executable, '-c', 'while True: pass'], timeout=0.05)\n"
     "except subprocess.TimeoutExpired: print('late')", [("", "late")]),
    ("child_group_killed", "import os, signal, subprocess, sys\np = subprocess.Popen([sys.executable, '-c', 'while True: pass'], start_new_session=True)\n"
     "os.killpg(p.pid, signal.SIGKILL)\nprint(p.wait() < 0)", [("", "True")]),
    ("fork_and_pipe", "import os\nr, w = os.pipe()\nif not os.fork():\n    os.write(w, b'hi'); os._exit(0)\n"
     "os.wait(); print(os.read(r, 9).decode())", [("", "hi")]),
    ("event_loop", "import asyncio\nasync def main():\n    print(sum(await asyncio.gather(*(one(i) for i in range(9)))))\n"
     "async def one(i):\n    await asyncio.sleep(0.001); return i\nasyncio.run(main())", [("", "36")]),
    ("thread_pool", "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as pool:\n"
     "    print(sum(pool.map(lambda x: x * x, range(10))))", [("", "285")]),
    ("threads_of_a_large_machine", "import threading\nfrom concurrent.futures import ThreadPoolExecutor\n"
     "together = threading.Barrier(32)\nwith ThreadPoolExecutor(32) as pool:\n    print(sum(pool.map(lambda x: together.wait() * 0 + x, range(32))))",
     [("", "496")]),
    ("memory_of_100_mb", "x = bytearray(100 << 20)\nprint(len(x))", [("", "104857600")]),
    ("memory_shared_with_a_child", "import mmap, os\nm = mmap.mmap(-1, 1 << 20)\nif not os.fork():\n    m[:2] = b'hi'; os._exit(0)\nos.wait()\n"
     "print(m[:2].decode())", [("", "hi")]),
    ("memory_in_many_pieces", "held = [bytes(150000) for _ in range(2500)]\ndel held[::2]\nprint(len(held))", [("", "1250")]),
    ("a_fifth_of_a_second", "n = 0\nfor i in range(2000000): n += i\nprint(n)", [("", "1999999000000")]),
    ("alarm", "import signal\nsignal.signal(signal.SIGALRM, lambda *a: print('rang'))\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\n"
     "signal.pause()", [("", "rang")]),
    ("seeded_random", "import random\nrandom.seed(1)\nprint(random.randint(1, 100), random.randint(1, 100))", [("", "18 73")]),
    ("hashes", "import hashlib\nprint(hashlib.sha256(b'x').hexdigest()[:8])", [("", "2d711642")]),
    ("compressed", "import zlib, bz2, lzma\nprint(*(len(m.decompress(m.compress(b'a' * 99))) for m in (zlib, bz2, lzma)))",
     [("", "99 99 99")]),
    ("database", "import sqlite3\nc = sqlite3.connect(':memory:')\nprint(c.execute('select 6 * 7').fetchone()[0])", [("", "42")]),
    ("decimal_and_fraction", "from decimal import Decimal\nfrom fractions import Fraction\n"
     "print(Decimal('0.1') + Decimal('0.2'), Fraction(1, 3) + Fraction(1, 6))", [("", "0.3 1/2")]),
    ("dataclass_and_enum", "from dataclasses import dataclass\nfrom enum import Enum\n@dataclass\nclass P:\n    x: int = 1\n"
     "class C(Enum):\n    A = 1\nprint(P(), C.A)", [("", "P(x=1) C.A")]),
    ("pickled", "import pickle\nclass A:\n    def __init__(self): self.x = 5\nprint(pickle.loads(pickle.dumps(A())).x)", [("", "5")]),
    ("heap_and_bisect", "import heapq, bisect\nh = [3, 1, 2]; heapq.heapify(h)\nprint(heapq.heappop(h), bisect.bisect([1, 2, 3], 2))",
     [("", "1 2")]),
    ("walrus_and_match", "match (n := int(input())):\n    case 1: print('one')\n    case _: print('many', n)",
     [("1", "one"), ("5", "many 5")]),
    ("exec_and_eval", "exec('x = 3')\nprint(eval('x + 1'))", [("", "4")]),
    ("class_with_equality", "class A:\n    def __eq__(self, o): return True\nprint(A() == 3)", [("", "True")]),
    ("traceback_printed", "import traceback, sys\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc(file=sys.stderr)\nprint('ok')",
     [("", "ok")]),
    ("numpy_free_matrix", "a = [[1, 2], [3, 4]]\nprint(*[sum(x * y for x, y in zip(r, c)) for r in a for c in zip(*a)])",
     [("", "7 10 15 22")]),
    ("file_left_open", "out = open(1, 'w')\nout.write('kept')", [("", "kept")]),
    ("output_closed", "import sys\nprint(1)\nsys.stdout.close()", [("", "1")]),
    ("output_replaced", "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)\nprint(1)", [("", "1")]),
    ("deleted_at_the_end", "class A:\n    def __del__(self): print('gone')\na = A()\nprint('end')", [("", "end\ngone")]),
    ("exit_by_exit", "print(1)\nimport sys\nsys.exit(None)", [("", "1")]),
    ("exit_without_sys", "print(1)\nif input() == 'x': exit()\nprint(2)\nquit(0)", [("x", "1"), ("y", "1\n2")]),
    ("output_of_its_own", "import io, os, sys\nclass Fast(io.IOBase):\n    def __init__(self): self.held = []\n"
     "    def write(self, text): self.held.append(text)\n    def flush(self): os.write(1, ''.join(self.held).encode()); self.held.clear()\n"
     "sys.stdout = Fast()\nprint(1)", [("", "1")]),
    ("byte_order_mark", "\ufeffprint(1)", [("", "1")]),
    ("recursion_of_a_large_grid", "def f(n): return n and f(n - 1) + 1\nprint(f(20000))", [("", "20000")]),
    ("recursion_through_a_cache", "from functools import lru_cache\n@lru_cache(None)\ndef f(n): return n and f(n - 1) + 1\nprint(f(20000))",
     [("", "20000")]),
    # ---- functions
    ("function", "def solve(a, b): return a + b", [([2, 3], 5), ([-1, 1], 0)]),
    ("method_of_solution", "class Solution:\n    def solve(self, nums): return sorted(nums)", [([[3, 1, 2]], [1, 2, 3])]),
    ("typed_method", "from typing import List, Optional\nclass Solution:\n    def solve(self, x: List[int]) -> Optional[int]:\n"
     "        return max(x) if x else None", [([[1, 5]], 5), ([[]], None)]),
    ("method_as_at_leetcode", "class Solution:\n    def solve(self, x: List[int]) -> Optional[Dict[str, int]]:\n"
     "        h = list(x); heapify(h); c = defaultdict(int); c['n'] = len(x); c['g'] = math.gcd(*x)\n"
     "        return c if heappop(h) == min(x) else None", [([[4, 6]], {"n": 2, "g": 2})]),
    ("own_names_like_offered_ones", "def count(x): return x + 1\nclass List: pass\ndef solve(x):\n    List.add = 1\n    return count(x) + List.add",
     [([1], 3)]),
    ("tuple_for_list", "def solve(x): return (x, (x, x))", [([1], [1, [1, 1]])]),
    ("booleans", "def solve(x): return x > 0", [([1], True), ([-1], False)]),
    ("text", "def solve(s): return s.upper() + '→'", [(["äb"], "ÄB→"), ([""], "→")]),
    ("mapping", "def solve(s): return {c: s.count(c) for c in s}", [(["aab"], {"a": 2, "b": 1})]),
    ("numbered_mapping", "def solve(n): return {i: i * i for i in range(n)}", [([3], {"0": 0, "1": 1, "2": 4})]),
    ("fraction_close", "def solve(x): return x * 3", [([0.1], 0.3)]),
    ("whole_for_fraction", "def solve(x): return x // 2", [([4], 2.0)]),
    ("large_integers", "import math\ndef solve(n): return math.factorial(n)", [([20], 2432902008176640000)]),
    ("larger_integers", "import math\nprint(math.factorial(int(input())))", [("30", "265252859812191058636308480000000")]),
    ("nested", "def solve(n): return [[j for j in range(i)] for i in range(n)]", [([3], [[], [0], [0, 1]])]),
    ("prints_meanwhile", "def solve(x):\n    print('thinking')\n    return x", [([1], 1)]),
    ("memoised", "from functools import lru_cache\n@lru_cache(None)\ndef solve(n): return n if n < 2 else solve(n - 1) + solve(n - 2)",
     [([80], 23416728348467685)]),
    ("generator_listed", "def solve(n): return list(x * x for x in range(n) if x % 2)", [([6], [1, 9, 25])]),
    ("helper_and_state", "seen = []\ndef helper(x): seen.append(x); return len(seen)\ndef solve(x): return helper(x) + helper(x)",
     [([1], 3), ([1], 3)]),
    ("guarded_main_is_left_out", "def solve(x): return x\nif __name__ == '__main__':\n    raise SystemExit(input())", [([1], 1)]),
    ("subclass_of_int", "class N(int): pass\ndef solve(x): return N(x)", [([4], 4)]),
    ("large_value", "def solve(n): return list(range(n))", [([50000], list(range(50000)))]),
]  # fmt: skip
