"""Memory that leaves the device between phases and comes back into the same storages: every view of it stays valid.

Only addresses may change. Megatron's own offloading (param_and_grad_buffer.py, optimizer.py) is not used: it moves no
parameters that have no buffer, as frozen models have none, and breaks the views that a float32 optimizer has of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.compat.torch import take_memory_by_pages
from rlhf_megatron.recipe.memory_savings import OffloadSection
from rlhf_megatron.roles.host_memory import pinned_buffers
from rlhf_megatron.roles.streaming import StreamedState, streamed_states
from rlhf_megatron.roles.trainer import Trainer


class RoleMemory:
    """The part of a role's memory that is to leave the device, by kind: parameters, gradients, the optimizer's."""

    def __init__(self, section: OffloadSection, chunks: Sequence[Any], trainer: Trainer | None) -> None:
        """Set up; ``chunks`` are those of the model; the ``trainer``'s are the same ones, or those of adapters."""
        self._chunks = chunks
        self._trainer = trainer
        self._learning: Sequence[Any] = trainer.chunks if trainer else ()
        self._optimizer: Any = trainer.optimizer if trainer else None
        share = section.streamed_optimizer if trainer else 0.0
        # Moments of one type between steps; what is streamed moves by itself, in and after each step.
        self.moments_dtype: torch.dtype = trainer.moments_dtype if trainer else torch.float32
        remainders = trainer is not None and trainer.keeps_remainders
        self._streamed = streamed_states(
            self._optimizer, share, self.moments_dtype, remainders, lambda: trainer.steps_taken if trainer else 0
        )
        asked = [kind for kind in ("parameters", "gradients", "optimizer") if getattr(section, kind)]
        self._kinds = {kind: _Offloaded(keeps=kind != "gradients") for kind in asked}

    def leave(self) -> None:
        """Free the device of all that is to leave. Gradients are lost: not between the backward pass and the step."""
        self.settle()
        self.park()
        for kind, memory in self._kinds.items():
            besides = [*self._chunks, *self._learning] if kind == "optimizer" else []
            memory.leave(self._tensors(kind), [each.data for chunk in besides for each in chunk.parameters()])
        if self._kinds and torch.cuda.is_available():
            take_memory_by_pages(False)
            torch.cuda.empty_cache()  # vLLM's memory is not of torch's cache

    def expect_passes(self) -> None:
        """Have what passes need fit together, where all of it is given back when the memory leaves."""
        if self._kinds:
            take_memory_by_pages(True)

    def come_back(self, *kinds: str) -> None:
        """Bring back what has left of these kinds, for a pass or a step; by default all, to read and to write."""
        if not kinds:
            self.settle()
        for kind, memory in self._kinds.items():
            if kind in kinds or not kinds:
                memory.come_back()

    def settle(self) -> None:
        """Wait for weights that are on their way from other ranks."""
        if self._trainer:
            self._trainer.settle()

    def fetch(self, kind: str) -> None:
        """Start to bring a kind back while the GPU computes; it is not to be read before ``come_back``."""
        if kind == "optimizer":
            self.park()
        if kind in self._kinds:
            self._kinds[kind].fetch()

    def come_to_rest(self) -> None:
        """Bring back all but streamed master weights, which are on the host between steps."""
        self.come_back()
        self.park()

    def park(self) -> None:
        """Have streamed master weights on the host, where they are between steps."""
        for streamed in self._streamed:
            streamed.park()

    def unpark(self) -> None:
        """Bring streamed master weights to the device, for Megatron to write them; the next step parks them."""
        for streamed in self._streamed:
            streamed.unpark()

    def master_weights(self, main: Tensor) -> Tensor:
        """Return the content of one of the optimizer's parameters between steps: itself, a tensor of the host, or a
        copy."""
        streamed = self._replacing(main)
        return streamed.at_rest(main) if streamed else main

    def set_master_weights(self, main: Tensor, values: Tensor) -> None:
        """Set the content of one of the optimizer's parameters between steps; the model has it already, rounded."""
        streamed = self._replacing(main)
        if streamed:
            streamed.write(main, values)
        else:
            main.copy_(values)

    def _replacing(self, main: Tensor) -> StreamedState | None:
        """Return what has another tensor for these master weights between steps, if anything has."""
        return next((streamed for streamed in self._streamed if streamed.replaces(main)), None)

    def device_of(self, main: Tensor) -> torch.device:
        """Return where the state of one of the optimizer's parameters is between steps."""
        return torch.device("cpu") if any(each.streams(main) for each in self._streamed) else main.device

    def _tensors(self, kind: str) -> list[Tensor]:
        """Return the tensors of one kind of memory. Some of the optimizer's are views of float32 parameters."""
        if kind == "parameters":
            return [parameter.data for chunk in self._chunks for parameter in chunk.parameters()]
        if self._optimizer is None:
            return []
        if kind == "gradients":
            buffers = [each for chunk in self._learning for each in (*chunk.buffers, *chunk.expert_parallel_buffers)]
            return [buffer.grad_data for buffer in buffers]
        inner = [each.optimizer for each in getattr(self._optimizer, "chained_optimizers", [self._optimizer])]
        masters = [
            main
            for each in inner
            for group in each.param_groups
            for main in group["params"]
            if not any(streamed.streams(main) for streamed in self._streamed)
        ]
        states = [value for each in inner for main in masters for value in each.state.get(main, {}).values()]
        devices = {main.device for main in masters}  # torch's step counters are on the CPU
        remainders = [tensor for streamed in self._streamed for tensor in streamed.on_device]
        moments = (value for value in states if isinstance(value, Tensor) and value.device in devices)
        return [*masters, *remainders, *moments]


