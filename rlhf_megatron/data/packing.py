"""Assignment of rows to data-parallel ranks, which all compute alike, and of a rank's rows to passes through the
model, which it plans for itself. Pure functions of the rows' lengths.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_megatron.data.balance import deal, spread
from rlhf_megatron.data.expert_choices import unknown
from rlhf_megatron.data.rollout_batch import RolloutBatch, boundaries
from rlhf_megatron.data.shared_prompts import Packing, RepeatedKeys, SharedPrefixes, pack_with_shared_prefixes


def assign_rows(
    lengths: Tensor,
    data: int,
    parts: Sequence[Tensor] | None = None,
    rows_together: int = 1,
    attention: float = 0.0,
) -> Tensor:
    """Map [R] -> [R] int64: the data-parallel rank of each row, -1 for rows that are in none of ``parts``.

    Ranks have about the same to do in each part, which are indices of rows; default: all. A row of n tokens costs n +
    ``attention`` n^2. Each ``rows_together`` rows that follow each other in a part go to one rank.
    """
    owner = numpy.full(len(lengths), -1, dtype=numpy.int64)
    costs = row_costs(lengths, attention)
    totals = numpy.zeros(data)
    for part in [torch.arange(len(lengths))] if parts is None else parts:
        rows = part.numpy()
        units = numpy.add.reduceat(costs[rows], numpy.arange(0, len(rows), rows_together)) if len(rows) else costs[:0]
        bins = spread(units, data)
        of_bins = numpy.bincount(bins, units, minlength=data)
        # The dearest bin goes to the rank that has the least to do so far.
        ranks = numpy.empty(data, dtype=numpy.int64)
        ranks[numpy.argsort(-of_bins, kind="stable")] = numpy.argsort(totals, kind="stable")
        if not totals.any():
            ranks = numpy.arange(data)
        totals[ranks] += of_bins
        owner[rows] = ranks[bins].repeat(rows_together)[: len(rows)]
    return torch.from_numpy(owner)


def row_costs(lengths: Tensor, attention: float) -> NDArray[numpy.float64]:
    """Map [R] -> [R]: what each row costs, see ``assign_rows``."""
    tokens = lengths.numpy().astype(numpy.float64)
    costs: NDArray[numpy.float64] = tokens + attention * tokens * tokens
    return costs


def plan_micro_batches(
    lengths: Sequence[int],
    tokens_per_gpu: int,
    rows_together: int = 1,
    multiple: int = 1,
    attention: float = 0.0,
    at_least: int = 1,
) -> list[list[int]]:
    """Return ``plan[m]``: the rows of micro-batch m, of the rows of one data-parallel rank.

    Each ``rows_together`` rows that follow each other stay in one micro-batch, in their order. There are the fewest
    micro-batches, ``at_least`` so many and a ``multiple``, that keep each within ``tokens_per_gpu``; a row longer than
    that goes alone. They have about the same to do, costs as in ``assign_rows``, the dearest first: those that run at
    the same time on several ranks are near to each other. Where there are few rows some are empty.
    """
    units = [lengths[first : first + rows_together] for first in range(0, len(lengths), rows_together)]
    sizes = [min(sum(unit), tokens_per_gpu) for unit in units]  # a longer one fills a micro-batch, and only one
    costs = [sum(n + attention * n * n for n in unit) for unit in units]
    count = max(at_least, -(-sum(sizes) // tokens_per_gpu))
    count += -count % multiple
    while (micros := deal(costs, sizes, count, tokens_per_gpu)) is None:
        count += multiple
    micros.sort(key=lambda micro: -sum(costs[unit] for unit in micro))
    return [[unit * rows_together + k for unit in micro for k in range(rows_together)] for micro in micros]


def plan_for_all(plan_of: Callable[[int], list[list[int]]], most: Callable[[int], int]) -> list[list[int]]:
    """Return this rank's micro-batches, as many as every other rank has.

    ``plan_of`` gives a plan of at least so many; ``most`` the largest of what all ranks pass.
    """
    fewest = plan_of(1)
    count = most(len(fewest))
    plan = plan_of(count) if count > len(fewest) else fewest
    if len(plan) > count:  # more of them do not always fit where fewer do
        plan = fewest + [[] for _ in range(count - len(fewest))]
    return plan


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
    keys: RepeatedKeys | None = None  # where sequences attend to those of a prefix before their own
    following: MicroBatch | None = None  # one token later in each row, for what predicts two tokens ahead


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
    prefixes: SharedPrefixes | None = None,
    follows: bool = False,
) -> MicroBatch:
    """Pack ``rows`` of ``batch``, to be read at the sampled tokens, or ``per_row`` at the last that is no padding.

    ``fields`` are values of the whole batch, per token [T] or ``per_row`` [R], taken where the outputs are read.
    Each row is padded to a multiple of ``row_alignment`` (context parallelism cuts it evenly), behind its tokens, where
    no real token attends to it. The number of tokens is rounded up to ``alignment``, a multiple of ``row_alignment``
    (sequence parallelism splits it evenly), and is at least that, so that an empty micro-batch still has a shape to
    send through the pipeline. ``replayed_layers``: those of the batch's expert choices that go with it.
    ``prefixes``, those of the batch's rows: what rows share is there once, with the choices of one of them.
    ``follows``: with what it is one token later.
    """
    spans = [(int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1])) for row in rows]
    where = _joined([torch.arange(start, stop) for start, stop in spans])
    packing = (
        _pack([stop - start for start, stop in spans], row_alignment, alignment)
        if prefixes is None
        else pack_with_shared_prefixes(rows, prefixes, alignment)
    )
    tokens = torch.zeros(sum(packing.lengths), dtype=torch.int64)
    tokens[packing.places] = batch.tokens[where]
    choices = None
    if replayed_layers and batch.expert_choices is not None:
        of_rows = batch.expert_choices[where][:, list(replayed_layers)]
        choices = of_rows.new_full((len(tokens), *of_rows.shape[1:]), unknown(of_rows.dtype))
        choices[packing.places[packing.first]] = of_rows[packing.first]
    if per_row:
        begins = boundaries(torch.tensor([stop - start for start, stop in spans], dtype=torch.int64))
        last = [_last_token(batch.tokens[start:stop], pad_token_id) for start, stop in spans]
        read = packing.places[torch.tensor(last, dtype=torch.int64) + begins[: len(rows)]]
        outputs, batch_indices = read, torch.as_tensor(list(rows), dtype=torch.int64)
    else:
        sampled = batch.response_mask[where]
        read, outputs, batch_indices = packing.places[sampled], packing.before[sampled], where[sampled]
    micro = MicroBatch(
        tokens=tokens,
        positions=packing.positions,
        cu_seqlens=boundaries(torch.tensor(packing.lengths)).to(torch.int32),
        longest=max(packing.lengths),
        kept=torch.arange(len(outputs)),
        outputs=outputs,
        targets=tokens[read],
        fields={name: values[batch_indices] for name, values in fields.items()},
        batch_indices=batch_indices,
        expert_choices=choices,
        keys=packing.keys,
    )
    following = _on_device(one_token_later(micro), device) if follows else None
    return dataclasses.replace(_on_device(micro, device), following=following)


def _on_device(micro: MicroBatch, device: torch.device | str) -> MicroBatch:
    tensors = {field.name: getattr(micro, field.name) for field in dataclasses.fields(micro)}
    moved: dict[str, Any] = {name: _moved(each, device) for name, each in tensors.items() if isinstance(each, Tensor)}
    fields = {name: _moved(values, device) for name, values in micro.fields.items()}
    keys = micro.keys and micro.keys.moved(functools.partial(_moved, device=device))
    return dataclasses.replace(micro, **moved, fields=fields, keys=keys)


def one_token_later(micro: MicroBatch) -> MicroBatch:
    """Return the same rows with the token behind each in its place, where what is predicted is the one behind that.

    Each sampled token is read one place earlier, but for those that are the second of their row. The last place of a
    row has its own token again, and nothing is read there.
    """
    is_last = torch.zeros_like(micro.tokens, dtype=torch.bool)
    is_last[micro.cu_seqlens[1:].long() - 1] = True
    kept = (micro.positions[micro.outputs] > 0).nonzero().squeeze(1)
    return dataclasses.replace(
        micro,
        tokens=torch.where(is_last, micro.tokens, micro.tokens.roll(-1)),
        kept=torch.arange(len(kept)),
        outputs=micro.outputs[kept] - 1,
        targets=micro.targets[kept],
        fields={name: values[kept] for name, values in micro.fields.items()},
        batch_indices=micro.batch_indices[kept],
        expert_choices=None,
    )


def _pack(lengths: Sequence[int], row_alignment: int, alignment: int) -> Packing:
    """Return the packing of rows of ``lengths`` one after the other, see ``make_micro_batch``."""
    padded = [-(-length // row_alignment) * row_alignment for length in lengths]
    padding = -sum(padded) % alignment if padded else alignment
    if padding:
        padded.append(padding)
    begins = boundaries(torch.tensor(padded)).tolist()
    places = _joined([torch.arange(begin, begin + length) for begin, length in zip(begins, lengths, strict=False)])
    positions = torch.cat([torch.arange(length) for length in padded])
    return Packing(padded, positions, places, places - 1, torch.ones(len(places), dtype=torch.bool))


def _moved(values: Tensor, device: torch.device | str) -> Tensor:
    """Return ``values`` on the device; a GPU fetches them from pinned memory, for which nobody waits."""
    if torch.device(device).type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.int64), *parts])


def _last_token(row: Tensor, pad_token_id: int | None) -> int:
    """Return the index of a row's last token, or of the last before closing ones that are the padding token, as some
    ends are."""
    kept = (row != pad_token_id).nonzero() if pad_token_id is not None else row.new_zeros(0)
    return int(kept[-1]) if len(kept) else len(row) - 1
