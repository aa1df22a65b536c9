"""How bytes cross between ranks. One small interface; ``execute`` decides what is in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch.distributed as dist
from torch import Tensor


class Pending(Protocol):
    """A transfer that is under way."""

    def wait(self) -> object:
        """Returns when it has arrived; on a GPU, makes the current stream wait instead."""
        ...


class Transport(Protocol):
    """Moves one flat buffer per peer in each direction."""

    def start(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> list[Pending]:
        """Begins to send ``sends[rank]`` to each rank and to fill ``receives[rank]`` from each.

        Buffers are left alone until what is returned has been waited for. Raises RuntimeError where a peer is gone.
        """
        ...


class PointToPoint:
    """torch.distributed's batched isend and irecv: NCCL over NVLink or RDMA on GPUs, gloo on CPUs."""

    def start(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> list[Pending]:
        """See Transport. Operations are posted by rank, receives first, so that pairs match up on both ends."""
        operations = [dist.P2POp(dist.irecv, receives[rank], rank) for rank in sorted(receives)]
        operations += [dist.P2POp(dist.isend, sends[rank], rank) for rank in sorted(sends)]
        return list(dist.batch_isend_irecv(operations)) if operations else []
