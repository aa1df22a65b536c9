"""RowNumbers: what every rank knows of the rows of a step, whose tokens lie on one rank each.

Which rows are learned from, by whom and in which order follows from these alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.data.rollout_batch import RolloutBatch, concatenate


@dataclasses.dataclass(frozen=True)
class RowNumbers:
    """R rows; [R] int64 each where nothing else is said. Fields are those of the same name of ``RolloutBatch``."""

    row_id: Tensor
    group_id: Tensor
    lengths: Tensor
    response_lengths: Tensor
    completion_lengths: Tensor
    weight_version: Tensor
    holder: Tensor  # the rank of the world that holds the row's tokens
    truncated: Tensor  # bool
    rewards: Tensor  # float32
    trajectory_id: Tensor | None = None  # None: each row is a whole one
    scores: Tensor | None = None  # float32
    baseline_rewards: Tensor | None = None  # float32

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.row_id)

    @property
    def groups(self) -> int:
        """The number of groups."""
        return len(self.group_id.unique())

    @property
    def trajectories(self) -> Tensor:
        """[R] int64: which trajectory each row belongs to, counted from 0."""
        ids = self.row_id if self.trajectory_id is None else self.trajectory_id
        return ids.unique(return_inverse=True)[1]

    def of_trajectories(self) -> RowNumbers:
        """Return the numbers of the first row of each trajectory, in their order; where each has one: itself."""
        if self.trajectory_id is None:
            return self
        index, order = self.trajectories.sort(stable=True)
        return self.select(order[index.diff(prepend=torch.tensor([-1])) != 0])

    @property
    def tokens(self) -> int:
        """The number of tokens, of prompts and responses."""
        return int(self.lengths.sum())

    def select(self, rows: Tensor) -> RowNumbers:
        """Return the numbers of these rows: their indices, or [R] bool."""
        fields = {name: getattr(self, name) for name in _names(self)}
        return dataclasses.replace(self, **{name: value[rows] for name, value in fields.items()})

    def with_fields(self, **values: Any) -> RowNumbers:
        """Return the same rows with these fields set."""
        return dataclasses.replace(self, **values)

    def table(self) -> Tensor:
        """Return [R, columns] int64, from which ``from_table`` makes the same again; without scores and baselines."""
        columns = [getattr(self, name) for name in _WHOLE]
        trajectory = self.row_id if self.trajectory_id is None else self.trajectory_id
        rewards = self.rewards.double().view(torch.int64)
        return torch.stack([*columns, trajectory, self.truncated.long(), rewards], dim=1)


_WHOLE = ("row_id", "group_id", "lengths", "response_lengths", "completion_lengths", "weight_version", "holder")
# Of these a batch has its own, which follow the numbers.
_OF_BATCHES = (
    *("row_id", "group_id", "weight_version", "truncated", "rewards"),
    *("trajectory_id", "scores", "baseline_rewards"),
)


def from_table(table: Tensor) -> RowNumbers:
    """Return the numbers of a ``RowNumbers.table``."""
    whole = {name: table[:, index].contiguous() for index, name in enumerate(_WHOLE)}
    trajectory, truncated, rewards = (table[:, len(_WHOLE) + index].contiguous() for index in range(3))
    own = None if torch.equal(trajectory, whole["row_id"]) else trajectory
    return RowNumbers(
        **whole, truncated=truncated.bool(), rewards=rewards.view(torch.float64).float(), trajectory_id=own
    )


def checked_numbers(fields: Mapping[str, Any]) -> RowNumbers:
    """Return the numbers with these fields, which were read from a file.

    Raises ValueError or TypeError where they are not those of some rows.
    """
    numbers, rows = RowNumbers(**fields), len(fields["row_id"])
    for name, value in fields.items():
        whole = name in _WHOLE or name == "trajectory_id"
        dtype = torch.int64 if whole else torch.bool if name == "truncated" else torch.float32
        if value.shape != (rows,) or value.dtype != dtype:
            raise ValueError(f"{name} is a tensor of {list(value.shape)} {value.dtype}, and not one for {rows} rows")
        if not bool(value.isfinite().all()):
            raise ValueError(f"{name} is not finite")
    if bool((numbers.lengths < 1).any()) or bool((numbers.holder < 0).any()):
        raise ValueError("rows without a token, or held by no rank")
    return numbers


def numbers_of(batch: RolloutBatch, holder: int | Tensor) -> RowNumbers:
    """Return the numbers of a batch whose tokens lie on the rank ``holder``, or [R] on these."""
    at = holder if isinstance(holder, Tensor) else torch.full((batch.rows,), holder, dtype=torch.int64)
    of_batch = {name: getattr(batch, name) for name in _OF_BATCHES}
    return RowNumbers(
        lengths=batch.lengths,
        response_lengths=batch.response_lengths,
        completion_lengths=batch.completion_lengths.long(),
        holder=at,
        **of_batch,
    )


def with_numbers(batch: RolloutBatch, numbers: RowNumbers) -> RolloutBatch:
    """Return the batch with what the ``numbers`` of the same rows say of each."""
    return batch.with_fields(**{name: getattr(numbers, name) for name in _OF_BATCHES})


@dataclasses.dataclass(frozen=True)
class SpreadRows:
    """Rows of which this rank has the numbers, and the tokens of those that it holds, in the same order."""

    numbers: RowNumbers
    held: RolloutBatch
    rank: int  # this rank, of the world

    @property
    def rows(self) -> int:
        """The number of rows, on all ranks."""
        return self.numbers.rows

    @property
    def groups(self) -> int:
        """The number of groups, on all ranks."""
        return self.numbers.groups

    def select(self, chosen: Tensor) -> SpreadRows:
        """Return the rows of which ``chosen`` [R] bool is true."""
        if bool(chosen.all()):
            return self
        here = self.numbers.holder == self.rank
        kept = chosen[here].nonzero().squeeze(1).tolist()
        return dataclasses.replace(self, numbers=self.numbers.select(chosen), held=self.held.select(kept))

    def with_fields(self, **values: Any) -> SpreadRows:
        """Return the same rows with these numbers set."""
        return dataclasses.replace(self, numbers=self.numbers.with_fields(**values))

    def here(self) -> RolloutBatch:
        """Return the rows that this rank holds, with their numbers."""
        return with_numbers(self.held, self.numbers.select(self.numbers.holder == self.rank))


def joined(parts: Sequence[SpreadRows]) -> SpreadRows:
    """Return the rows of all parts, in order; ids stay as they are. Raises ValueError where some lack a field."""
    if len(parts) == 1:
        return parts[0]
    every = [part.numbers for part in parts]
    names = [_names(numbers) for numbers in every]
    if any(of_part != names[0] for of_part in names):
        raise ValueError(f"rows with different fields: {names}")
    fields = {name: torch.cat([getattr(numbers, name) for numbers in every]) for name in names[0]}
    numbers = dataclasses.replace(every[0], **fields)
    # What the numbers say of a row, a part's batch may or may not say.
    unsaid = {"trajectory_id": None, "scores": None, "baseline_rewards": None}
    held = concatenate([part.held.with_fields(**unsaid) for part in parts])
    return dataclasses.replace(parts[0], numbers=numbers, held=held)


def _names(numbers: RowNumbers) -> list[str]:
    return [field.name for field in dataclasses.fields(numbers) if getattr(numbers, field.name) is not None]
