"""Limits that a worker process takes on itself before it runs code of others, and that it cannot take off."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

# Numbers of <linux/sched.h> and <linux/sockios.h>.
_NEW_USER_NAMESPACE, _NEW_NETWORK_NAMESPACE = 0x10000000, 0x40000000
_SET_INTERFACE_FLAGS, _UP, _RUNNING = 0x8914, 0x1, 0x40


def leave_network() -> None:
    """Take this process, and what it starts, off the network: nothing is left but a loopback of its own.

    Sockets in files stay within reach. Called before a second thread begins.

    Raises:
        OSError: the kernel, or a container's filter of system calls, allows no namespaces.
    """
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_USER_NAMESPACE | _NEW_NETWORK_NAMESPACE):
        raise OSError(ctypes.get_errno(), "unshare")
    # Its files are its own as before; without the maps it would see them as nobody's.
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with contextlib.suppress(OSError):
            Path("/proc/self", name).write_text(text)
    with contextlib.suppress(OSError), socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SET_INTERFACE_FLAGS, struct.pack("16sH14x", b"lo", _UP | _RUNNING))
