"""The other half of the hostile programs: ways out to files, processes, the network and the kernel."""

# ruff: noqa: E501  # a program is easier to read on its line
ESCAPES: list[tuple[str, str, str]] = [
    # ---- files and environment
    ("file_read", "failed", "print(find(open('<path>').read()))"),
    ("file_read_by_parent_links", "failed", "print(find(open('../' * 40 + '<path>').read()))"),
    ("symlink", "failed", "import os\nos.symlink('<path>', '/tmp/link')\nprint(find(open('/tmp/link').read()))"),
    ("symlink_of_root", "failed", "import os\nos.symlink('/', '/tmp/r')\nprint(find(open('/tmp/r<path>').read()))"),
    ("hard_link", "failed", "import os\nos.link('<path>', '/tmp/link')\nprint(find(open('/tmp/link').read()))"),
    ("environment", "wrong", "import os\nprint(find(repr(os.environ)))"),
    ("environment_by_c", "wrong", """
import ctypes
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
print(find(repr(libc.getenv(b"ROLLSTREAM_SECRET"))))
"""),
    ("environment_of_others", "failed", "print(find(open('/proc/<pid>/environ').read()))"),
    ("environment_of_process_one", "failed", "print(find(open('/proc/1/environ').read()))"),
    ("root_of_process_one", "failed", "print(find(open('/proc/1/root<path>').read()))"),
    ("proc_mounted_anew", "forbidden", """
import ctypes, os
os.mkdir("/tmp/p")
ctypes.CDLL(None).mount(b"proc", b"/tmp/p", b"proc", 0, None)
print(find(open("/tmp/p/1/environ").read()))
"""),
    ("whole_tree", "wrong", """
import os
seen = ""
for folder, _, names in os.walk("/"):
    if folder.startswith(("/usr", "/root", "/home", "/opt", "/dev", "/lib")): continue
    for name in names:
        try: seen += open(os.path.join(folder, name), errors="replace").read(1 << 16)
        except OSError: pass
print(find(seen))
"""),
    ("passwords", "failed", "print(open('/etc/shadow').read())"),
    ("file_written", "failed", "open('<mark>', 'w').write('x')"),
    ("runtime_written", "failed", "import os\nopen(os.__file__, 'a').write('x')"),
    ("supervisor_written", "failed", "open('/supervisor.pyc', 'ab').write(b'x')"),
    ("device_made", "failed", "import os\nos.mknod('/tmp/disk', 0o60660, os.makedev(254, 0))\nopen('/tmp/disk').read()"),
    ("set_user_id_file", "wrong", """
import os, shutil, subprocess, sys
shutil.copy(sys.executable, "/tmp/python")
os.chmod("/tmp/python", 0o6755)
print(subprocess.run(["/tmp/python", "-c", "import os; print(os.geteuid())"], capture_output=True).stdout)
"""),
    ("chroot_out", "forbidden", "import os\nos.mkdir('/tmp/c')\nos.chroot('/tmp/c')\nprint(find(open('<path>').read()))"),
    ("handle_opened", "forbidden", """
import ctypes
ctypes.CDLL(None).open_by_handle_at(3, ctypes.create_string_buffer(128), 0)
"""),
    ("site_packages", "failed", "import torch, msgpack, nats"),
    ("host_sources", "failed", "import actors.reward.code, schemas"),
    # ---- network
    ("tcp", "forbidden", """
import socket
link = socket.create_connection(("127.0.0.1", <port>), 2)
print(find(link.recv(100).decode()))
"""),
    ("udp", "forbidden", "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', <port>))"),
    ("unix_socket", "failed", "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0rollstream-<port>')"),
    ("raw_socket", "forbidden", "import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW)"),
    ("netlink", "forbidden", "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)"),
    ("http", "forbidden", "import urllib.request\nprint(find(urllib.request.urlopen('http://127.0.0.1:<port>').read()))"),
    ("name_lookup", "", "import socket\nsocket.gethostbyname('example.com')"),
    ("asyncio_connection", "forbidden", """
import asyncio
async def main():
    reader, _ = await asyncio.open_connection("127.0.0.1", <port>)
    print(find((await reader.read(100)).decode()))
asyncio.run(main())
"""),
    ("socket_in_a_child", "wrong", """
import os, socket
if not os.fork():
    link = socket.create_connection(("127.0.0.1", <port>), 2)
    os.write(1, link.recv(100)); os._exit(0)
os.wait()
"""),
    ("socket_by_32_bit_call", "", """
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes([0xB8, 0x67, 1, 0, 0, 0xBB, 2, 0, 0, 0, 0xB9, 1, 0, 0, 0, 0x31, 0xD2, 0xCD, 0x80, 0xC3]))
place = ctypes.addressof(ctypes.c_char.from_buffer(code))
print(ctypes.CFUNCTYPE(ctypes.c_int)(place)())
"""),
    ("socket_by_x32_call", "", "import ctypes\nprint(ctypes.CDLL(None).syscall(0x40000000 + 41, 2, 1, 0))"),
    # ---- other processes
    ("parent_killed", "wrong", "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)"),
    ("parent_stopped", "wrong", "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)"),
    ("all_signals_to_parent", "wrong", """
import os
for number in range(1, 65):
    try: os.kill(os.getppid(), number)
    except OSError: pass
"""),
    ("all_killed", "", "import os, signal\nos.kill(-1, signal.SIGKILL)"),
    ("group_killed", "", "import os, signal\nos.killpg(0, signal.SIGTERM)"),
    ("host_process_killed", "failed", "import os, signal\nos.kill(<pid>, signal.SIGKILL)"),
    ("signals_by_descriptor", "wrong", """
import os, signal
parent = os.pidfd_open(1)
for number in set(range(1, 65)) - {signal.SIGKILL}: signal.pidfd_send_signal(parent, number)
"""),
    ("signal_by_input", "wrong", """
import fcntl, os, signal
for fd in (0, 1, 2, 3):
    fcntl.fcntl(fd, fcntl.F_SETOWN, 1)
    fcntl.fcntl(fd, 10, signal.SIGSTOP)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
"""),
    ("limits_of_parent", "forbidden", """
import resource
resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))
"""),
    ("parent_starved", "failed", "import os\nos.setpriority(os.PRIO_PROCESS, 1, 19)"),
    ("traced", "forbidden", "import ctypes\nctypes.CDLL(None).ptrace(16, 1, 0, 0)"),
    ("memory_of_others", "forbidden", """
import ctypes
ctypes.CDLL(None).process_vm_readv(1, None, 0, None, 0, 0)
"""),
    ("descriptor_of_others", "forbidden", "import ctypes, os\nctypes.CDLL(None).syscall(438, os.pidfd_open(1), 50, 0)"),
    ("daemon", "wrong", """
import os, time
if not os.fork():
    os.setsid()
    if not os.fork():
        os.closerange(0, 64); time.sleep(300)
    os._exit(0)
"""),
    ("terminal_input", "failed", "import fcntl, termios\nfcntl.ioctl(0, termios.TIOCSTI, b'x')"),
    # ---- the kernel
    ("namespace", "forbidden", "import ctypes\nctypes.CDLL(None).unshare(0x10000000)"),
    ("namespace_by_clone", "forbidden", "import ctypes\nctypes.CDLL(None).syscall(56, 0x10000000 | 17, 0, 0, 0, 0)"),
    ("namespace_by_clone3", "", "import ctypes\nprint(ctypes.CDLL(None).syscall(435, ctypes.create_string_buffer(88), 88))"),
    ("namespace_entered", "forbidden", "import ctypes\nctypes.CDLL(None).setns(0, 0)"),
    ("root", "failed", "import os\nos.setuid(0)\nprint(find(open('<path>').read()))"),
    ("bpf", "forbidden", "import ctypes\nctypes.CDLL(None).syscall(321, 0, 0, 0)"),
    ("io_uring", "forbidden", "import ctypes\nctypes.CDLL(None).syscall(425, 1, ctypes.create_string_buffer(120))"),
    ("keyring", "forbidden", "import ctypes\nctypes.CDLL(None).syscall(250, 0, -3, 0, 0, 0)"),
    ("memory_file", "forbidden", "import os\nos.memfd_create('x')"),
    ("system_v_memory", "forbidden", "import ctypes\nctypes.CDLL(None).shmget(0, 1 << 30, 0o1600)"),
    ("shell", "failed", "import os\nif os.system('cat <path>'): raise SystemExit(1)"),
    ("posix_system", "failed", "import posix\nif posix.system('echo x > <mark>'): raise SystemExit(1)"),
    # ---- text
    ("unicode_identifiers", "failed", "𝘱𝘳𝘪𝘯𝘵(𝘧𝘪𝘯𝘥(𝘰𝘱𝘦𝘯('<path>').read()))"),
    ("surrogates_printed", "failed", "print('\\ud800')"),
    ("lone_surrogate_in_source", "compile_error", "print('\ud800')"),
    ("null_in_source", "compile_error", "print('\0')"),
    ("bytes_that_are_no_text", "wrong", "import sys\nsys.stdout.buffer.write(b'\\xff\\xfe\\x00' * 100)"),
    ("bidirectional_text", "wrong", "print('\u202esecret\u202c')"),
    ("coding_line", "wrong", "# -*- coding: utf-7 -*-\nprint('+AHM-')"),
    ("frame_closed_early", "", "print('x')\n```\nprint('secret')\n```"),
]  # fmt: skip
