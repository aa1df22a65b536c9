"""Formats lists of ranks for people: a thousand of them in one short phrase."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping


def named_ranks(ranks: Iterable[int], hosts: Mapping[int, str] | None = None) -> str:
    """Return ranks as "rank 3", "ranks 0-6, 9", with their hosts behind them where ``hosts`` (rank -> name) knows
    them."""
    ordered = sorted(set(ranks))
    runs: list[str] = []
    for _, group in itertools.groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in group]
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    text = f"{'rank' if len(ordered) == 1 else 'ranks'} {', '.join(runs)}"
    names = list(dict.fromkeys(hosts[rank] for rank in ordered if rank in hosts)) if hosts else []
    if not names:
        return text
    more = f" and {len(names) - 3} more" if len(names) > 4 else ""
    return f"{text} ({', '.join(names[:3] if more else names)}{more})"
