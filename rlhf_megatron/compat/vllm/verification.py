"""Drafts in both of vLLM's model runners: no more than there is room for, and verified by comparison.

vLLM verifies drafts by rejection sampling with a request's generator or with noise of its own, so what a seed samples
depends on the drafts. Here a token is drawn as without drafts, by noise of seed and position (``seeded_draw``), and a
draft is accepted if it is that token. The distribution is the target's, and a draft is accepted as often as by
rejection sampling (with probability p(draft), https://arxiv.org/abs/2211.17192).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Draft = Callable[[str, Sequence[int] | NDArray[np.int32]], list[int]]
"""From vLLM's name of a request, and its tokens so far, to those that may follow."""
REJECTED, NO_DRAFT = -1, -2
"""Of tokens in a table; the first is vLLM's own."""


@dataclasses.dataclass(frozen=True)
class TextDrafts:
    """Drafts out of text, while few sequences run.

    Attributes:
        draft: makes them.
        max_running: the most sequences for which there are any.
        count: longest draft.
        longest: tokens of the longest sequence.
        pads: each draft has its full length.
    """

    draft: Draft
    max_running: int
    count: int
    longest: int
    pads: bool = False

    def of(self, name: str, tokens: Sequence[int] | NDArray[np.int32]) -> list[int]:
        """Return the draft of a request that has ``tokens``."""
        draft = self.draft(name, tokens)
        return self.padded(draft, tokens) if self.pads else self._within(draft, tokens)

    def padded(self, draft: list[int], tokens: Sequence[int] | NDArray[np.int32]) -> list[int]:
        """Return ``draft`` in full length, with the last of ``tokens`` behind it."""
        return self._within(draft + [int(tokens[-1])] * (self.count - len(draft)), tokens)

    def _within(self, draft: list[int], tokens: Sequence[int] | NDArray[np.int32]) -> list[int]:
        return draft[: max(self.longest - len(tokens) - 1, 0)]


@dataclasses.dataclass
class SpeculationCounts:
    """Outcome of drafts."""

    verifications: int = 0  # of a sequence with a draft, in a step
    drafted: int = 0  # tokens
    accepted: int = 0


class Verification:
    """Comparison of drafts with the tokens that are drawn in their places."""

    def __init__(self, device: torch.device, synthetic_length: float | None) -> None:
        """Compare on ``device``.

        For benchmarks, ``synthetic_length`` is how many tokens a drafted sequence gets of a step on average, as if so
        many drafts were right; what is sampled after a wrong one is then nobody's distribution.
        """
        self._synthetic_length, self._steps = synthetic_length, 0
        self._counts, self._accepted = SpeculationCounts(), torch.zeros((), dtype=torch.int64, device=device)

    def take_counts(self) -> SpeculationCounts:
        """Return the counts since the last call."""
        counts = dataclasses.replace(self._counts, accepted=int(self._accepted))
        self._counts = SpeculationCounts()
        self._accepted.zero_()
        return counts

    def verified(self, drawn: Tensor, drafts: Tensor) -> Tensor:
        """Return the tokens ``drawn`` [rows, longest draft + 1] up to the first of each row that is not its draft.

        ``drafts`` [rows, longest draft] has ``NO_DRAFT`` where there is none, and the result ``REJECTED`` behind those.
        """
        if self._synthetic_length is None:
            agrees = drawn[:, :-1] == drafts
        else:
            columns = torch.arange(drafts.shape[1], device=drafts.device)
            agrees = (columns < self._synthetic_drafts()) & (drafts != NO_DRAFT)
        agreed = agrees.cumprod(1)
        return torch.cat((drawn[:, :1], torch.where(agreed == 1, drawn[:, 1:], REJECTED)), 1)

    def _synthetic_drafts(self) -> int:
        """Return how many drafted tokens are to be accepted in this step."""
        assert self._synthetic_length is not None
        self._steps += 1
        return int(self._steps * (self._synthetic_length - 1)) - int((self._steps - 1) * (self._synthetic_length - 1))

    def count(self, drafted: Sequence[int], table: Tensor) -> None:
        """Count the drafts of a step, by row, and those of ``table``, as ``verified`` returns it."""
        self._counts.verifications += sum(count > 0 for count in drafted)
        self._counts.drafted += sum(drafted)
        self._accepted += (table[:, 1:] != REJECTED).sum()
