"""The reward of both sides in ``peer.py``: cheap, of the text alone, and different between random responses."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Return 0, 1/4, 1/2, 3/4 or 1, by the number of characters."""
    return (len(solution_str) % 5) / 4
