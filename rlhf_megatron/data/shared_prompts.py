"""Prefixes that rows share go through a model once: which rows go together, and how they lie.

In an order in which rows with the same prefix follow each other, each row begins with so many tokens of the one before:
in a group with its prompt, in a trajectory with earlier turns. In a micro-batch its first row lies there as a whole,
and of each other row what follows such a prefix: a sequence of queries, whose own keys follow repeated ones of the
prefix. So every token attends to what it would attend to in a row of its own, and a shared one has the sum of the
gradients of all its rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.data.row_numbers import RowNumbers

_BISECTIONS = 16  # of what a micro-batch may cost

_Span = tuple[int, int]  # tokens that lie side by side: where the first is, and how many


@dataclasses.dataclass(frozen=True)
class SharedPrefixes:
    """R rows and the prefixes that they share; [R] int64 each.

    Attributes:
        lengths: tokens of each row.
        order: the rows, those with the same prefix one after the other.
        shared: tokens that each row has in common, from the first on, with the row before it in that order.
    """

    lengths: Tensor
    order: Tensor
    shared: Tensor

    @classmethod
    def of_batch(cls, batch: RolloutBatch) -> SharedPrefixes:
        """Return the rows of a batch, compared token by token. Where experts are replayed they share prompts alone:
        what was sampled has choices of its own in each row."""
        rows = [row.numpy() for row in batch.tokens.split(batch.lengths.tolist())]
        most = batch.lengths if batch.expert_choices is None else batch.lengths - batch.completion_lengths
        order = sorted(range(len(rows)), key=lambda row: rows[row].tobytes())
        shared = torch.zeros(len(rows), dtype=torch.int64)
        for before, row in pairwise(order):
            shared[row] = min(_common_tokens(rows[before], rows[row]), int(most[before]), int(most[row]))
        return cls(batch.lengths, torch.tensor(order, dtype=torch.int64), shared)

    @classmethod
    def of_numbers(cls, numbers: RowNumbers) -> SharedPrefixes:
        """Return rows of which only numbers are known: the first rows of a group's trajectories share their prompt; of
        later rows, which follow them, that is not known."""
        groups, trajectories = numbers.group_id, numbers.trajectories
        order = torch.from_numpy(numpy.lexsort((trajectories.numpy(), groups.numpy())))
        begins = torch.ones(len(order), dtype=torch.bool), torch.ones(len(order), dtype=torch.bool)
        for of_row, begin in zip((groups, trajectories), begins, strict=True):
            begin[1:] = of_row[order].diff() != 0
        of_group, of_trajectory = begins
        shared = torch.zeros_like(numbers.lengths)
        again = order[of_trajectory & ~of_group]
        shared[again] = (numbers.lengths - numbers.completion_lengths)[again]
        return cls(numbers.lengths, order, shared)

    @property
    def repeated(self) -> list[int]:
        """The length of each prefix that an earlier row has."""
        lengths: list[int] = self.shared[self.shared > 0].tolist()
        return lengths

    @functools.cached_property
    def _places(self) -> NDArray[numpy.int64]:
        """[R]: the place of each row in the order."""
        return self.order.argsort().numpy()

    def among(self, rows: Sequence[int]) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]:
        """Return [m] each: ``rows`` in their order, and what each has in common with the one before it among them."""
        places = numpy.sort(self._places[numpy.asarray(rows, dtype=numpy.int64)])
        order, shared = self.order.numpy(), numpy.zeros_like(places)
        if len(places) > 1:  # what all have in common from there up to here
            to_last = self.shared.numpy()[order[: places[-1] + 1]]
            shared[1:] = numpy.minimum.reduceat(to_last, places[:-1] + 1)
        return order[places], shared

    def tokens(self, rows: Sequence[int]) -> int:
        """Return the number of tokens that the micro-batch of ``rows`` computes: each prefix once."""
        order, shared = self.among(rows)
        return int(self.lengths.numpy()[order].sum() - shared.sum())

    def cost(self, rows: Sequence[int], attention: float) -> float:
        """Return the cost of the micro-batch of ``rows``, see ``assign_rows``."""
        order, shared = self.among(rows)
        return float((_costs(self.lengths.numpy()[order], attention) - _costs(shared, attention)).sum())

    def assign(self, data: int, parts: Sequence[Tensor] | None = None, attention: float = 0.0) -> Tensor:
        """Do as ``assign_rows`` does; a rank has rows that follow each other in the order, so that few prefixes are on
        two."""
        owner = torch.full((len(self.lengths),), -1, dtype=torch.int64)
        for part in [torch.arange(len(owner))] if parts is None else parts:
            rows, shared = self.among(part.tolist())
            costs = _costs(self.lengths.numpy()[rows], attention) - _costs(shared, attention)
            middle = costs.cumsum() - costs / 2
            of_rank = middle * data / max(float(costs.sum()), 1.0)
            owner[rows] = torch.from_numpy(of_rank.astype(numpy.int64).clip(max=data - 1))
        return owner

    def plan(
        self, tokens_per_gpu: int, multiple: int = 1, attention: float = 0.0, at_least: int = 1
    ) -> list[list[int]]:
        """Do as ``plan_micro_batches`` does; each has rows that follow each other in the order."""
        lengths, shared = (values[self.order].numpy() for values in (self.lengths, self.shared))
        whole = _costs(lengths, attention)
        own = whole - _costs(shared, attention)
        rows = zip(self.order.tolist(), whole.tolist(), own.tolist(), lengths.tolist(), shared.tolist(), strict=True)
        limits = _Rows(list(rows), tokens_per_gpu)
        total = float(own.sum())
        fewest = len(limits.cut(float("inf")))
        count = max(at_least, fewest)
        count += -count % multiple
        low, high = total / count, max(total, 1.0)
        micros = limits.cut(high)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            tried = limits.cut(middle)
            if len(tried) <= count:
                micros, high = tried, middle
            else:
                low = middle
        micros.sort(key=lambda rows: -self.cost(rows, attention))
        return micros + [[] for _ in range(count - len(micros))]


def _common_tokens(one: NDArray[numpy.int64], other: NDArray[numpy.int64]) -> int:
    """Return how many tokens two rows have in common before the first that differs."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


