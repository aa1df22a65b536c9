"""Micro-batches: which rows of a batch go to which data-parallel rank, and together through the model.

Pure functions of the rows' lengths: every rank computes the whole plan and takes its part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor

from rlhf_megatron.data.balance import deal
from rlhf_megatron.data.expert_choices import unknown
from rlhf_megatron.data.rollout_batch import RolloutBatch


def plan_micro_batches(
    lengths: Sequence[int],
    tokens_per_gpu: int,
    data: int,
    rows_together: int = 1,
    multiple: int = 1,
    attention: float = 0.0,
) -> list[list[list[int]]]:
    """``plan[d][m]``: the rows of micro-batch m on data-parallel rank d; all ranks have the same number of them.

    Each ``rows_together`` rows that follow each other stay in one micro-batch, in their order. A rank has the fewest
    micro-batches, a ``multiple``, that keep each within ``tokens_per_gpu``; a row longer than that goes alone. Ranks
    have about the same to do, and so have the micro-batches of one, where n tokens of a row cost n + ``attention`` n^2.
    Every row appears exactly once; a micro-batch may be empty where there are few rows.
    """
    units = [lengths[first : first + rows_together] for first in range(0, len(lengths), rows_together)]
    sizes = [min(sum(unit), tokens_per_gpu) for unit in units]  # a longer one fills a micro-batch, and only one
    costs = [sum(n + attention * n * n for n in unit) for unit in units]
    count = max(1, -(-sum(sizes) // (tokens_per_gpu * data)))
    count += -count % multiple
    while (plan := _deal_twice(costs, sizes, data, count, tokens_per_gpu)) is None:
        count += multiple
    return [
        [[unit * rows_together + k for unit in micro for k in range(rows_together)] for micro in of_rank]
        for of_rank in plan
    ]


def _deal_twice(
    costs: Sequence[float], sizes: Sequence[int], data: int, count: int, limit: int
) -> list[list[list[int]]] | None:
    """Units over ranks, and those of each rank over its ``count`` micro-batches; None where they do not fit."""
    ranks = deal(costs, sizes, data, count * limit)
    if ranks is None:
        return None
    plan = []
    for units in ranks:
        micros = deal([costs[unit] for unit in units], [sizes[unit] for unit in units], count, limit)
        if micros is None:
            return None
        plan.append([[units[index] for index in micro] for micro in micros])
    # The dearest first on every rank: those that run at the same time are near to each other.
    return [sorted(micros, key=lambda micro: -sum(costs[unit] for unit in micro)) for micros in plan]


def imbalance(
    plan: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int], attention: float = 0.0
) -> dict[str, float]:
    """Imbalance of a plan: the largest cost over the mean, of data-parallel ranks and of micro-batches. 1 is even.

    Costs as in ``plan_micro_batches``.
    """
    micros = [
        [sum(lengths[row] + attention * lengths[row] ** 2 for row in micro) for micro in of_rank] for of_rank in plan
    ]
    ranks, every = [sum(costs) for costs in micros], [cost for costs in micros for cost in costs]
    return {"imbalance": max(ranks) / fmean(ranks), "imbalance_micro_batch": max(every) / fmean(every)}


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass: packed rows on the device, and which n of its outputs are read.

    Per token, these are the outputs that predict the sampled tokens; per row, the one at each row's last token.
    """

    tokens: Tensor  # [t] int64, padded at the end to the alignment by a row of its own
    positions: Tensor  # [t] int64: place within the row
    cu_seqlens: Tensor  # [rows + 1] int32
    longest: int
    kept: Tensor  # [m] int64: which of the n are read on this rank; all of them without context parallelism
    outputs: Tensor  # [m] int64: index of the token before each sampled token, or of each row's last token
    targets: Tensor  # [m] int64: the sampled tokens, or the last ones
    fields: dict[str, Tensor]  # [n] each: advantages, weights and so on
    batch_indices: Tensor  # [n] int64: where each sampled token stands in the whole batch, or which row it is there
    expert_choices: Tensor | None = None  # [t, layers, chosen]: of these layers with experts, where they are replayed


def make_micro_batch(
    batch: RolloutBatch,
    rows: Sequence[int],
    fields: dict[str, Tensor],
    *,
    per_row: bool = False,
    pad_token_id: int | None = None,
    row_alignment: int = 1,
    alignment: int = 1,
    device: torch.device | str = "cpu",
    replayed_layers: Sequence[int] = (),
) -> MicroBatch:
    """Packs ``rows`` of ``batch``, to be read at the sampled tokens, or ``per_row`` at the last that is no padding.

    ``fields`` are values of the whole batch, per token [T] or ``per_row`` [R], taken where the outputs are read.
    Each row is padded to a multiple of ``row_alignment`` (context parallelism cuts it evenly), behind its tokens, where
    no real token attends to it. The number of tokens is rounded up to ``alignment``, a multiple of ``row_alignment``
    (sequence parallelism splits it evenly), and is at least that, so that an empty micro-batch still has a shape to
    send through the pipeline. ``replayed_layers``: those of the batch's expert choices that go with it.
    """
    spans = [(int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1])) for row in rows]
    where = _joined([torch.arange(start, stop) for start, stop in spans])
    lengths = [-(-(stop - start) // row_alignment) * row_alignment for start, stop in spans]
    padding = -sum(lengths) % alignment if lengths else alignment
    if padding:
        lengths.append(padding)
    boundaries = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    packed = _joined([begin + torch.arange(b - a) for begin, (a, b) in zip(boundaries.tolist(), spans, strict=False)])
    tokens = torch.zeros(sum(lengths), dtype=torch.int64)
    tokens[packed] = batch.tokens[where]
    positions = torch.cat([torch.arange(length) for length in lengths])
    choices = None
    if replayed_layers and batch.expert_choices is not None:
        of_rows = batch.expert_choices[where][:, list(replayed_layers)]
        choices = of_rows.new_full((len(tokens), *of_rows.shape[1:]), unknown(of_rows.dtype))
        choices[packed] = of_rows
    if per_row:
        last = [_last_token(batch.tokens[start:stop], pad_token_id) for start, stop in spans]
        read = torch.tensor(last, dtype=torch.int64) + boundaries[: len(rows)]
        outputs, batch_indices = read, torch.as_tensor(list(rows), dtype=torch.int64)
    else:
        sampled = batch.response_mask[where]
        read = packed[sampled]
        outputs, batch_indices = read - 1, where[sampled]
    return MicroBatch(
        tokens=_moved(tokens, device),
        positions=_moved(positions, device),
        cu_seqlens=_moved(boundaries, device),
        longest=max(lengths),
        kept=torch.arange(len(outputs), device=device),
        outputs=_moved(outputs, device),
        targets=_moved(tokens[read], device),
        fields={name: _moved(values[batch_indices], device) for name, values in fields.items()},
        batch_indices=_moved(batch_indices, device),
        expert_choices=None if choices is None else _moved(choices, device),
    )


def _moved(values: Tensor, device: torch.device | str) -> Tensor:
    """``values`` on the device; a GPU fetches them from pinned memory, for which nobody waits."""
    if torch.device(device).type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.int64), *parts])


def _last_token(row: Tensor, pad_token_id: int | None) -> int:
    """Index of a row's last token, or of the last before closing ones that are the padding token, as some ends are."""
    kept = (row != pad_token_id).nonzero() if pad_token_id is not None else row.new_zeros(0)
    return int(kept[-1]) if len(kept) else len(row) - 1
