"""Processes of this machine that join a world over gloo, timed."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def time_to_join(ranks: int, lazy: bool) -> dict[str, Any]:
    """Return seconds until ``ranks`` processes have joined and exchanged once, and the connections of the first one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(lazy))
    with tempfile.TemporaryDirectory() as folder:
        server = os.fork()
        if server == 0:
            store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
            time.sleep(3600 if store else 0)
        processes = []
        for rank in range(ranks):
            processes.append(os.fork())
            if processes[-1] == 0:
                _join(rank, ranks, port, Path(folder))
                os._exit(0)
        failed = sum(os.waitpid(process, 0)[1] != 0 for process in processes)
        os.kill(server, 9)
        os.waitpid(server, 0)
        rows = [list(map(float, file.read_text().split())) for file in Path(folder).iterdir()]
    joined, exchanged, sockets = map(max, zip(*rows, strict=True))
    return {
        "ranks": ranks,
        "connections": "as they are used" if lazy else "all at once",
        "failed": failed,
        "seconds to join": joined,
        "seconds to join and exchange": exchanged,
        "sockets of a rank": sockets,
    }


def _join(rank: int, ranks: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    before = _sockets()
    store.add("here", 1)
    while store.add("here", 0) < ranks:  # looking up names of hosts may take the store long, where nobody answers
        time.sleep(0.5)
    start = time.perf_counter()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    joined = time.perf_counter() - start
    dist.barrier()
    dist.all_reduce(torch.ones(1024))
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, rank)
    assert gathered == list(range(ranks))
    exchanged = time.perf_counter() - start
    (folder / str(rank)).write_text(f"{joined} {exchanged} {_sockets() - before}")
    dist.barrier()


def _sockets() -> int:
    links = Path("/proc/self/fd").iterdir()
    return sum(os.readlink(link).startswith("socket") for link in links if link.is_symlink())
