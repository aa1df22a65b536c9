"""Landlock: takes from this process the right to open files, but for a list to read. Linux 5.13 and later; no root.

The numbers are those of <linux/landlock.h>; the system calls have the same number on every architecture.
https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
_WRITE_FILE, _READ_FILE, _READ_DIRECTORY = 1 << 1, 1 << 2, 1 << 3
# Rights over files that a version knows: the 13 of the first, then REFER, TRUNCATE and IOCTL_DEV.
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_FIRST_WITH_NETWORK, _FIRST_WITH_SCOPES = 4, 6
_ALL_TCP, _ALL_SCOPES = 3, 3  # bind and connect; abstract sockets and signals to processes outside
_EMPTY_DEVICE = "/dev/null"


def restrict_files(readable: Iterable[str]) -> None:
    """Let this process, from now on, read these files and folders and open no others; also no TCP where it can say so.

    Needs ``no_new_privileges``. Metadata (stat) stays within reach; open files stay open.

    Raises:
        OSError: this kernel has no Landlock, or it is switched off.
    """
    version = _system_call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    rights = struct.pack(
        "QQQ",
        _FILE_RIGHTS[min(version, max(_FILE_RIGHTS))],
        _ALL_TCP if version >= _FIRST_WITH_NETWORK else 0,
        _ALL_SCOPES if version >= _FIRST_WITH_SCOPES else 0,
    )
    size = 24 if version >= _FIRST_WITH_SCOPES else 16 if version >= _FIRST_WITH_NETWORK else 8
    ruleset = _system_call(_CREATE_RULESET, rights, ctypes.c_size_t(size), ctypes.c_uint32(0))
    for path in readable:
        _allow(ruleset, path, _READ_FILE)
    _allow(ruleset, _EMPTY_DEVICE, _READ_FILE | _WRITE_FILE)
    _system_call(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if stat.S_ISDIR(os.fstat(opened).st_mode):
        rights |= _READ_DIRECTORY
    rule = struct.pack("=Qi", rights, opened)
    _system_call(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
    os.close(opened)


def _system_call(number: int, *arguments: object) -> int:
    result: int = ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), "Landlock")
    return result
