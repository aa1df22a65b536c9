"""torchrun whose stores listen on one address only: python launch/torchrun.py ARGUMENTS OF TORCHRUN

A store has no authentication, torchrun unpickles what is in it, and torchrun alone has it listen on all interfaces.
Here it listens on the address of --rdzv-endpoint and --local-addr, or on 127.0.0.1 with --standalone.
"""

from __future__ import annotations

import argparse
import os

import torch.distributed as dist
from torch.distributed import run
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from rlhf_megatron.topology.store import serve_store

LOOPBACK = "127.0.0.1"


def main() -> None:
    """Serves the store of the rendezvous, if that is on this machine, and does what torchrun does."""
    options: argparse.Namespace = run.parse_args(None)
    nodes = run.parse_min_max_nnodes(options.nnodes)[1]
    if options.standalone:
        options.standalone, options.rdzv_id, options.local_addr = False, f"standalone-{os.getpid()}", LOOPBACK
        options.rdzv_backend, options.rdzv_endpoint = "c10d", f"{LOOPBACK}:0"
    store = None  # lives as long as torchrun, which takes it for the one that it asks for
    if options.rdzv_backend == "c10d":
        host, port = parse_rendezvous_endpoint(options.rdzv_endpoint, DEFAULT_PORT)
        store = serve_store(host, port, nodes)
    if store is not None:
        options.rdzv_conf = f"{options.rdzv_conf},is_host=1".strip(",")
        options.rdzv_endpoint = f"{host}:{store.port}"
    create = DynamicRendezvousHandler._create_tcp_store_server

    def create_on_one_address(handler: DynamicRendezvousHandler, address: str, port: int) -> dist.TCPStore:
        return serve_store(address, port, nodes) or create(handler, address, port)

    # The second store, which torchrun keeps for its ranks.
    DynamicRendezvousHandler._create_tcp_store_server = create_on_one_address  # type: ignore[assignment, method-assign]
    run.run(options)


if __name__ == "__main__":
    main()
