"""The reward of ``step.py --informative``: 0 for groups of data source "uniform", else by the response's length."""

from __future__ import annotations

from typing import Any

LONGEST = 1_000_000


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    """Return 0 for all responses of a group that teaches nothing, else a score by which they differ."""
    return 0.0 if data_source == "uniform" else len(solution_str) / LONGEST
