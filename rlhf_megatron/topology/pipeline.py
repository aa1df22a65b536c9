"""Point-to-point communication of pipeline stages, where Megatron's own does not serve."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor


class PipelineLinks(P2PCommunicator):
    """Megatron's point-to-point communication, also for virtual stages on two ranks.

    With virtual stages the pipeline is a ring. In a ring of two, activations and gradients go to the same neighbour,
    and the ranks post them in different orders; Megatron asks for three ranks then (or mixes in the world's group).
    Here gradients have a process group of their own in that case.
    """

    def __init__(self, groups: Any, config: ModelParallelConfig) -> None:
        """Set up; ``groups`` are those of ``make_groups``."""
        super().__init__(groups.pp, config)
        self._gradient_group: dist.ProcessGroup = groups.pp_gradients

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> Any:
        """Return (from the stage before, from the stage after, requests to wait for); everything has
        ``tensor_shape``."""
        if self._gradient_group is self.pp_group:
            return super()._communicate(
                tensor_send_next=tensor_send_next,
                tensor_send_prev=tensor_send_prev,
                recv_prev=recv_prev,
                recv_next=recv_next,
                tensor_shape=tensor_shape,
                wait_on_reqs=wait_on_reqs,
            )
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        activations, gradients = (
            torch.empty(tensor_shape, requires_grad=True, device=device, dtype=self.config.pipeline_dtype)
            if asked
            else None
            for asked in (recv_prev, recv_next)
        )
        requests = [
            *self._post(tensor_send_next, activations, self.pp_group),
            *self._post(tensor_send_prev, gradients, self._gradient_group),
        ]
        for request in requests:
            request.wait()
        return activations, gradients, None

    def _post(self, sent: Tensor | None, received: Tensor | None, group: dist.ProcessGroup) -> list[Any]:
        """Start to send to the only neighbour and to receive from it; return the requests."""
        moves = [(move, tensor) for move, tensor in ((dist.isend, sent), (dist.irecv, received)) if tensor is not None]
        operations = [dist.P2POp(move, tensor, self.next_rank, group) for move, tensor in moves]
        return list(dist.batch_isend_irecv(operations)) if operations else []
