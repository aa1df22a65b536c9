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


def plan_micro_batches(
    lengths: Sequence[int], tokens_per_gpu: int, data: int, rows_together: int = 1
) -> list[list[list[int]]]:
    """``plan[d][m]``: the rows of micro-batch m on data-parallel rank d; all ranks have the same number of them.

    Each ``rows_together`` rows that follow each other stay in one micro-batch, in their order.

    Rows are dealt longest first to the emptiest micro-batch (the greedy rule of multiprocessor scheduling), with the
    fewest micro-batches that keep each within ``tokens_per_gpu``; a row longer than that goes alone. Every row appears
    exactly once; a micro-batch may be empty where there are fewer rows than places.
    """
    if rows_together > 1:
        units = [sum(lengths[first : first + rows_together]) for first in range(0, len(lengths), rows_together)]
        return [
            [[unit * rows_together + k for unit in micro for k in range(rows_together)] for micro in of_rank]
            for of_rank in plan_micro_batches(units, tokens_per_gpu, data)
        ]
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
    """What one forward pass takes: packed rows on the device, and which n of its outputs are read.

    Per token, these are the outputs that predict the sampled tokens; per row, the one at each row's last token.
    """

    tokens: Tensor  # [t] int64, padded at the end to the alignment by a row of its own
    positions: Tensor  # [t] int64: place within the row
    cu_seqlens: Tensor  # [rows + 1] int32
    longest: int
    outputs: Tensor  # [n] int64: index of the token before each sampled token, or of each row's last token
    targets: Tensor  # [n] int64: the sampled tokens, or the last ones
    fields: dict[str, Tensor]  # [n] each: advantages, weights and so on
    places: Tensor  # [n] int64: where each sampled token stands in the whole batch, or which row it is there


def make_micro_batch(
    batch: RolloutBatch,
    rows: Sequence[int],
    fields: dict[str, Tensor],
    *,
    per_row: bool = False,
    pad_token_id: int | None = None,
    alignment: int = 1,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Packs ``rows`` of ``batch``, to be read at the sampled tokens, or ``per_row`` at the last that is no padding.

    ``fields`` are values of the whole batch, per token [T] or ``per_row`` [R], taken where the outputs are read.
    The number of tokens is rounded up to ``alignment`` (sequence parallelism splits it evenly) and is at least that, so
    that an empty micro-batch still has a shape to send through the pipeline.
    """
    spans = [(int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1])) for row in rows]
    where = torch.cat([torch.arange(start, stop) for start, stop in spans] or [torch.zeros(0, dtype=torch.int64)])
    lengths = [stop - start for start, stop in spans]
    padding = -len(where) % alignment if len(where) else alignment
    if padding:
        lengths.append(padding)
    tokens = torch.cat([batch.tokens[where], torch.zeros(padding, dtype=torch.int64)])
    positions = torch.cat([torch.arange(length) for length in lengths])
    boundaries = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    if per_row:
        last = [_last_token(batch.tokens[start:stop], pad_token_id) for start, stop in spans]
        read = torch.tensor(last, dtype=torch.int64) + boundaries[: len(rows)]
        outputs, places = read, torch.as_tensor(list(rows), dtype=torch.int64)
    else:
        read = batch.response_mask[where].nonzero().squeeze(1)
        outputs, places = read - 1, where[read]
    return MicroBatch(
        tokens=tokens.to(device),
        positions=positions.to(device),
        cu_seqlens=boundaries.to(device),
        longest=max(lengths),
        outputs=outputs.to(device),
        targets=tokens[read].to(device),
        fields={name: values[places].to(device) for name, values in fields.items()},
        places=places,
    )


def _last_token(row: Tensor, pad_token_id: int | None) -> int:
    """Index of a row's last token, or of the last before closing ones that are the padding token, as some ends are."""
    kept = (row != pad_token_id).nonzero() if pad_token_id is not None else row.new_zeros(0)
    return int(kept[-1]) if len(kept) else len(row) - 1
