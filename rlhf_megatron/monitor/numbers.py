"""Numbers as people read them on the page."""

from __future__ import annotations

import math


def number(value: float) -> str:
    """Write a number with four digits that matter: 0.8975, 12,345, 3.1e-07."""
    if not math.isfinite(value):
        return "-"
    if value and (abs(value) < 1e-3 or abs(value) >= 1e7):
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def signed(value: float) -> str:
    """Write a change with its sign."""
    return ("+" if value > 0 else "") + number(value)


def duration(seconds: float) -> str:
    """Write a time in hours and minutes, or minutes and seconds."""
    hours, rest = divmod(int(seconds), 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {left:02d} s"
