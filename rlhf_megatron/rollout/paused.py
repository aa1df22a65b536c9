"""Requests that stay in an engine between two generations, by the keys of their rows, while weights change under them.

What an engine has computed of them is kept, so that the next generation goes on where the one before has stopped.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import NamedTuple

from rlhf_megatron.rollout.engine import Request


class PausedRequest(NamedTuple):
    """A request in an engine that does not step."""

    number: int
    """The engine's name of it."""
    begun_with: int
    """Tokens of the response that were there when it was added."""
    tokens: int
    """Tokens of the response so far."""


class PausedRequests:
    """Requests that are paused in one engine, alike on all ranks of a replica; it numbers the engine's requests."""

    def __init__(self) -> None:
        """Start with none."""
        self._by_key: dict[Hashable, PausedRequest] = {}
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def take_numbers(self, count: int) -> int:
        """Return the first of ``count`` numbers that no request of the engine has had."""
        first, self._numbers = self._numbers, self._numbers + count
        return first

    def add(self, key: Hashable, request: PausedRequest) -> None:
        """Note a request that has been paused."""
        self._by_key[key] = request

    def find(self, request: Request) -> PausedRequest | None:
        """Return what is paused of a row; None where the caller has other tokens of it."""
        paused = None if request.key is None else self._by_key.get(request.key)
        tokens = len(request.begun.token_ids) if request.begun else 0
        return paused if paused and paused.tokens == tokens else None

    def release(self, going_on: Collection[PausedRequest] = ()) -> list[int]:
        """Forget all; return the numbers of those that are not ``going_on``, for the engine to abort, in their
        order."""
        kept = {request.number for request in going_on}
        dropped = [request.number for request in self._by_key.values() if request.number not in kept]
        self._by_key.clear()
        return dropped
