"""Forecast of response lengths, and of how many more responses a cache will hold, from the lengths of the latest."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# How many of the latest responses say how long one is, and how many imagined ones stand beside them.
LATEST, _IMAGINED = 512, 8.0
_TIMES = 32  # at which a forecast looks


class ResponseLengths:
    """Lengths of the latest responses; to begin with, ``latest``."""

    def __init__(self, latest: Sequence[int] = ()) -> None:
        self._latest = deque(latest, maxlen=LATEST)

    def learn(self, tokens: int) -> None:
        """Add a response that has ended with so many."""
        self._latest.append(tokens)

    def survival(self, longest: int) -> NDArray[np.float64]:
        """Return [longest + 1], for each t the share of responses of more than t tokens; none has more than
        ``longest``.

        The imagined ones are evenly spread up to the longest: they are all there is to go by at first, and later on
        for a response that has become longer than all of the latest.
        """
        ended = np.cumsum(np.bincount(np.minimum(self._latest, longest).astype(int), minlength=longest + 1))
        imagined = _IMAGINED * np.arange(longest + 1) / longest
        return 1.0 - (ended + imagined) / (len(self._latest) + _IMAGINED)


def groups_that_fit(
    survival: NDArray[np.float64],
    free: float,
    running: Sequence[int],
    prompt: float,
    rows: float,
    begun: float = 0.0,
) -> float:
    """Return how many groups more a cache with ``free`` tokens of room will hold at every time to come; at least 0.

    Responses end at different times, so that not all of them are in the cache at their full length: t steps from now
    one that still runs has t tokens more, and one that has ended has left what it had.

    Args:
        survival: as of ``ResponseLengths``.
        free: tokens; may be infinite.
        running: tokens of each response that is in the cache now.
        prompt: tokens of a new group's prompts in the cache, ``rows`` its responses, each with ``begun`` tokens of its
            own already, which count in its length.
    """
    longest = len(survival) - 1
    times = np.linspace(0, longest, min(_TIMES, longest + 1)).astype(int)
    ages = np.minimum(np.asarray(running, dtype=int), longest - 1)
    change = (_tokens_later(survival, ages, times) - ages[:, None]).sum(0)
    per_group = prompt + rows * _tokens_later(survival, np.array([min(int(begun), longest - 1)]), times)[0]
    return max(0.0, float(((free - change) / np.maximum(per_group, 1.0)).min()))


def _tokens_later(
    survival: NDArray[np.float64], ages: NDArray[np.int64], times: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return [responses, times]: the tokens that each is expected to have in the cache then, none once it has ended."""
    later = np.minimum(ages[:, None] + times, len(survival) - 1)
    tokens: NDArray[np.float64] = survival[later] / survival[ages][:, None] * later
    return tokens
