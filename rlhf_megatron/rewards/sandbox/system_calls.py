"""seccomp: takes system calls from this process that a program which only computes does not need.

Gone are sockets, processes, programs, signals to others, changes of files that Landlock does not know of, and
interfaces of the kernel that have no business here. Threads stay. A list of what is refused and not of what is allowed,
so that a newer C library works; a call that is not refused still meets Landlock, the limits, and no capabilities.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Sequence

# <linux/audit.h>: what a call's architecture must be; on x86-64 also the bit that marks calls of x32.
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
# Numbers on x86-64 and arm64 by name; None: there is no such call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # network
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200),
    # processes and programs
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    # others' processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "process_mrelease": (448, 448), "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    # files, beyond Landlock
    "truncate": (76, 45), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "setxattrat": (463, 463), "removexattrat": (466, 466), "getxattr": (191, 8),
    "lgetxattr": (192, 9), "listxattr": (194, 11), "llistxattr": (195, 12), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "inotify_init": (253, None), "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    # memory that no limit of a process counts
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    # of the kernel
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "syslog": (103, 116),
}  # fmt: skip
_CLONE, _CLONE3 = (56, 220), 435
_NEW_THREAD = 0x00010000
# Calls that name a process, which must be this one (0 too, of prlimit64: its own).
_OWN_PROCESS = {"kill": (62, 129), "tgkill": (234, 131), "prlimit64": (302, 261)}

# <linux/bpf_common.h>, <linux/seccomp.h>, <linux/prctl.h>
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data, little-endian
_SET_SECCOMP, _FILTER_MODE, _SET_NO_NEW_PRIVILEGES = 22, 2, 38
_CAPABILITY_VERSION = 0x20080522  # <linux/capability.h>

Instruction = tuple[int, int, int, int]


def no_new_privileges() -> None:
    """Give up what programs with set-user-id or file capabilities would give; asked for by Landlock and seccomp.

    Raises:
        OSError: the kernel refuses it.
    """
    _prctl(_SET_NO_NEW_PRIVILEGES, 1)


def drop_capabilities() -> None:
    """Give up all capabilities of this process, such as those of root or of a new user namespace.

    Raises:
        OSError: the kernel refuses it.
    """
    header, none = struct.pack("Ii", _CAPABILITY_VERSION, 0), struct.pack("6I", *[0] * 6)
    if ctypes.CDLL(None, use_errno=True).capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")


def refuse_system_calls() -> None:
    """Refuse them, from now on, to this process; EPERM is what they return. Needs ``no_new_privileges``.

    Raises:
        OSError: the kernel has no seccomp filters, or this is another architecture than x86-64 and arm64.
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no list of system calls for {machine}")
    install(_filter(machine, os.getpid()))


def install(instructions: Sequence[Instruction]) -> None:
    """Have the kernel run a filter's program, of (code, jump if true, if false, value), at each system call.

    Raises:
        OSError: the kernel has no seccomp filters, or ``no_new_privileges`` was not called.
    """
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in instructions))
    described = struct.pack("HxxxxxxP", len(instructions), ctypes.addressof(program))
    _prctl(_SET_SECCOMP, _FILTER_MODE, ctypes.c_char_p(described))


def _filter(machine: str, process_id: int) -> list[Instruction]:
    """Return the filter's program; only its last lines and the jumps over one line go on to the next check."""
    column = list(_ARCHITECTURES).index(machine)
    refuse, absent = (_RETURN, 0, 0, _ERROR | errno.EPERM), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)
    lines: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_GREATER_EQUAL, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _KILL),
        (_JUMP_EQUAL, 0, 1, _CLONE3),  # its flags are in memory: the C library then calls clone
        absent,
    ]
    for numbers in _REFUSED.values():
        if (number := numbers[column]) is not None:
            lines += [(_JUMP_EQUAL, 0, 1, number), refuse]
    clone: Sequence[Instruction] = [(_JUMP_SET, 1, 0, _NEW_THREAD), refuse]
    lines += _of_argument(_CLONE[column], clone)
    for name, pair in _OWN_PROCESS.items():
        own: list[Instruction] = [(_JUMP_EQUAL, 1, 0, process_id), refuse]
        if name == "prlimit64":
            own.insert(0, (_JUMP_EQUAL, 2, 0, 0))
        lines += _of_argument(pair[column], own)
    return [*lines, (_RETURN, 0, 0, _ALLOW)]


def _of_argument(number: int, checks: Sequence[Instruction]) -> list[Instruction]:
    """Return checks of the first argument of one call, which ends allowed where none returns."""
    body = [(_LOAD, 0, 0, _FIRST_ARGUMENT), *checks, (_RETURN, 0, 0, _ALLOW)]
    return [(_JUMP_EQUAL, 0, len(body), number), *body]


def _prctl(option: int, value: int, argument: object = 0) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), argument, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")
