"""Results of micro-batches, which the last pipeline stage has, summed and the same on every rank of a role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.data.packing import MicroBatch
from rlhf_megatron.roles.outputs import Objective

# Of each micro-batch: positions [n] in the batch, and the outputs [count, n] there.
CollectedOutputs = list[tuple[Tensor, Tensor]]


class StepLoss:
    """An objective over the micro-batches of a step: their losses, and the metrics and outputs that are kept.

    Attributes:
        metrics: (sum, count) of each metric as a tensor [2], over the micro-batches so far.
        outputs: of these, if they are kept.
    """

    def __init__(self, objective: Objective, keeps_outputs: bool) -> None:
        self._objective, self._keeps_outputs = objective, keeps_outputs
        self.metrics: dict[str, Tensor] = {}
        self.outputs: CollectedOutputs = []

    def __call__(self, outputs: tuple[Tensor, ...], micro: MicroBatch) -> Tensor:
        """Return the loss of one micro-batch."""
        if self._keeps_outputs:  # of this rank's tokens: a large cluster's would take the activations' memory
            self.outputs.append((micro.batch_indices, torch.stack(outputs).detach()))
        loss, metrics = self._objective(*outputs, micro.fields)
        for name, pair in (metrics | {"loss": (loss.detach(), torch.zeros_like(loss))}).items():
            value = torch.stack([part.detach().double() for part in pair])
            self.metrics[name] = self.metrics[name] + value if name in self.metrics else value
        return loss

    def clear(self) -> None:
        """Forget the micro-batches so far."""
        self.metrics.clear()
        self.outputs.clear()


class RoleReduction:
    """Sums over the ranks of a role, of which each data-parallel rank has a share of a batch (see ``Totals``).

    Every call is collective over them.
    """

    def __init__(self, groups: Any, ranks: Sequence[int], device: torch.device | str) -> None:
        """Set up; ``groups`` are Megatron's, ``ranks`` the role's in the order of its layout."""
        self._group, self._last_rank, self._device = groups.intra_dist_opt, ranks[-1], device
        self._model, self._data = groups.model, groups.dp
        last_stage = groups.pp.rank() == groups.pp.size() - 1
        # Other ranks of its model have the same results, or none: each token counts once.
        self._counts = last_stage and groups.tp.rank() == groups.cp.rank() == 0

    @property
    def shares(self) -> int:
        """See Totals."""
        return int(self._data.size())

    @property
    def share(self) -> int:
        """See Totals."""
        return int(self._data.rank())

    def sum(self, values: Tensor) -> Tensor:
        """See Totals."""
        return self._over_shares(values, dist.ReduceOp.SUM)

    def largest(self, values: Tensor) -> Tensor:
        """See Totals."""
        return self._over_shares(values, dist.ReduceOp.MAX)

    def _over_shares(self, values: Tensor, operation: Any) -> Tensor:
        if self._data.size() == 1:
            return values
        reduced = values.to(self._device, copy=True)
        dist.all_reduce(reduced, operation, self._data)
        return reduced.to(values.device)

    def gather_outputs(self, collected: CollectedOutputs, count: int, size: int) -> Tensor:
        """Return [count, size] on the CPU: what the last stage has collected in its positions, 0 where there is
        nothing; on every rank of the data-parallel rank."""
        whole = torch.zeros(count, size, device=self._device)
        if self._counts:
            for positions, outputs in collected:
                whole[:, positions] = outputs
        if self._model.size() > 1:
            dist.all_reduce(whole, group=self._model)
        return whole.cpu()

    def mean_metrics(self, metrics: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the mean, sum / count, of each metric over the role's ranks; the sum where the count is 0.

        Only the last stage's ranks have ``metrics``, tensors [2]; the role's last rank has all names.
        """
        names: list[Any] = [sorted(metrics)]
        dist.broadcast_object_list(names, src=self._last_rank, group=self._group)
        sums = torch.zeros(len(names[0]), 2, dtype=torch.float64, device=self._device)
        if self._counts:
            for index, name in enumerate(names[0]):
                sums[index] = metrics[name]
        dist.all_reduce(sums, group=self._group)
        return {
            name: float(total / count) if count else float(total)
            for name, (total, count) in zip(names[0], sums.tolist(), strict=True)
        }
