"""The world of processes that torchrun started: joining it, and leaving it in order."""

from __future__ import annotations

import contextlib
import datetime
import gc
import hashlib
import os
import socket
from typing import Any

import torch
import torch.distributed as dist

from rlhf_megatron.errors import UserError
from rlhf_megatron.topology.open_files import check_file_limit
from rlhf_megatron.topology.store import serve_store

_STORE_SECONDS = 5.0
_NO_STORE = (KeyError, ValueError, OverflowError, OSError, RuntimeError)  # no variables of torchrun, or no answer
_REFUSAL = "refusal"


def waiting_minutes(hang_seconds: float) -> float:
    """Return the minutes that a rank may wait for others. Where a hang is noticed, that comes first: it tells more."""
    return max(30.0, hang_seconds / 60 + 5)


def join_world(timeout_minutes: float = 30.0) -> None:
    """Initialise torch.distributed from torchrun's environment: NCCL for GPU tensors, gloo for CPU tensors.

    Raises UserError if the process was not started by torchrun, has no GPU of its own where others have, or may not
    have enough files and sockets open.
    """
    if "RANK" not in os.environ:
        raise UserError("this command runs under torchrun: torchrun --nproc-per-node N launch/train.py RECIPE")
    check_file_limit(int(os.environ["WORLD_SIZE"]))
    # A pair of ranks then gets its connection when one first sends to the other, not each pair of each group at once.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    timeout = datetime.timedelta(minutes=timeout_minutes)
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=timeout, **_store_of_this_attempt(timeout))
        return
    local_rank, devices = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local_rank >= devices:
        raise UserError(f"local rank {local_rank} has no GPU: this node has {devices}; lower --nproc-per-node")
    torch.cuda.set_device(local_rank)
    # With its device named, NCCL connects at once: a first transfer between two ranks then needs no others.
    device = torch.device("cuda", local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device, **_store_of_this_attempt(timeout))


def _store_of_this_attempt(timeout: datetime.timedelta) -> dict[str, Any]:
    """Return the rendezvous of this attempt's ranks, as arguments of init_process_group; empty: torch's own choice.

    Ranks that torchrun has started again need another part of its store, which still has the addresses of the dead. On
    several nodes the agents do not agree on the number of the attempt (github.com/pytorch/pytorch/issues/135712);
    there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 has each attempt make a store of its own, as launch/slurm/node.sh does.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    nodes = world // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store: dist.Store | None = None
    if not agents_keep_a_store():
        store = store_of_ranks(timeout)
    elif attempt != "0" and nodes == 1:
        store = dist.PrefixStore(f"attempt-{attempt}", dist.TCPStore(address, port, is_master=False))
    if store is None:
        return {}
    store.set_timeout(timeout)
    return {"store": store, "rank": rank, "world_size": world}


def hosts_of_ranks() -> list[int]:
    """Return the number of each rank's host, which is that of its torchrun; collective over the world."""
    hosts = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    hosts[dist.get_rank()] = int(os.environ.get("GROUP_RANK", "0"))
    dist.all_reduce(hosts)
    numbers: list[int] = hosts.tolist()
    return numbers


def agents_keep_a_store() -> bool:
    """Return whether torchrun's agents serve a store beside their ranks, which outlives an attempt."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_of_ranks(timeout: datetime.timedelta) -> dist.Store:
    """Return the store that rank 0 of an attempt serves where the agents keep none; asked for again, it is the same
    one."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    nodes = world // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return (serve_store(address, port, nodes) if rank == 0 else None) or dist.TCPStore(
        address, port, is_master=rank == 0, timeout=timeout, multi_tenant=True, wait_for_workers=False
    )


def first_to_say(text: str) -> bool:
    """Return whether no other process of the run has asked this about ``text``: one speaks where all ranks fail alike.

    It asks the store that torchrun keeps beside its ranks, so no rank waits for another and the world need not be
    joined. Where there is no such store, every process is taken for the first.
    """
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
    try:
        said = _store_of_torchrun().add(f"said/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{digest}", 1)
    except _NO_STORE:
        return True
    return bool(said == 1)


def note_refusal(line: str) -> None:
    """Leave word in torchrun's store that its input is not right, which no other attempt would change."""
    with contextlib.suppress(*_NO_STORE):
        _store_of_torchrun().set(_REFUSAL, line)


def refusal_before() -> str | None:
    """Return the line with which an attempt of the same torchrun has refused its input, if one has."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return None
    try:
        store = _store_of_torchrun()
        return bytes(store.get(_REFUSAL)).decode() if store.check([_REFUSAL]) else None
    except _NO_STORE:
        return None


def _store_of_torchrun() -> dist.Store:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with socket.create_connection((address, port), _STORE_SECONDS):
        pass  # somebody is there; torch would ask again and again, and write of each time
    return dist.TCPStore(
        address,
        port,
        is_master=False,
        timeout=datetime.timedelta(seconds=_STORE_SECONDS),
        wait_for_workers=False,
    )


def leave_world() -> None:
    """End torch.distributed for this process, unless that has been done; call it when every rank is done.

    The process's CUDA graphs end with it. NCCL would wait for those that hold its collectives without end, as graphs of
    a model that drafts do (https://github.com/pytorch/pytorch/issues/115388).
    """
    if not dist.is_initialized():
        return
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        gc.unfreeze()  # vLLM freezes what there is when an engine has begun; of that gc would list nothing
        for graph in [each for each in gc.get_objects() if issubclass(type(each), torch.cuda.CUDAGraph)]:
            graph.reset()
    dist.destroy_process_group()
