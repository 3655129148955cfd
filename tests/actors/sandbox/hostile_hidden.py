"""Hostile programs that use memory where no limit of the kernel counts it, and what belongs to all of their user."""

# a program is easier to read on its line
HIDDEN: list[tuple[str, str, str]] = [
    ("shared_memory_let_go_of", "memory", """
import mmap, os, time
def hold():
    held = []
    for _ in range(30):
        held.append(mmap.mmap(-1, 10 << 20))
        held[-1].write(b"x" * (10 << 20)); held[-1].madvise(mmap.MADV_DONTNEED)
    time.sleep(9)
for _ in range(3):
    if not os.fork(): hold()
time.sleep(9)
"""),
    ("shared_memory_unmapped_but_for_a_page", "memory", """
import ctypes, time
libc, size = ctypes.CDLL(None), 16 << 20
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
for _ in range(60):
    place = libc.mmap(None, size, 3, 0x21, -1, 0)
    ctypes.memset(place, 1, size)
    libc.munmap(place + 4096, size - 4096)
time.sleep(9)
"""),
    ("shared_memory_of_devices", "memory", """
import mmap, os, time
zero, held = os.open("/dev/zero", os.O_RDWR), []
for _ in range(40):
    held.append(mmap.mmap(zero, 10 << 20))
    held[-1].write(b"x" * (10 << 20)); held[-1].madvise(mmap.MADV_DONTNEED)
time.sleep(9)
"""),
    ("shared_memory_in_one_piece", "failed", "import mmap\nmmap.mmap(-1, 200 << 20)"),
    ("shared_memory_of_more_than_four_gigabytes", "failed", "import mmap\nmmap.mmap(-1, (1 << 32) + 4096)"),
    ("memory_of_threads_whose_first_has_ended", "memory", """
import ctypes, os, threading, time
def hold():
    x = bytearray(150 << 20); time.sleep(9)
for _ in range(6):
    if not os.fork():
        threading.Thread(target=hold).start(); time.sleep(0.1)
        ctypes.CDLL(None).syscall(60, 0)
time.sleep(9)
"""),
    ("memory_of_sockets", "memory", """
import os, socket, time
def hold():
    held = []
    try:
        while True:
            held += socket.socketpair()
            held[-1].setblocking(False)
            try:
                while True: held[-1].send(bytes(1))
            except BlockingIOError: pass
    except OSError: time.sleep(9)
for _ in range(38):
    if not os.fork(): hold()
time.sleep(9)
"""),
    ("memory_of_sockets_with_large_buffers", "failed", """
import socket
one, other = socket.socketpair()
one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
"""),
    ("memory_of_mappings", "memory", """
import ctypes, os, time
libc = ctypes.CDLL(None)
for n in range(60000): libc.mmap(None, 4096, 1 + n % 2 * 2, 0x22, -1, 0)
for _ in range(38):
    if not os.fork(): time.sleep(9)
time.sleep(9)
"""),
    ("pipes_of_its_user_used_up", "", """
import fcntl, os, time
def hold():
    held = []
    try:
        while True:
            held += os.pipe()
            try: fcntl.fcntl(held[-1], 1031, 1 << 20)
            except OSError: pass
    except OSError: time.sleep(9)
for _ in range(38):
    if not os.fork(): hold()
time.sleep(9)
"""),
]  # fmt: skip
