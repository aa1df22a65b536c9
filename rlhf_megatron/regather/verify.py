"""Checks that weights arrived unchanged, and that both ends of a transfer plan the same pieces; collective."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.models.weight_source import window
from rlhf_megatron.regather.plan import Copy, RankPlan
from rlhf_megatron.regather.transport import Transport

_CHUNK_ELEMENTS = 1 << 22  # read at a time: each takes some 30 bytes while it is counted
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STEP = 0x9E3779B97F4A7C15 % 2**62  # 2^64 / golden ratio: neighbours get unlike weights


class RegatherError(RuntimeError):
    """Ranks that plan differently, a rank that is gone, or weights that differ after a transfer."""


def compare_plans(plan: RankPlan, dtype: torch.dtype) -> None:
    """Raise RegatherError on every rank where two ends of a transfer plan different pieces; without it they would
    wait for each other.

    The sum over all ranks of (hashes of what is sent - hashes of what is received) is 0 where all agree.
    """
    digests: dict[tuple[int, int], int] = {}
    for pair, copies in _by_pair([*plan.leaving, *plan.arriving]).items():
        text = "\n".join(map(repr, [dtype, *map(tuple, copies)]))
        digests[pair] = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
    signed = sum(digest if source == plan.rank else -digest for (source, _), digest in digests.items())
    total = torch.tensor(signed)
    dist.all_reduce(total)
    if not int(total):
        return
    everyone: list[dict[tuple[int, int], int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, digests)
    pairs = sorted(
        pair for of_rank in everyone for pair in of_rank if len({everyone[end].get(pair) for end in pair}) > 1
    )
    raise RegatherError(
        f"regathering: ranks {pairs[0][0]} and {pairs[0][1]} plan their transfer differently ({len(set(pairs))} pairs "
        "do); all ranks must have the same recipe, model and code"
    )


def _by_pair(copies: Sequence[Copy]) -> dict[tuple[int, int], list[Copy]]:
    pairs: dict[tuple[int, int], list[Copy]] = defaultdict(list)
    for copy in copies:
        pairs[copy.source, copy.destination].append(copy)
    return pairs


@torch.no_grad()
def verify_weights(
    plan: RankPlan,
    dtype: torch.dtype,
    transport: Transport,
    sources: Mapping[str, Tensor],
    destinations: Mapping[str, Tensor],
) -> None:
    """Compare a checksum of each rectangle where it is with one where it came from, in ``dtype``.

    Raises RegatherError on every rank, with the names of the Hugging Face tensors that differ.
    """

    def of_origin(copies: Sequence[Copy]) -> Tensor:
        return _checksums(
            [window(sources[copy.source_parameter], copy.source_offset, copy.region) for copy in copies], dtype
        )

    def of_target(copies: Sequence[Copy]) -> Tensor:
        return _checksums(
            [window(destinations[c.destination_parameter], c.destination_offset, c.region) for c in copies], dtype
        )

    sent = {pair[1]: of_origin(copies) for pair, copies in _by_pair(plan.sends).items()}
    received = {pair[0]: (copies, of_target(copies)) for pair, copies in _by_pair(plan.receives).items()}
    expected = {source: torch.empty_like(sums) for source, (_, sums) in received.items()}
    as_lists = ({rank: [each] for rank, each in sums.items()} for sums in (sent, expected))
    for pending in transport.start(*as_lists):
        pending.wait()
    if plan.local:
        received[plan.rank] = (plan.local, of_target(plan.local))
        expected[plan.rank] = of_origin(plan.local)
    differing = {
        copies[index].tensor
        for source, (copies, sums) in received.items()
        for index in (sums != expected[source]).nonzero().flatten().tolist()
    }
    count = torch.tensor(len(differing))
    dist.all_reduce(count)
    if not int(count):
        return
    names: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(names, differing)
    rank = next(rank for rank, of_rank in enumerate(names) if of_rank)
    every = sorted(set().union(*names))
    raise RegatherError(
        f"regathering: {every[0]} differs after the transfer (tensors: {len(every)}, first seen on rank {rank}): the "
        "rollout's weights are not the trainer's; run tools/preflight.py on these nodes"
    )


def _checksums(views: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return [views] int64: the bits of each number in ``dtype``, times an odd weight of its place, added modulo 2^64.

    So a change of any one number changes the sum, and numbers that have changed places almost surely do.
    """
    return torch.stack([_checksum(view, dtype) for view in views])


def _checksum(view: Tensor, dtype: torch.dtype) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=view.device)
    width = max(1, view.numel() // max(1, len(view)))
    rows = max(1, _CHUNK_ELEMENTS // width)
    for first in range(0, len(view), rows):
        bits = view[first : first + rows].to(dtype).reshape(-1).view(_BITS[dtype.itemsize]).to(torch.int64)
        positions = torch.arange(first * width, first * width + len(bits), device=view.device)
        total += (bits * (positions * _STEP * 2 + 1)).sum()
    return total
