"""torch's TCP store on one address of this machine, where torch itself would listen on all of its interfaces."""

from __future__ import annotations

import ipaddress
import socket

from torch.distributed import TCPStore

from rlhf_megatron.errors import UserError
from rlhf_megatron.untrusted import reason_of, shown


def serve_store(host: str, port: int, nodes: int) -> TCPStore | None:
    """Return a store that listens on the address of ``host``; port 0: a free one. Keep it as long as it is to be
    shared.

    What torch asks for in this process at the same port (``multi_tenant``) uses it. None where that is left to torch:
    the address is not this machine's, the port is taken, or ``host`` is a loopback name that other nodes cannot reach,
    as some machines call themselves. Raises UserError where ``host`` is none.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(f"{shown(host)}, port {port}: no address to listen on ({reason_of(error)})") from error
    if nodes > 1 and ipaddress.ip_address(address[0]).is_loopback:
        return None
    try:
        listener = socket.create_server((str(address[0]), port), family=family, backlog=socket.SOMAXCONN)
    except OSError:
        return None
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, multi_tenant=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
