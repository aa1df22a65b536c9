"""Memory that leaves the device between phases and comes back into the same storages: every view of it stays valid.

Only addresses may change. Megatron's own offloading (param_and_grad_buffer.py, optimizer.py) is not used: it moves no
parameters that have no buffer, as frozen models have none, and breaks the views that a float32 optimizer has of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.recipe.roles import OffloadSection


class RoleMemory:
    """What of a role's memory is to leave the device, by kind: parameters, gradients, the optimizer's."""

    def __init__(self, section: OffloadSection, chunks: Sequence[Any], optimizer: Any) -> None:
        """``chunks`` are the modules, or Megatron's DistributedDataParallel where there is an ``optimizer``."""
        self._chunks, self._optimizer = chunks, optimizer
        asked = section.model_dump()
        self._kinds = {kind: _Offloaded(keeps=kind != "gradients") for kind in asked if asked[kind]}

    def leave(self) -> None:
        """Frees the device of all that is to leave. Gradients are lost: not between the backward pass and the step."""
        for kind, memory in self._kinds.items():
            memory.leave(self._tensors(kind), besides=self._tensors("parameters") if kind == "optimizer" else [])
        if self._kinds and torch.cuda.is_available():
            torch.cuda.empty_cache()  # vLLM's memory is not of torch's cache

    def come_back(self, *kinds: str) -> None:
        """Brings back what has left of these kinds; by default of all."""
        for kind, memory in self._kinds.items():
            if kind in kinds or not kinds:
                memory.come_back()

    def _tensors(self, kind: str) -> list[Tensor]:
        """The tensors of one kind of memory. Some of the optimizer's are views of float32 parameters."""
        if kind == "parameters":
            return [parameter.data for chunk in self._chunks for parameter in chunk.parameters()]
        if self._optimizer is None:
            return []
        if kind == "gradients":
            buffers = [each for chunk in self._chunks for each in (*chunk.buffers, *chunk.expert_parallel_buffers)]
            return [buffer.grad_data for buffer in buffers]
        inner = [each.optimizer for each in getattr(self._optimizer, "chained_optimizers", [self._optimizer])]
        masters = [main for each in inner for group in each.param_groups for main in group["params"]]
        states = [value for each in inner for of_one in each.state.values() for value in of_one.values()]
        devices = {main.device for main in masters}  # torch's step counters are on the CPU
        return [*masters, *(value for value in states if isinstance(value, Tensor) and value.device in devices)]


class _Offloaded:
    """One kind of memory, on the device or away from it."""

    def __init__(self, keeps: bool) -> None:
        """``keeps``: the contents are copied to the host and back; otherwise they come back as zeros."""
        self._keeps = keeps
        self._away: list[tuple[torch.UntypedStorage, int]] = []
        self._host: list[Tensor] = []  # pinned where there is a GPU, and used again

    def leave(self, tensors: Iterable[Tensor], besides: Iterable[Tensor] = ()) -> None:
        """Frees the storages of ``tensors``, except those that ``besides`` share; nothing if they are away already."""
        if self._away:
            return
        others = {tensor.untyped_storage()._cdata for tensor in besides}
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        self._away = [(storage, storage.nbytes()) for key, storage in storages.items() if key not in others]
        if self._keeps:
            for (storage, _), host in zip(self._away, self._buffers(), strict=True):
                host.copy_(_bytes(storage), non_blocking=True)
            _synchronize()
        for storage, _ in self._away:
            storage.resize_(0)

    def come_back(self) -> None:
        """Makes the storages as they were; nothing if they are here."""
        for index, (storage, size) in enumerate(self._away):
            storage.resize_(size)
            if self._keeps:
                _bytes(storage).copy_(self._host[index], non_blocking=True)
            else:
                _bytes(storage).zero_()
        if self._away:
            _synchronize()
        self._away = []

    def _buffers(self) -> list[Tensor]:
        """A host buffer for each storage that leaves."""
        if [len(buffer) for buffer in self._host] != [size for _, size in self._away]:
            pinned = torch.cuda.is_available()
            self._host = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _, size in self._away]
        return self._host


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
