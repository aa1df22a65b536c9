"""Prompts that are drawn and not read: which rows they are and how long, until somebody asks for one.

Ranks that draw the same prompts read a share of the rows each, and tell each other what they have found. A rank reads
as a whole only what it answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from rlhf_megatron.data.prompts import LeftOut, Prompt, PromptDataset
from rlhf_megatron.errors import DataError

# What a row is, as a number that ranks add up: 0 for one that another rank reads.
_LEFT_OUT = {LeftOut.LENGTH: 1, LeftOut.OTHER_SIDE: 2}
_BAD, _FIRST_LENGTH = 3, 4
# Rows of each rank that are read at a time.
_ROWS_OF_A_RANK = 8


class DrawnPrompt:
    """A prompt by its place in the data; it is read the first time that it is asked for."""

    __slots__ = ("_read", "_whole", "length", "part", "row")

    def __init__(self, part: int, row: int, length: int, read: Callable[[int, int], Prompt]) -> None:
        """Set up; ``length`` in tokens; ``read`` gives the prompt at (part, row)."""
        self.part, self.row, self.length = part, row, length
        self._read = read
        self._whole: Prompt | None = None

    def whole(self) -> Prompt:
        """Return the prompt. Raises DataError where its row cannot be read any more."""
        if self._whole is None:
            self._whole = self._read(self.part, self.row)
        return self._whole


@dataclasses.dataclass(frozen=True)
class Readers:
    """The ranks that draw the same prompts, and the place of this one among them.

    Attributes:
        total: element-wise sums of every rank's numbers, on every rank; collective.
    """

    index: int = 0
    count: int = 1
    total: Callable[[Sequence[float]], list[float]] = list

    def rows_at_once(self, least: int) -> int:
        """Return how many rows ranks read together, the same number on all of them."""
        return max(least, _ROWS_OF_A_RANK * self.count)

    def own_codes(self, dataset: PromptDataset, rows: Sequence[int]) -> list[int]:
        """Return what this rank's share of the rows is, 0 for the others; not collective."""
        codes = [0] * len(rows)
        codes[self.index :: self.count] = _codes(dataset, rows[self.index :: self.count])
        return codes


def drawn_lengths(dataset: PromptDataset, rows: Sequence[int], codes: Sequence[float]) -> list[int | LeftOut]:
    """Return the length in tokens of each row's prompt, from the codes of all ranks.

    Raises DataError for the first bad row: the one that reading it raises here too.
    """
    left_out = {code: reason for reason, code in _LEFT_OUT.items()}

    def unusable(row: int, code: float) -> int | LeftOut:
        if code != _BAD:
            return left_out[int(code)]
        [item] = dataset.read([row])
        return item.length if isinstance(item, Prompt) else item

    told = zip(rows, codes, strict=True)
    return [int(code) - _FIRST_LENGTH if code >= _FIRST_LENGTH else unusable(row, code) for row, code in told]


def _codes(dataset: PromptDataset, rows: Sequence[int]) -> list[int]:
    try:
        return [_code(item) for item in dataset.read(rows)]
    except DataError:
        return [_BAD] if len(rows) == 1 else [code for row in rows for code in _codes(dataset, [row])]


def _code(item: Prompt | LeftOut) -> int:
    return _LEFT_OUT[item] if isinstance(item, LeftOut) else _FIRST_LENGTH + item.length
