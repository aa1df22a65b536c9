"""A reward of one's own: 1 where the last number of the response is the ground truth, however it is worded.

Named in a recipe by reward.function: recipes/rewards/last_number.py
"""

from __future__ import annotations

import re
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Return 1.0 or 0.0; thousands separators and a final point do not count."""
    numbers = re.findall(r"-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?", solution_str)
    return float(bool(numbers) and float(numbers[-1].replace(",", "")) == float(ground_truth.replace(",", "")))
