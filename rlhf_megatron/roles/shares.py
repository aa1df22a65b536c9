"""Shares: the rows of a step where they are computed, a share on each data-parallel rank of each role.

Roles that lie on the same ranks in the same layout have the same shares, which come once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.data.rollout_batch import RolloutBatch, boundaries, in_order, marked_in_rows
from rlhf_megatron.data.row_numbers import RowNumbers, SpreadRows, with_numbers
from rlhf_megatron.topology.row_exchange import Moves, RowExchangeError, broadcast_fields, exchange

# What a row brings along; what the numbers say of it comes from these.
FIELDS_OF_TOKENS = ("tokens", "response_mask", "rollout_logprobs", "turn_rewards", "expert_choices")


@dataclasses.dataclass(frozen=True)
class Home:
    """The ranks of a role, each data-parallel rank by the first of them.

    Attributes:
        placement: the same of roles on the same ranks in the same layout.
        leaders: of each data-parallel rank, the first rank of the world.
        data: the data-parallel rank of this rank, None where the role is not.
        group: the ranks of this data-parallel rank.
    """

    placement: tuple[object, ...]
    leaders: tuple[int, ...]
    data: int | None = None
    group: dist.ProcessGroup | None = None

    def leads(self, rank: int) -> bool:
        """Return whether rows come to ``rank``, which is this one, for its data-parallel rank."""
        return self.data is not None and self.leaders[self.data] == rank


@dataclasses.dataclass(frozen=True)
class Share:
    """Part of the rows that a role computes, on this rank: all of its data-parallel rank's, nothing where it is not.

    Attributes:
        owner: [R] the data-parallel rank of each row of the step, -1 where none computes it.
        rows: [n] which rows are here, by their place in the numbers.
        batch: these rows, in this order.
    """

    home: Home
    numbers: RowNumbers
    owner: Tensor
    rows: Tensor
    batch: RolloutBatch

    def chosen(self, rows: Tensor) -> list[int]:
        """Return the rows of the batch that are among those for which ``rows`` [R] bool is true."""
        places: list[int] = rows[self.rows].nonzero().squeeze(1).tolist()
        return places


def share_out(rows: SpreadRows, wanted: Sequence[tuple[Home, Tensor]]) -> list[Share]:
    """Return the share of each home whose data-parallel ranks ``own`` [R] rows; every rank that holds or gets some
    calls it.

    Raises RowExchangeError where a row comes that is not what its numbers say.
    """
    numbers, rank = rows.numbers, rows.rank
    fields = {name: value for name in FIELDS_OF_TOKENS if (value := getattr(rows.held, name)) is not None}
    fields["tokens"] = fields["tokens"].int()
    moves = _moves([_targets(home, owner, numbers.holder, rank) for home, owner in wanted])
    held = (numbers.holder == rank).nonzero().squeeze(1)
    came, arrived = exchange(fields, held, moves, numbers, rank)
    shares: list[Share] = []
    for home, owner in wanted:
        same = next((share for share in shares if share.home is home and share.owner is owner), None)
        if same:  # its rows are not broadcast again
            shares.append(same)
            continue
        places = (owner == (-2 if home.data is None else home.data)).nonzero().squeeze(1)
        of_home = _settled(arrived, came, places, numbers, home, rank)
        shares.append(Share(home, numbers, owner, places, _batch(of_home, rows.held, numbers.select(places))))
    return shares


def carried(values: Tensor | None, source: Share, target: Share) -> Tensor | None:
    """Return ``values`` [T] float32 of the tokens of a share, on the ranks that have the same rows in another role's
    share.

    Called by every rank of both; None on the others.
    """
    if source.home.placement == target.home.placement:
        return values
    numbers, rank = target.numbers, dist.get_rank()
    sources = torch.tensor(source.home.leaders)[source.owner.clamp(min=0)]
    moves = _moves([_targets(target.home, target.owner, sources, rank)])
    own = values if values is not None and source.home.leads(rank) else torch.zeros(0)
    have = source.rows if source.home.leads(rank) else source.rows[:0]
    came, arrived = exchange({"values": own}, have, moves, numbers, rank)
    if target.home.data is None:
        return None
    return _settled(arrived, came, target.rows, numbers, target.home, rank)["values"]


def _targets(home: Home, owner: Tensor, sources: Tensor, rank: int) -> Tensor:
    """Return [M, 3]: (row, the rank of the world that it comes from, the one that it goes to), of those that are
    ``rank``."""
    targets = torch.tensor(home.leaders)[owner.clamp(min=0)]
    rows = ((owner >= 0) & ((sources == rank) | (targets == rank))).nonzero().squeeze(1)
    return torch.stack([rows, sources[rows], targets[rows]], dim=1)


def _moves(targets: Sequence[Tensor]) -> Moves:
    """Return those of all homes; a row goes once where several have the same rank."""
    every = torch.cat(list(targets)).unique(dim=0)
    return Moves(every[:, 0], every[:, 1], every[:, 2])


def _settled(
    arrived: Mapping[str, Tensor], came: Tensor, places: Tensor, numbers: RowNumbers, home: Home, rank: int
) -> dict[str, Tensor]:
    """Return the fields of the rows at ``places``, out of those that came to a leader, on all ranks of its home."""
    if home.leads(rank):
        index = {row: position for position, row in enumerate(came.tolist())}
        lengths, chosen = numbers.lengths[came].tolist(), [index[row] for row in places.tolist()]
        arrived = {name: in_order([value], [lengths], chosen) for name, value in arrived.items()}
    if home.data is None:
        return {name: value[:0] for name, value in arrived.items()}
    tokens = int(numbers.lengths[places].sum())
    return broadcast_fields(arrived, tokens, home.leaders[home.data], home.group)


def _batch(fields: Mapping[str, Tensor], like: RolloutBatch, numbers: RowNumbers) -> RolloutBatch:
    """Return the batch of these fields and numbers, which are checked against each other."""
    of_tokens = {**fields, "tokens": fields["tokens"].long()}
    batch = with_numbers(dataclasses.replace(like, cu_seqlens=boundaries(numbers.lengths), **of_tokens), numbers)
    wrong = (marked_in_rows(batch.response_mask, batch.cu_seqlens) != numbers.response_lengths).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise RowExchangeError(
            f"row {int(numbers.row_id[row])} came with another number of sampled tokens than "
            f"{int(numbers.response_lengths[row])}"
        )
    return batch