def _costs(tokens: NDArray[numpy.int64], attention: float) -> NDArray[numpy.float64]:
    costs: NDArray[numpy.float64] = tokens + attention * tokens.astype(numpy.float64) ** 2
    return costs


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows in the order that they are cut in: number, cost as a whole and behind its prefix, tokens and those of it."""

    rows: list[tuple[int, float, float, int, int]]
    limit: int

    def cut(self, most: float) -> list[list[int]]:
        """Return pieces that cost at most ``most`` and have at most ``limit`` tokens, but for a row alone."""
        pieces: list[list[int]] = []
        cost, size = 0.0, 0
        for row, whole, own, length, shared in self.rows:
            if not pieces or cost + own > most or size + length - shared > self.limit:
                pieces.append([row])
                cost, size = whole, length
            else:
                pieces[-1].append(row)
                cost, size = cost + own, size + length - shared
        return pieces


@dataclasses.dataclass(frozen=True)
class RepeatedKeys:
    """The tokens whose keys and values the sequences of a micro-batch attend to, one sequence after the other.

    Attributes:
        tokens: [k] int64: the token that each is of.
        boundaries: [sequences + 1] int32; the last queries of a sequence are at its last keys.
        longest: of these sequences.
        first: [t] int64: the first key of each token.
        copies: of repeated tokens that lie side by side the first, their number, and where their keys begin.
    """

    tokens: Tensor
    boundaries: Tensor
    longest: int
    first: Tensor
    copies: tuple[tuple[int, int, int], ...]

    def moved(self, move: Callable[[Tensor], Tensor]) -> RepeatedKeys:
        """Return the same, its tensors as ``move`` makes them."""
        return dataclasses.replace(
            self, tokens=move(self.tokens), boundaries=move(self.boundaries), first=move(self.first)
        )


@dataclasses.dataclass(frozen=True)
class Packing:
    """Places of rows in a micro-batch.

    Attributes:
        lengths: of the sequences, of queries where keys are repeated.
        positions: [t] int64: place within the row.
        places: [n] int64: where each token of the rows stands, row after row.
        before: [n] int64: where the token before it stands.
        first: [n] bool: it is none of a prefix that another row has brought.
        keys: None where no prefix is repeated.
    """

    lengths: list[int]
    positions: Tensor
    places: Tensor
    before: Tensor
    first: Tensor
    keys: RepeatedKeys | None = None


class _Sequences:
    """The sequences of queries of a micro-batch, as they are laid one after the other."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.prefixes: list[list[_Span]] = []  # those whose keys come before its own

    def add(self, length: int, prefix: list[_Span]) -> list[_Span]:
        """Lay a sequence behind ``prefix``, if it has tokens; return where both are."""
        if not length:
            return prefix
        begin = sum(self.lengths)
        self.lengths.append(length)
        self.prefixes.append(prefix)
        return [*prefix, (begin, length)]


