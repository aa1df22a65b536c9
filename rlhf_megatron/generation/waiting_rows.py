"""Rows that wait for a later step, as a checkpoint keeps them: one table of numbers, tokens in their holders' files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.data.expert_choices import ChoiceShape
from rlhf_megatron.data.rollout_batch import RolloutBatch, boundaries, checked_batch, concatenate, no_rows
from rlhf_megatron.data.row_numbers import RowNumbers, SpreadRows, checked_numbers, numbers_of
from rlhf_megatron.roles.shares import FIELDS_OF_TOKENS

# A rank of the run that was saved, and a prefix -> the tensors that it had under it.
OwnTensors = Callable[[int, str], Mapping[str, Tensor]]


def rows_state(rows: SpreadRows | None) -> dict[str, Any]:
    """Return the numbers of rows, for ``RowsReader``; {} for none."""
    if rows is None:
        return {}
    fields = {field.name: getattr(rows.numbers, field.name) for field in dataclasses.fields(rows.numbers)}
    return {name: value for name, value in fields.items() if value is not None}


def held_tensors(rows: SpreadRows | None, prefix: str) -> dict[str, Tensor]:
    """Return what this rank holds of rows, for its own file; {} for nothing."""
    if rows is None or not rows.held.rows:
        return {}
    fields = {name: getattr(rows.held, name) for name in FIELDS_OF_TOKENS}
    return {f"{prefix}/{name}": value for name, value in fields.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class RowsReader:
    """Reader of rows, on this ``rank``, so that they are spread over the ``ranks`` that generate now.

    Attributes:
        vocabulary: how many tokens the actor has.
        choices: of experts, where batches have them now.
        has_turn_rewards: batches have these now.
    """

    ranks: Sequence[int]
    rank: int
    vocabulary: int
    choices: ChoiceShape | None
    has_turn_rewards: bool = False

    def read(self, state: Mapping[str, Any], own: OwnTensors, prefix: str) -> SpreadRows:
        """Return the rows of a ``rows_state`` whose tokens are the ``held_tensors`` under ``prefix``.

        Raises ValueError or TypeError where they do not belong together, or a token is none of the vocabulary.
        """
        if "tokens" in state:
            return self._of_earlier_version(state)
        numbers = checked_numbers(state)
        holders, index = numbers.holder.unique(return_inverse=True)
        mine = [each for position, each in enumerate(holders.tolist()) if self._holder(position) == self.rank]
        places = [(numbers.holder == each).nonzero().squeeze(1) for each in mine]
        parts = [
            self._checked(numbers.select(of_holder), own(each, prefix))
            for each, of_holder in zip(mine, places, strict=True)
        ]
        if parts:
            held = concatenate(parts).select(torch.cat(places).argsort().tolist())
        else:
            held = no_rows(self.choices, self.has_turn_rewards)
        return SpreadRows(
            numbers.with_fields(holder=torch.tensor(self.ranks)[index % len(self.ranks)]), held, self.rank
        )

    def _holder(self, position: int) -> int:
        """Return the rank that gets what one rank, one of several in rising order, held."""
        return self.ranks[position % len(self.ranks)]

    def _checked(self, numbers: RowNumbers, fields: Mapping[str, Tensor]) -> RolloutBatch:
        """Return the rows of these numbers and tokens."""
        of_rows = (
            *("rewards", "group_id", "row_id", "weight_version", "truncated"),
            *("trajectory_id", "scores", "baseline_rewards"),
        )
        known = {name: value for name in of_rows if (value := getattr(numbers, name)) is not None}
        cu_seqlens = boundaries(numbers.lengths)
        of_tokens = {name: value for name, value in fields.items() if name != "turn_rewards"}
        if self.has_turn_rewards:  # rows of before there were any have them all at their end
            of_tokens["turn_rewards"] = fields.get("turn_rewards", torch.zeros(len(fields["tokens"])))
        batch = checked_batch({**of_tokens, **known, "cu_seqlens": cu_seqlens}, self.vocabulary, self.choices)
        if not torch.equal(numbers_of(batch, numbers.holder).table(), numbers.table()):
            raise ValueError("rows that wait have other tokens than their numbers say")
        return batch

    def _of_earlier_version(self, state: Mapping[str, Any]) -> SpreadRows:
        """Return the rows of a batch, which was saved whole."""
        batch = checked_batch(state, self.vocabulary, self.choices)
        holder = torch.tensor(self.ranks)[batch.group_id % len(self.ranks)]
        held = batch.select((holder == self.rank).nonzero().squeeze(1).tolist())
        return SpreadRows(numbers_of(batch, holder), held, self.rank)
