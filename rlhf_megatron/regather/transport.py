"""Transports of bytes between ranks. One small interface; ``execute`` decides what is in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor


class Pending(Protocol):
    """A transfer that is under way."""

    def wait(self) -> object:
        """Return when it has arrived; on a GPU, makes the current stream wait instead."""
        ...


class Transport(Protocol):
    """Mover of flat buffers to and from peers."""

    def start(self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]]) -> list[Pending]:
        """Begin to send ``sends[rank]`` to each rank and to fill ``receives[rank]`` from each.

        Two ranks name as many buffers of the same sizes in the same order. They are left alone until what is returned
        has been waited for. Raises RuntimeError where a peer is gone.
        """
        ...


class PointToPoint:
    """torch.distributed's batched isend and irecv: NCCL over NVLink or RDMA on GPUs, gloo on CPUs."""

    def start(self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]]) -> list[Pending]:
        """See Transport. Operations are posted by rank, receives first, so that pairs match up on both ends."""
        operations = [dist.P2POp(dist.irecv, each, rank) for rank in sorted(receives) for each in receives[rank]]
        operations += [dist.P2POp(dist.isend, each, rank) for rank in sorted(sends) for each in sends[rank]]
        return list(dist.batch_isend_irecv(operations)) if operations else []
