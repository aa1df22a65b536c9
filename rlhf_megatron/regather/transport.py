"""How bytes cross between ranks. One small interface; ``execute`` decides what is in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch.distributed as dist
from torch import Tensor


class Transport(Protocol):
    """Moves one flat buffer per peer in each direction."""

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Sends ``sends[rank]`` to each rank and fills ``receives[rank]`` from each; returns when all have arrived."""
        ...


class PointToPoint:
    """torch.distributed's batched isend and irecv: NCCL over NVLink or RDMA on GPUs, gloo on CPUs."""

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """See Transport. Operations are posted by rank, receives first, so that pairs match up on both ends."""
        operations = [dist.P2POp(dist.irecv, receives[rank], rank) for rank in sorted(receives)]
        operations += [dist.P2POp(dist.isend, sends[rank], rank) for rank in sorted(sends)]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
