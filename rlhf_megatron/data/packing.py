"""Micro-batches: which rows of a batch go to which data-parallel rank, and together through the model.

Pure functions of the rows' lengths: every rank computes the whole plan and takes its part.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_megatron.data.batch import RolloutBatch


def plan_micro_batches(lengths: Sequence[int], tokens_per_gpu: int, data: int) -> list[list[list[int]]]:
    """``plan[d][m]``: the rows of micro-batch m on data-parallel rank d; all ranks have the same number of them.

    Rows are dealt longest first to the emptiest micro-batch (the greedy rule of multiprocessor scheduling), with the
    fewest micro-batches that keep each within ``tokens_per_gpu``; a row longer than that goes alone. Every row appears
    exactly once; a micro-batch may be empty where there are fewer rows than places.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    count = max(1, -(-sum(lengths) // (tokens_per_gpu * data)))
    while True:
        places = count * data
        heap = [(0, place) for place in range(places)]
        bins: list[list[int]] = [[] for _ in range(places)]
        fits = True
        for row in order:
            load, place = heapq.heappop(heap)
            if bins[place] and load + lengths[row] > tokens_per_gpu:
                fits = False
                break
            bins[place].append(row)
            heapq.heappush(heap, (load + lengths[row], place))
        if fits:
            return [[sorted(bins[m * data + d]) for m in range(count)] for d in range(data)]
        count += 1


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """What one forward pass takes: packed rows on the device, and where their sampled tokens are."""

    tokens: Tensor  # [t] int64, padded at the end to the alignment by a row of its own
    positions: Tensor  # [t] int64: place within the row
    cu_seqlens: Tensor  # [rows + 1] int32
    longest: int
    predicting: Tensor  # [n] int64: index of the token before each sampled token
    targets: Tensor  # [n] int64: the sampled tokens
    fields: dict[str, Tensor]  # per sampled token [n]: advantages, weights and so on
    batch_positions: Tensor  # [n] int64: where each sampled token stands in the whole batch


def make_micro_batch(
    batch: RolloutBatch,
    rows: Sequence[int],
    fields: dict[str, Tensor],
    *,
    alignment: int = 1,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Packs ``rows`` of ``batch``; ``fields`` are per-token values [T] of the whole batch, taken at the sampled tokens.

    The number of tokens is rounded up to ``alignment`` (sequence parallelism splits it evenly) and is at least that, so
    that an empty micro-batch still has a shape to send through the pipeline.
    """
    spans = [(int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1])) for row in rows]
    where = torch.cat([torch.arange(start, stop) for start, stop in spans] or [torch.zeros(0, dtype=torch.int64)])
    lengths = [stop - start for start, stop in spans]
    padding = -len(where) % alignment if len(where) else alignment
    if padding:
        lengths.append(padding)
    mask = batch.response_mask[where]
    tokens = torch.cat([batch.tokens[where], torch.zeros(padding, dtype=torch.int64)])
    sampled = mask.nonzero().squeeze(1)
    positions = torch.cat([torch.arange(length) for length in lengths])
    boundaries = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return MicroBatch(
        tokens=tokens.to(device),
        positions=positions.to(device),
        cu_seqlens=boundaries.to(device),
        longest=max(lengths),
        predicting=(sampled - 1).to(device),
        targets=tokens[sampled].to(device),
        fields={name: values[where[sampled]].to(device) for name, values in fields.items()},
        batch_positions=where[sampled],
    )
