"""The world of processes that torchrun started: joining it, and leaving it in order."""

from __future__ import annotations

import datetime
import hashlib
import os
from typing import Any

import torch
import torch.distributed as dist

from rlhf_megatron.recipe.errors import UserError

_STORE_SECONDS = 5.0


def join_world(timeout_minutes: float = 30.0) -> None:
    """Initialises torch.distributed from torchrun's environment: NCCL for GPU tensors, gloo for CPU tensors.

    Raises UserError if the process was not started by torchrun, or has no GPU of its own where others have.
    """
    if "RANK" not in os.environ:
        raise UserError("this command runs under torchrun: torchrun --nproc-per-node N launch/train.py RECIPE")
    timeout = datetime.timedelta(minutes=timeout_minutes)
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=timeout, **_store_of_this_attempt())
        return
    local_rank, devices = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local_rank >= devices:
        raise UserError(f"local rank {local_rank} has no GPU: this node has {devices}; lower --nproc-per-node")
    torch.cuda.set_device(local_rank)
    # With its device named, NCCL connects at once: a first transfer between two ranks then needs no others.
    device = torch.device("cuda", local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device, **_store_of_this_attempt())


def _store_of_this_attempt() -> dict[str, Any]:
    """Where ranks that torchrun has started again find each other: its store still has the addresses of the dead.

    On several nodes the agents do not agree on the number of the attempt (github.com/pytorch/pytorch/issues/135712);
    there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each attempt a store of its own, as launch/slurm/node.sh does.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if attempt == "0" or not one_node or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    shared = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"attempt-{attempt}", shared)
    return {"store": store, "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}


def first_to_say(text: str) -> bool:
    """Whether no other process of the run has asked this about ``text``: one speaks where all ranks fail alike.

    It asks the store that torchrun keeps beside its ranks, so no rank waits for another and the world need not be
    joined. Where there is no such store, every process is taken for the first.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()
    try:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=datetime.timedelta(seconds=_STORE_SECONDS),
            wait_for_workers=False,
        )
        said = store.add(f"said/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{digest}", 1)
    except (KeyError, RuntimeError):
        return True
    return bool(said == 1)


def leave_world() -> None:
    """Ends torch.distributed for this process, unless that has been done; call it when every rank is done."""
    if dist.is_initialized():
        dist.destroy_process_group()
