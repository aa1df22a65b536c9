"""The experts that each token of a row reached, layer by layer, for router replay (arXiv 2510.11370).

A tensor of them is [tokens, layers with experts, chosen], in the smallest type; its largest value says that nothing is
known of a token, such as the last of a row, which no engine computes. Plans count their bytes: torch is imported late.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_MOST_IN_A_BYTE = 255  # experts, beside the value that says that nothing is known


@dataclasses.dataclass(frozen=True)
class ChoiceShape:
    """The choices of one token: so many of the ``experts`` in each of the ``layers`` that have some."""

    experts: int
    layers: int
    chosen: int

    @property
    def dtype(self) -> torch.dtype:
        """The smallest type that has a value beyond the experts."""
        import torch

        return torch.uint8 if self.experts <= _MOST_IN_A_BYTE else torch.int16

    @property
    def token_bytes(self) -> int:
        """Bytes of the choices of one token."""
        return self.layers * self.chosen * (1 if self.experts <= _MOST_IN_A_BYTE else 2)

    def unknown(self, tokens: int) -> Tensor:
        """Return choices of ``tokens`` tokens of which nothing is known."""
        import torch

        return torch.full((tokens, self.layers, self.chosen), unknown(self.dtype), dtype=self.dtype)

    def of_rows(self, lengths: Sequence[int], rows: Sequence[Tensor | None]) -> Tensor:
        """Return the choices of rows of these lengths, one behind the other; each may know less tokens than its row
        has."""
        whole = self.unknown(sum(lengths))
        for row, of_row in zip(rows, whole.split(list(lengths)), strict=True):
            if row is not None:
                of_row[: len(row)] = row
        return whole

    def check(self, choices: Tensor, tokens: int) -> None:
        """Raise ValueError where ``choices`` are not those of ``tokens`` tokens, or an expert is none of the model."""
        wanted = (tokens, self.layers, self.chosen)
        if choices.shape != wanted or choices.dtype != self.dtype:
            raise ValueError(
                f"expert choices are a tensor of {list(choices.shape)} {choices.dtype}, and not {list(wanted)}"
            )
        of_known = choices[is_known(choices)]
        if bool(((of_known < 0) | (of_known >= self.experts)).any()):
            raise ValueError(f"expert choices are beyond the model's {self.experts} experts")


def unknown(dtype: torch.dtype) -> int:
    """Return the value that says that nothing is known of a token."""
    import torch

    return torch.iinfo(dtype).max


def is_known(choices: Tensor) -> Tensor:
    """Return [tokens] bool: of which tokens the choices are known."""
    return choices[:, 0, 0] != unknown(choices.dtype)


def merged(earlier: Tensor | None, later: Tensor | None) -> Tensor | None:
    """Return the choices of a row that went on: those with which its tokens were sampled first, where they are
    known."""
    if earlier is None or later is None:
        return earlier if later is None else later
    whole = earlier.new_full((max(len(earlier), len(later)), *earlier.shape[1:]), unknown(earlier.dtype))
    for choices in (later, earlier):
        known = is_known(choices)
        whole[: len(choices)][known] = choices[known]
    return whole
