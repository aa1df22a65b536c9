"""Which copies start before the addresses of all parameters are compared with those of the last time.

A comparison of some hundred parameters takes a processor that has just done something else about 0.1 ms, and small
models are copied in a few times that.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from rlhf_megatron.regather.plan import Copy

# Within a GPU these take about 0.1 ms.
FIRST_BYTES = 192 << 20


def split_off_first(copies: Sequence[Copy], elements: int) -> tuple[list[Copy], list[Copy]]:
    """Return about ``elements`` of ``copies``, at most half, and the rest, both in order.

    The first are those of the largest parameters, so that few addresses are compared before them, and as large a share
    of every source, so that all links are used from the beginning to the end.
    """
    share = min(0.5, elements / max(1, sum(copy.elements for copy in copies)))
    sizes: Counter[tuple[int, str]] = Counter()
    of_source: dict[int, list[int]] = defaultdict(list)
    for number, copy in enumerate(copies):
        sizes[copy.source, copy.destination_parameter] += copy.elements
        of_source[copy.source].append(number)
    first: set[int] = set()
    for source, numbers in of_source.items():
        missing = share * sum(copies[number].elements for number in numbers)
        ranked = ((-sizes[source, copies[number].destination_parameter], number) for number in numbers)
        for _, number in sorted(ranked):
            if missing <= 0:
                break
            first.add(number)
            missing -= copies[number].elements
    parts: tuple[list[Copy], list[Copy]] = [], []
    for number, copy in enumerate(copies):
        parts[number not in first].append(copy)
    return parts
