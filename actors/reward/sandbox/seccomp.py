"""Filters of system calls, as the kernel's BPF takes them: what no program of an answer needs is not there.

Namespaces hide the host already. The filter takes away the network calls themselves, the memory that no other limit
counts (System V shared memory, memfd), the ways into other processes, and the kernel's most attacked corners. A process
that makes such a call is killed by SIGSYS, which tells the parent `forbidden`.

A second filter, which the supervisor is free of, takes SIGKILL away from the program: a SIGKILL then came from outside.
"""

import platform
import struct

from schemas.errors import UserError

_LOAD, _JUMP_EQUAL, _JUMP_SET, _JUMP_GREATER_EQUAL, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOMEM, _ENOSYS = 1, 12, 38
_JUMP_GREATER, _AND = 0x25, 0x54
_NR, _ARCH = 0, 4  # offsets in struct seccomp_data, little-endian
_ARG0, _ARG1, _ARG1_HIGH, _ARG2, _ARG2_HIGH, _ARG3 = 16, 24, 28, 32, 36, 40
_X32_BIT = 0x40000000
_NEW_NAMESPACES = 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000 | 0x00020000

# name: (x86_64, aarch64)
FORBIDDEN = {
    "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171), "bpf": (321, 280), "chroot": (161, 51),
    "clock_adjtime": (305, 266), "clock_settime": (227, 112), "delete_module": (176, 106),
    "fanotify_init": (300, 262), "finit_module": (313, 273), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fsopen": (430, 430), "fspick": (433, 433), "init_module": (175, 105), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "io_uring_setup": (425, 425), "kcmp": (312, 272), "kexec_file_load": (320, 294),
    "kexec_load": (246, 104), "keyctl": (250, 219), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "migrate_pages": (256, 238), "mount": (165, 40), "mount_setattr": (442, 442), "move_mount": (429, 429),
    "move_pages": (279, 239), "mq_open": (240, 180), "msgget": (68, 186), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "open_tree": (428, 428), "perf_event_open": (298, 241), "personality": (135, 92),
    "pidfd_getfd": (438, 438), "pivot_root": (155, 41), "process_madvise": (440, 440), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "ptrace": (101, 117), "quotactl": (179, 60), "reboot": (169, 142),
    "request_key": (249, 218), "semget": (64, 190), "setdomainname": (171, 162), "sethostname": (170, 161),
    "setns": (308, 268), "settimeofday": (164, 170), "shmat": (30, 196), "shmget": (29, 194),
    "swapoff": (168, 225), "swapon": (167, 224), "syslog": (103, 116), "umount2": (166, 39), "unshare": (272, 97),
    "userfaultfd": (323, 282), "vhangup": (153, 58),
}  # fmt: skip
REFUSED = {
    "ioprio_set": (251, 30), "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "setpriority": (141, 140),
    "sync": (162, 81), "syncfs": (306, 267),
}  # fmt: skip
"""Fails with EPERM. A process may call them on others of its user: a program could starve its supervisor. The last two
have all disks of the machine written out."""
SHARED_BYTES_MAX = 16 << 20
"""Of one mapping of shared memory. Its pages stay, and are seen nowhere, when all but one of them are unmapped."""
SIGNALS = {
    "kill": (62, 129, _ARG1), "pidfd_send_signal": (424, 424, _ARG1), "rt_sigqueueinfo": (129, 138, _ARG1),
    "rt_tgsigqueueinfo": (297, 240, _ARG2), "tgkill": (234, 131, _ARG2), "tkill": (200, 130, _ARG1),
}  # fmt: skip
"""The last is where the signal's number is."""
_PRLIMIT = (302, 261)
_SETRLIMIT = (160, 164)
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_MMAP = (9, 222)
_MAP_SHARED = 1
_SOCKET = (41, 198)
_AF_UNIX = 1
_SETSOCKOPT = (54, 208)
_SOL_SOCKET, _SO_SNDBUF, _SO_SNDBUFFORCE = 1, 7, 32
_FCNTL = (72, 25)
_TIMER_CREATE = (222, 107)
_SIGKILL, _F_SETSIG, _RLIMIT_CPU, _EXIT_SIGNAL = 9, 10, 0, 0xFF
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def bpf(machine: str | None = None) -> bytes:
    """The filter for a machine, by default this one. Raises `UserError` for one whose numbers are not known."""
    column, architecture = _known(machine)
    kill = [_instruction(_RETURN, _KILL_PROCESS)]
    body = [
        _instruction(_LOAD, _ARCH),
        _instruction(_JUMP_EQUAL, architecture, 1, 0),
        *kill,
        _instruction(_LOAD, _NR),
        _instruction(_JUMP_GREATER_EQUAL, _X32_BIT, 0, 1),
        *kill,
    ]
    for numbers in FORBIDDEN.values():
        body += [_instruction(_JUMP_EQUAL, numbers[column], 0, 1), *kill]
    for numbers in REFUSED.values():
        body += [_instruction(_JUMP_EQUAL, numbers[column], 0, 1), _instruction(_RETURN, _ERRNO | _EPERM)]
    body += [
        _instruction(_JUMP_EQUAL, _PRLIMIT[column], 0, 4),  # of other processes, such as the supervisor
        _instruction(_LOAD, _ARG0),
        _instruction(_JUMP_EQUAL, 0, 1, 0),
        *kill,
        _instruction(_RETURN, _ALLOW),
        # its flags lie in memory, where no filter looks: the C library then uses clone, whose flags are looked at
        _instruction(_JUMP_EQUAL, _CLONE3[column], 0, 1),
        _instruction(_RETURN, _ERRNO | _ENOSYS),
        _instruction(_JUMP_EQUAL, _CLONE[column], 0, 4),
        _instruction(_LOAD, _ARG0),
        _instruction(_JUMP_SET, _NEW_NAMESPACES, 0, 1),
        *kill,
        _instruction(_RETURN, _ALLOW),
        _instruction(_JUMP_EQUAL, _SOCKET[column], 0, 4),
        _instruction(_LOAD, _ARG0),
        _instruction(_JUMP_EQUAL, _AF_UNIX, 1, 0),  # the C library asks there for the names of users, and is content
        *kill,
        _instruction(_RETURN, _ERRNO | _EPERM),
        _instruction(_JUMP_EQUAL, _SETSOCKOPT[column], 0, 7),
        *(_instruction(_LOAD, _ARG1), _instruction(_JUMP_EQUAL, _SOL_SOCKET, 0, 4)),
        *(_instruction(_LOAD, _ARG2), _instruction(_JUMP_EQUAL, _SO_SNDBUF, 1, 0)),
        _instruction(_JUMP_EQUAL, _SO_SNDBUFFORCE, 0, 1),
        _instruction(_RETURN, _ERRNO | _EPERM),  # the kernel keeps as much as that for each socket
        _instruction(_RETURN, _ALLOW),
        _instruction(_JUMP_EQUAL, _MMAP[column], 0, 7),
        *(_instruction(_LOAD, _ARG3), _instruction(_JUMP_SET, _MAP_SHARED, 0, 5)),
        *(_instruction(_LOAD, _ARG1_HIGH), _instruction(_JUMP_EQUAL, 0, 0, 2)),
        *(_instruction(_LOAD, _ARG1), _instruction(_JUMP_GREATER, SHARED_BYTES_MAX, 0, 1)),
        _instruction(_RETURN, _ERRNO | _ENOMEM),
        _instruction(_RETURN, _ALLOW),
    ]
    return b"".join(body)