def pack_with_shared_prefixes(rows: Sequence[int], prefixes: SharedPrefixes, alignment: int) -> Packing:
    """Return the packing of ``rows`` in a micro-batch that is padded to a multiple of ``alignment`` by a sequence of
    its own."""
    none = torch.zeros(0, dtype=torch.int64)
    sequences, laid = _Sequences(), list[_Span]()
    of_rows: dict[int, tuple[Tensor, Tensor]] = {}
    order, shared = prefixes.among(rows)
    for row, common in zip(order.tolist(), shared.tolist(), strict=True):
        length = int(prefixes.lengths[row])
        laid = sequences.add(length - common, _first_tokens(laid, common))
        of_rows[row] = _tokens(laid), torch.arange(length) >= common
    places, firsts = [of_rows[row][0] for row in rows], [of_rows[row][1] for row in rows]
    sequences.add(-sum(sequences.lengths) % alignment if sequences.lengths else alignment, [])
    offsets = [sum(length for _, length in prefix) for prefix in sequences.prefixes]
    parts = zip(offsets, sequences.lengths, strict=True)
    return Packing(
        lengths=sequences.lengths,
        positions=torch.cat([offset + torch.arange(length) for offset, length in parts]),
        places=torch.cat([none, *places]),
        before=torch.cat([none, *(torch.cat([row[:1] - 1, row[:-1]]) for row in places)]),
        first=torch.cat([none.bool(), *firsts]),
        keys=_keys(sequences) if any(offsets) else None,
    )


def _first_tokens(spans: Sequence[_Span], count: int) -> list[_Span]:
    """Return spans of the first ``count`` tokens of ``spans``."""
    found = []
    for begin, length in spans:
        if count > 0:
            found.append((begin, min(length, count)))
            count -= length
    return found


def _tokens(spans: Sequence[_Span]) -> Tensor:
    """Return [tokens] int64: where each token of ``spans`` is."""
    return torch.cat([torch.zeros(0, dtype=torch.int64), *(torch.arange(at, at + size) for at, size in spans)])


def _keys(sequences: _Sequences) -> RepeatedKeys:
    """Return the keys of sequences, some of which repeat tokens before their own."""
    tokens, first, copies, at, ends, begin = list[Tensor](), list[Tensor](), [], 0, [0], 0
    for length, prefix in zip(sequences.lengths, sequences.prefixes, strict=True):
        for token, count in prefix:
            copies.append((token, count, at))
            at += count
        tokens.append(_tokens([*prefix, (begin, length)]))
        first.append(torch.arange(at, at + length))
        at, begin = at + length, begin + length
        ends.append(at)
    return RepeatedKeys(
        tokens=torch.cat(tokens),
        boundaries=torch.tensor(ends, dtype=torch.int32),
        longest=max(map(len, tokens)),
        first=torch.cat(first),
        copies=tuple(copies),
    )
