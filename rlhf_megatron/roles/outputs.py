"""What is read of a model's output: of a language head logprobs and entropy, of a scalar head values or scores.

Each is called with the output of a micro-batch, on the last pipeline stage, and gives tensors of the n places that the
micro-batch reads (``MicroBatch.outputs``).
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.data.packing import MicroBatch
from rlhf_megatron.kernels.vocab_parallel_logprob import vocab_parallel_logprobs


class Output(Protocol):
    """A way to read a model's output."""

    @property
    def count(self) -> int:
        """How many tensors it gives."""

    @property
    def per_row(self) -> bool:
        """Whether it is read at the last token of each row instead of at each sampled token."""

    def __call__(self, output: Tensor, micro: MicroBatch) -> tuple[Tensor, ...]:
        """The model's output [1, t, ...] -> tensors [n] float32, differentiable, equal on all tensor-parallel ranks."""


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Logprob and entropy of every sampled token, from logits cut over the vocabulary."""

    tensor_group: dist.ProcessGroup
    vocabulary: int
    temperature: float
    count = 2
    per_row = False

    def __call__(self, output: Tensor, micro: MicroBatch) -> tuple[Tensor, ...]:
        """Logits [1, t, vocabulary / tensor] -> (logprobs [n], entropy [n])."""
        logits = output[0].index_select(0, micro.outputs)
        return vocab_parallel_logprobs(logits, micro.targets, self.tensor_group, self.vocabulary, self.temperature)


@dataclasses.dataclass(frozen=True)
class Scalars:
    """The number that a scalar head gives: per token the value, per row the score."""

    per_row: bool
    count = 1

    def __call__(self, output: Tensor, micro: MicroBatch) -> tuple[Tensor, ...]:
        """Values [1, t, 1] -> (the n that are read,)."""
        return (output[0, :, 0].index_select(0, micro.outputs),)


VALUES, SCORES = Scalars(per_row=False), Scalars(per_row=True)