def bpf_without_sigkill(machine: str | None = None) -> bytes:
    """The filter, to be added to the first, for who must not be able to end itself by SIGKILL, in whatever way.

    Signals of that number may be sent to nobody: a process has as many numbers as threads. Nor may the kernel be made
    to send one: by a timer, by input or by the end of a child, or by a limit of CPU time that is set lower (EPERM).
    """
    column, _ = _known(machine)
    kill, allow = _instruction(_RETURN, _KILL_PROCESS), _instruction(_RETURN, _ALLOW)
    refuse = _instruction(_RETURN, _ERRNO | _EPERM)

    def call(number: int, *rules: bytes) -> list[bytes]:
        """`rules` for a system call; whoever comes to their end is allowed."""
        return [_instruction(_JUMP_EQUAL, number, 0, len(rules) + 1), *rules, allow]

    def sends(argument: int) -> list[bytes]:
        return [_instruction(_LOAD, argument), _instruction(_JUMP_EQUAL, _SIGKILL, 0, 1), kill]

    program = [_instruction(_LOAD, _NR)]
    for *numbers, argument in SIGNALS.values():
        program += call(numbers[column], *sends(argument))
    program += call(_TIMER_CREATE[column], kill)  # the number lies in memory, where no filter looks
    program += call(
        _FCNTL[column], _instruction(_LOAD, _ARG1), _instruction(_JUMP_EQUAL, _F_SETSIG, 0, 3), *sends(_ARG2)
    )
    program += call(
        _CLONE[column],
        _instruction(_LOAD, _ARG0),
        _instruction(_AND, _EXIT_SIGNAL),
        _instruction(_JUMP_EQUAL, _SIGKILL, 0, 1),
        kill,
    )
    program += call(
        _SETRLIMIT[column], _instruction(_LOAD, _ARG0), _instruction(_JUMP_EQUAL, _RLIMIT_CPU, 0, 1), refuse
    )
    program += call(
        _PRLIMIT[column],
        *(_instruction(_LOAD, _ARG1), _instruction(_JUMP_EQUAL, _RLIMIT_CPU, 0, 5)),
        *(_instruction(_LOAD, _ARG2), _instruction(_JUMP_EQUAL, 0, 0, 2)),  # no new limit is named: it asks
        *(_instruction(_LOAD, _ARG2_HIGH), _instruction(_JUMP_EQUAL, 0, 1, 0)),
        refuse,
    )
    return b"".join([*program, allow])


def _known(machine: str | None) -> tuple[int, int]:
    """The column of a machine's numbers, and its architecture as the kernel calls it. Raises `UserError`."""
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        raise UserError(
            f"The sandbox for code does not know the system calls of {machine}, only of {', '.join(_MACHINES)}.",
            "Run reward workers for code on such a machine.",
        )
    return _MACHINES[machine]


def _instruction(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One `struct sock_filter`: the jumps count instructions from the next one on."""
    return struct.pack("<HBBI", code, if_true, if_false, operand)
