"""Outputs of a model: of a language head logprobs and entropy, of a scalar head values or scores.

Each is called at the end of a micro-batch on the last pipeline stage, with the decoder's output and the head, and gives
tensors of the m positions that this rank reads (``MicroBatch.outputs``); ``joined`` makes them those of all n, which
context-parallel ranks read together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from rlhf_megatron.data.packing import MicroBatch
from rlhf_megatron.kernels.linear_logprob import linear_logprobs
from rlhf_megatron.models.gradient_sums import gradient_sum

# (each tensor [n] of the output, fields [n]) -> (loss, summed over tokens or rows that carry their global weight;
# metrics as (sum, count) pairs). A policy's objective gets (logprobs, entropy, fields), a critic's (values, fields).
Objective = Callable[..., tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]]


@dataclasses.dataclass(frozen=True)
class TokenOutputs:
    """Per-token results for a rank's share of a batch, on the CPU; 0 on tokens that were not sampled."""

    logprobs: Tensor  # [T] float32
    entropy: Tensor  # [T] float32


class Output(Protocol):
    """A way to read a model's output."""

    @property
    def count(self) -> int:
        """The number of tensors that it gives."""

    @property
    def per_row(self) -> bool:
        """True if it is read at the last token of each row instead of at each sampled token."""

    def __call__(self, hidden: Tensor, head: Any, weight: Tensor | None, micro: MicroBatch) -> tuple[Tensor, ...]:
        """Map the decoder's output [t, 1, hidden] -> tensors [m] float32, differentiable, equal on all tensor ranks.

        ``head`` is ``GPTModel.output_layer``, ``weight`` the embedding where it is tied to that, else None.
        """


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Logprob and entropy of every sampled token, without logits of the others.

    Those are all there at a time only where they take no more than ``kept_bytes`` and a backward pass will follow.
    A model's own factor of its logits is one of ``temperature`` here; ``soft_cap``: see ``Scales``.
    """

    tensor_group: dist.ProcessGroup
    vocabulary: int
    temperature: float
    kept_bytes: int = 0
    soft_cap: float | None = None
    count = 2
    per_row = False

    def __call__(self, hidden: Tensor, head: Any, weight: Tensor | None, micro: MicroBatch) -> tuple[Tensor, ...]:
        """See Output: (logprobs [m], entropy [m])."""
        # Each rank has the gradient that comes through its own part of the vocabulary; both ways add them up.
        if head.sequence_parallel:
            whole = gather_from_sequence_parallel_region(hidden, group=self.tensor_group)
            read = whole[:, 0].index_select(0, micro.outputs)
        else:
            read = hidden[:, 0].index_select(0, micro.outputs)
            read = copy_to_tensor_model_parallel_region(read, group=self.tensor_group)
        columns = head.weight if weight is None else weight
        return linear_logprobs(
            read,
            columns,
            micro.targets,
            self.tensor_group,
            self.vocabulary,
            self.temperature,
            kept_bytes=self.kept_bytes,
            soft_cap=self.soft_cap,
            weight_sum=gradient_sum(columns),
        )


@dataclasses.dataclass(frozen=True)
class Scalars:
    """The number that a scalar head gives: per token the value, per row the score."""

    per_row: bool
    count = 1

    def __call__(self, hidden: Tensor, head: Any, weight: Tensor | None, micro: MicroBatch) -> tuple[Tensor, ...]:
        """See Output: (the m that are read,)."""
        values, _ = head(hidden)
        return (values[:, 0, 0].index_select(0, micro.outputs),)


VALUES, SCORES = Scalars(per_row=False), Scalars(per_row=True)


def joined(parts: tuple[Tensor, ...], micro: MicroBatch, context_group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Return tensors [m] of what this rank reads -> tensors [n] of what its context-parallel group reads, on all its
    ranks.

    An objective wants whole rows. All ranks of the group then compute the same loss, so each lets the gradient of its
    own m alone pass; gradients of parameters are summed over the group, as over data-parallel ranks.
    """
    if context_group.size() == 1:
        return parts
    whole: Tensor = _Joined.apply(torch.stack(parts), micro.kept, len(micro.batch_indices), context_group)  # type: ignore[no-untyped-call]
    return whole.unbind()


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, kept: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(kept)
        whole = parts.new_zeros(len(parts), count)
        whole[:, kept] = parts
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (kept,) = ctx.saved_tensors
        return gradient[:, kept], None, None, None
