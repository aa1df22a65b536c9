"""Updated weights on their way between data-parallel ranks, while passes compute with those that are here already.

After an optimizer step each rank has its range of every bucket of weights. Gathers of all buckets then start in the
order in which a pass needs them, and each part of a model waits for its own. Megatron's own hooks wait for what a
module itself has and start one bucket at a time; heads and delta nets read weights of modules that are never called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch


class ParameterGather:
    """The gathers of one role's chunks, Megatron's DistributedDataParallel around each."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        """Have passes through ``chunks`` wait for the weights that they are about to read."""
        in_order: dict[Any, None] = {}
        for chunk in chunks:
            chunk.disable_forward_pre_hook(param_sync=False)
            for part in _called_parts(chunk.module):
                own = _buckets(chunk, part)
                part.register_forward_pre_hook(_waits_for(own))
                in_order |= dict.fromkeys(own)
            rest = _buckets(chunk, chunk.module)
            chunk.module.decoder.register_forward_hook(_waits_for(rest))  # the head's, which follows
            in_order |= dict.fromkeys(rest)
        self._buckets = list(in_order)

    def start(self) -> None:
        """Start to gather what an optimizer step has written; collective over the data-parallel ranks."""
        for bucket in self._buckets:
            bucket.start_param_sync()

    def finish(self) -> None:
        """Wait for all, before anything but a pass reads or writes weights."""
        _finish(self._buckets)


def _called_parts(model: Any) -> Iterator[torch.nn.Module]:
    """Yield the modules that a pass calls before the head, in order; none reads weights of another."""
    if hasattr(model, "embedding"):
        yield model.embedding
    yield from model.decoder.layers
    if model.decoder.final_layernorm is not None:
        yield model.decoder.final_layernorm


def _buckets(chunk: Any, part: torch.nn.Module) -> list[Any]:
    """Return Megatron's groups of buckets that hold the weights of ``part``; those that are frozen are in none."""
    known = chunk.param_to_bucket_group
    return list(dict.fromkeys(known[each] for each in part.parameters() if each in known))


def _waits_for(buckets: Sequence[Any]) -> Any:
    def hook(*_: Any) -> None:
        _finish(buckets)

    return hook


def _finish(buckets: Sequence[Any]) -> None:
    for bucket in buckets:
        if bucket.param_gather_handle is not None:
            bucket.finish_param_sync(skip_next_bucket_dispatch=True)