class _Offloaded:
    """One kind of memory, on the device or away from it."""

    def __init__(self, keeps: bool) -> None:
        """Set up; ``keeps``: the contents are copied to the host and back; otherwise they come back as zeros."""
        self._keeps = keeps
        self._away: list[tuple[torch.UntypedStorage, int]] = []
        self._host: list[Tensor] = []  # used again
        self._stream: torch.cuda.Stream | None = None
        self._coming: torch.cuda.Event | None = None

    def leave(self, tensors: Iterable[Tensor], besides: Iterable[Tensor] = ()) -> None:
        """Free the storages of ``tensors``, except those that ``besides`` share; nothing if they are away already."""
        if self._away:
            return
        self.come_back()  # what is only on its way
        others = {tensor.untyped_storage()._cdata for tensor in besides}
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        self._away = [(storage, storage.nbytes()) for key, storage in storages.items() if key not in others]
        if self._keeps:
            for (storage, _), host in zip(self._away, self._buffers(), strict=True):
                host.copy_(_bytes(storage), non_blocking=True)
            _synchronize()
        for storage, _ in self._away:
            storage.resize_(0)

    def fetch(self) -> None:
        """Start to make the storages as they were, on a GPU beside what it computes; nothing if they have not left."""
        if not self._away:
            return
        away, self._away = self._away, []
        for storage, size in away:
            storage.resize_(size)
        if not torch.cuda.is_available():
            self._fill(away)
            return
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())  # which may still use what the memory held before
        with torch.cuda.stream(self._stream):
            self._fill(away)
        self._coming = self._stream.record_event()

    def come_back(self) -> None:
        """Have the storages as they were, for all that is asked of the GPU from now on."""
        self.fetch()
        if self._coming is not None:
            torch.cuda.current_stream().wait_event(self._coming)
            self._coming = None

    def _fill(self, storages: Sequence[tuple[torch.UntypedStorage, int]]) -> None:
        for index, (storage, _) in enumerate(storages):
            if self._keeps:
                _bytes(storage).copy_(self._host[index], non_blocking=True)
            else:
                _bytes(storage).zero_()

    def _buffers(self) -> list[Tensor]:
        """Return a host buffer for each storage that leaves."""
        if [len(buffer) for buffer in self._host] != [size for _, size in self._away]:
            self._host = pinned_buffers([size for _, size in self._away])
        return self._host


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
