"""Prompts that go through a model once for all rows that begin with them: which rows go together, and how they lie.

In a micro-batch a prompt's tokens are followed by those of its rows behind it. Each of these parts is a sequence of
queries; it attends to keys of its own, before which those of the prompt are repeated. So every token attends to what it
would attend to in a row of its own, and a prompt has the sum of the gradients of all its rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_megatron.data.rollout_batch import RolloutBatch, boundaries
from rlhf_megatron.data.row_numbers import RowNumbers

_BISECTIONS = 16  # of what a micro-batch may cost


@dataclasses.dataclass(frozen=True)
class PromptedRows:
    """R rows; [R] int64 each. A row's prompt is what precedes its first sampled token.

    Attributes:
        lengths: tokens of each row, its prompt included.
        prompts: the prompt's number; rows with the same have the same tokens there.
        prompt_lengths: its tokens.
    """

    lengths: Tensor
    prompts: Tensor
    prompt_lengths: Tensor

    @classmethod
    def of_batch(cls, batch: RolloutBatch) -> PromptedRows:
        """Return the rows of a batch, whose prompts are compared token by token."""
        lengths, completions = batch.lengths, batch.completion_lengths
        of_prompts = lengths - completions
        numbers: dict[bytes, int] = {}
        begins = zip(batch.cu_seqlens.tolist(), of_prompts.tolist(), strict=False)
        texts = (batch.tokens[begin : begin + length].numpy().tobytes() for begin, length in begins)
        prompts = [numbers.setdefault(text, len(numbers)) for text in texts]
        return cls(lengths, torch.tensor(prompts, dtype=torch.int64), of_prompts)

    @classmethod
    def of_numbers(cls, numbers: RowNumbers) -> PromptedRows:
        """Return rows of which only numbers are known: those of a group begin with one prompt, but for a trajectory's
        later rows, each with one of its own."""
        prompts, of_prompts = numbers.group_id, numbers.lengths - numbers.completion_lengths
        if numbers.trajectory_id is None or not numbers.rows:
            return cls(numbers.lengths, prompts, of_prompts)
        index, order = numbers.trajectories.sort(stable=True)
        later = order[index.diff(prepend=torch.tensor([-1])) == 0]
        own = int(prompts.max()) + 1 + torch.arange(len(later))
        return cls(numbers.lengths, prompts.scatter(0, later, own), of_prompts)

    @property
    def repeated(self) -> list[int]:
        """The length of each row's prompt that an earlier row has."""
        order = self.prompts.argsort(stable=True)
        again = self.prompts[order].diff(prepend=torch.tensor([-1])) == 0
        lengths: list[int] = self.prompt_lengths[order][again].tolist()
        return lengths

    def tokens(self, rows: Sequence[int]) -> int:
        """Return the number of tokens that the micro-batch of ``rows`` computes: each prompt once."""
        index = torch.as_tensor(list(rows), dtype=torch.int64)
        of_prompts = self.prompt_lengths[index]
        found = dict(zip(self.prompts[index].tolist(), of_prompts.tolist(), strict=True))
        return int((self.lengths[index] - of_prompts).sum()) + sum(found.values())

    def cost(self, rows: Sequence[int], attention: float) -> float:
        """Return the cost of the micro-batch of ``rows``, see ``assign_rows``."""
        own, shared = self._costs(attention)
        index = numpy.asarray(rows, dtype=numpy.int64)
        found = dict(zip(self.prompts.numpy()[index].tolist(), shared[index].tolist(), strict=True))
        return float(own[index].sum()) + sum(found.values())

    def _costs(self, attention: float) -> tuple[NDArray[numpy.float64], NDArray[numpy.float64]]:
        """Return [R] each: of what follows a prompt, and of the prompt."""
        whole, of_prompts = (each.numpy().astype(numpy.float64) for each in (self.lengths, self.prompt_lengths))
        shared = of_prompts + attention * of_prompts**2
        return whole + attention * whole**2 - shared, shared

    def assign(self, data: int, parts: Sequence[Tensor] | None = None, attention: float = 0.0) -> Tensor:
        """Do as ``assign_rows`` does; a rank has rows that follow each other by prompts, so that few prompts are on
        two."""
        owner = torch.full((len(self.lengths),), -1, dtype=torch.int64)
        own, shared = self._costs(attention)
        for part in [torch.arange(len(owner))] if parts is None else parts:
            rows = part[self.prompts[part].argsort(stable=True)].numpy()
            begins = numpy.diff(self.prompts.numpy()[rows], prepend=-1) != 0
            costs = own[rows] + shared[rows] * begins
            middle = costs.cumsum() - costs / 2
            of_rank = middle * data / max(float(costs.sum()), 1.0)
            owner[rows] = torch.from_numpy(of_rank.astype(numpy.int64).clip(max=data - 1))
        return owner

    def plan(
        self, tokens_per_gpu: int, multiple: int = 1, attention: float = 0.0, at_least: int = 1
    ) -> list[list[int]]:
        """Do as ``plan_micro_batches`` does; each has rows that follow each other by prompts, and each prompt once."""
        order = self.prompts.argsort(stable=True).tolist()
        own, shared = (each.tolist() for each in self._costs(attention))
        sizes, of_prompts = (self.lengths - self.prompt_lengths).tolist(), self.prompt_lengths.tolist()
        limits = _Rows(order, self.prompts.tolist(), own, shared, sizes, of_prompts, tokens_per_gpu)
        total = sum(own) + sum(dict(zip(self.prompts.tolist(), shared, strict=True)).values())
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


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows in the ``order`` that they are cut in, and by row: prompt, costs and tokens with and without it."""

    order: list[int]
    prompts: list[int]
    own: list[float]
    shared: list[float]
    sizes: list[int]
    prompt_sizes: list[int]
    limit: int

    def cut(self, most: float) -> list[list[int]]:
        """Return pieces that cost at most ``most`` and have at most ``limit`` tokens, but for a row alone."""
        pieces: list[list[int]] = []
        cost, size, prompt = 0.0, 0, -1
        for row in self.order:
            begins = self.prompts[row] != prompt
            more, larger = self.own[row] + begins * self.shared[row], self.sizes[row] + begins * self.prompt_sizes[row]
            if not pieces or cost + more > most or size + larger > self.limit:
                pieces.append([])
                cost, size = 0.0, 0
                more, larger = self.own[row] + self.shared[row], self.sizes[row] + self.prompt_sizes[row]
            pieces[-1].append(row)
            cost, size, prompt = cost + more, size + larger, self.prompts[row]
        return pieces


@dataclasses.dataclass(frozen=True)
class RepeatedKeys:
    """The tokens whose keys and values the sequences of a micro-batch attend to, one sequence after the other.

    Attributes:
        tokens: [k] int64: the token that each is of.
        boundaries: [sequences + 1] int32; the last queries of a sequence are at its last keys.
        longest: of these sequences.
        first: [t] int64: the first key of each token.
        prompts: of each repeated prompt its first token, its length, and where its keys begin each time.
    """

    tokens: Tensor
    boundaries: Tensor
    longest: int
    first: Tensor
    prompts: tuple[tuple[int, int, tuple[int, ...]], ...]

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
        first: [n] bool: it is none of a prompt that an earlier row has brought.
        keys: None where no prompt is repeated.
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
        self.offsets: list[int] = []  # of the first token, in its row
        self.repeated: list[tuple[int, int]] = []  # first token and number of those whose keys come before their own

    def add(self, length: int, offset: int = 0, prompt: int = 0) -> int:
        """Lay a sequence, if it has tokens, that goes on from ``offset`` tokens laid at ``prompt``; return where."""
        begin = sum(self.lengths)
        if length:
            self.lengths.append(length)
            self.offsets.append(offset)
            self.repeated.append((prompt, offset))
        return begin


def pack_with_shared_prompts(rows: Sequence[int], prompted: PromptedRows, alignment: int) -> Packing:
    """Return the packing of ``rows`` in a micro-batch that is padded to a multiple of ``alignment`` by a sequence of
    its own."""
    index = torch.as_tensor(list(rows), dtype=torch.int64)
    whole, of_prompts = prompted.lengths[index].tolist(), prompted.prompt_lengths[index].tolist()
    together: dict[int, list[int]] = {}
    for row, number in enumerate(prompted.prompts[index].tolist()):
        together.setdefault(number, []).append(row)
    sequences, places, firsts = _Sequences(), [index[:0]] * len(whole), [index[:0].bool()] * len(whole)
    for members in together.values():
        shared = of_prompts[members[0]] if len(members) > 1 else 0
        prompt = sequences.add(shared)
        for row in members:
            rest = whole[row] - shared
            begin = sequences.add(rest, shared, prompt)
            places[row] = torch.cat([torch.arange(prompt, prompt + shared), torch.arange(begin, begin + rest)])
            firsts[row] = torch.arange(whole[row]) >= (0 if row == members[0] else shared)
    sequences.add(-sum(sequences.lengths) % alignment if sequences.lengths else alignment)
    parts = zip(sequences.offsets, sequences.lengths, strict=True)
    return Packing(
        lengths=sequences.lengths,
        positions=torch.cat([offset + torch.arange(length) for offset, length in parts]),
        places=torch.cat([index[:0], *places]),
        before=torch.cat([index[:0], *(torch.cat([row[:1] - 1, row[:-1]]) for row in places)]),
        first=torch.cat([index[:0].bool(), *firsts]),
        keys=_keys(sequences.lengths, sequences.repeated),
    )


def _keys(lengths: Sequence[int], spans: Sequence[tuple[int, int]]) -> RepeatedKeys | None:
    """Return the keys of sequences of ``lengths`` queries that repeat tokens (begin, length) before their own."""
    if not any(length for _, length in spans):
        return None
    of_keys = [own + repeated for own, (_, repeated) in zip(lengths, spans, strict=True)]
    begins, of_sequences = (boundaries(torch.tensor(sizes)).tolist() for sizes in (lengths, of_keys))
    tokens, first = [], []
    copies: dict[tuple[int, int], list[int]] = {}
    for (begin, end), (prompt, repeated), at in zip(pairwise(begins), spans, of_sequences, strict=False):
        tokens += [torch.arange(prompt, prompt + repeated), torch.arange(begin, end)]
        first.append(torch.arange(at + repeated, at + repeated + end - begin))
        if repeated:
            copies.setdefault((prompt, repeated), [of_sequences[begins.index(prompt)]]).append(at)
    return RepeatedKeys(
        tokens=torch.cat(tokens),
        boundaries=torch.tensor(of_sequences, dtype=torch.int32),
        longest=max(of_keys),
        first=torch.cat(first),
        prompts=tuple((begin, length, tuple(at)) for (begin, length), at in copies.items()),
    )
