"""Requests of a generation by group: those of a group are made where and when a replica begins it."""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import overload

from rlhf_megatron.rollout.engine import Completion, Request


class GroupedRequests(Sequence[Request]):
    """Requests in the order of their groups.

    Attributes:
        group_ids: of each group, in order.
        prompt_tokens: of all requests together.
        begun: what there is of a request already, by the request's number.
    """

    def __init__(
        self,
        group_ids: Sequence[int],
        sizes: Sequence[int],
        prompt_tokens: int,
        begun: Mapping[int, Completion],
        make: Callable[[int], Sequence[Request]],
    ) -> None:
        """Set up; ``sizes``: number of requests of each group, which ``make`` gives for a group's place in the
        order."""
        self.group_ids, self.prompt_tokens, self.begun = group_ids, prompt_tokens, begun
        self._starts = list(itertools.accumulate(sizes, initial=0))
        self._of_group = functools.cache(make)

    @classmethod
    def of(cls, requests: Sequence[Request]) -> GroupedRequests:
        """Return requests that are made already, of which neighbours with one ``group_id`` are a group."""
        if isinstance(requests, cls):
            return requests
        groups = [list(of_group) for _, of_group in itertools.groupby(requests, lambda request: request.group_id)]
        return cls(
            [of_group[0].group_id for of_group in groups],
            [len(of_group) for of_group in groups],
            sum(len(request.prompt_token_ids) for request in requests),
            {number: request.begun for number, request in enumerate(requests) if request.begun},
            groups.__getitem__,
        )

    def of_group(self, group: int) -> Sequence[Request]:
        """Return the requests of the group at a place in the order."""
        return self._of_group(group)

    def numbers(self, group: int) -> range:
        """Return the numbers of a group's requests."""
        return range(self._starts[group], self._starts[group + 1])

    def __len__(self) -> int:
        """Return the number of requests, made or not."""
        return self._starts[-1]

    @overload
    def __getitem__(self, number: int) -> Request: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Request]: ...
    def __getitem__(self, number: int | slice) -> Request | Sequence[Request]:
        """Return a request, or several, made now if they were not before."""
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(f"there is no request {number} of {len(self)}")
        group = bisect_right(self._starts, number) - 1
        return self._of_group(group)[number - self._starts[group]]
