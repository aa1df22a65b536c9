"""Curves as SVG for the page: scales, ticks and polylines, with the values that a pointer shows. No HTML here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_megatron.monitor.panels import (
    POINTS_THAT_NEED_SMOOTHING,
    Panel,
    Series,
    axis_bounds,
    curves_of,
    is_logarithmic,
    smooth,
)

WIDTH, HEIGHT = 360, 176
LEFT, RIGHT, TOP, BOTTOM = 46, 350, 8, 154
MOST_POINTS, MOST_LINES = 240, 8
LARGEST_DRAWN = 1e100


@dataclass(frozen=True)
class Line:
    """One curve: what is drawn, and as JSON [x, step, value] of each point for the pointer."""

    label: str
    colour: int
    points: str
    faint: str
    values: str
    last: float


@dataclass(frozen=True)
class Chart:
    """One panel as it is drawn; ticks are (place in the picture, text)."""

    title: str
    unit: str
    metric: str
    is_percent: bool
    lines: list[Line]
    steps: list[tuple[float, str]]
    values: list[tuple[float, str]]
    note: str


def charts_of(panels: Sequence[Panel], runs: Mapping[str, Series]) -> list[Chart]:
    """Return the charts of panels that any run has values for; curves of several runs lie in the same chart."""
    charts = []
    for panel in panels:
        curves: Series = {}
        for label, series in runs.items():
            for part, points in curves_of(panel, series).items():
                name = ", ".join(word for word in (label if len(runs) > 1 else "", part) if word)
                if (drawable := _drawable(*points))[0]:
                    curves[name or label] = drawable
        if curves:
            charts.append(chart_of(panel, dict(list(curves.items())[:MOST_LINES])))
    return charts


def chart_of(panel: Panel, curves: Series) -> Chart:
    """Return the chart of finite curves, each with a point at least."""
    thinned = {label: thin(*points) for label, points in curves.items()}
    everything = [value for _, values in curves.values() for value in values]
    logarithmic = is_logarithmic(panel, everything)
    # Below the floor nothing is a signal, on a logarithmic axis neither.
    scaled = [math.log10(max(value, panel.floor, 1e-300)) if logarithmic else value for value in everything]
    low, high = axis_bounds(scaled, 0.0 if logarithmic else panel.floor)
    first = min(steps[0] for steps, _ in curves.values())
    last = max(max(steps[-1] for steps, _ in curves.values()), first + 1)

    def across(step: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * (step - first) / (last - first), 1)

    def up(value: float) -> float:
        at = math.log10(max(value, panel.floor, 1e-300)) if logarithmic else value
        return round(BOTTOM - (BOTTOM - TOP) * (at - low) / (high - low), 1)

    def polyline(steps: Sequence[float], values: Sequence[float]) -> str:
        return " ".join(f"{across(step)},{up(value)}" for step, value in zip(steps, values, strict=True))

    lines = []
    for index, (label, (steps, values)) in enumerate(thinned.items()):
        smoothed = panel.smoothed and len(values) >= POINTS_THAT_NEED_SMOOTHING
        shown = json.dumps(
            [[across(step), step, float(f"{value:.6g}")] for step, value in zip(steps, values, strict=True)]
        )
        drawn = polyline(steps, smooth(values) if smoothed else values)
        faint = polyline(steps, values) if smoothed else ""
        lines.append(Line(label, index % 8, drawn, faint, shown, values[-1]))
    ticks = [(across(step), f"{step:,.0f}") for step in round_numbers(first, last, 5) if step == int(step)]
    if logarithmic:
        powers = range(math.ceil(low), math.floor(high) + 1, max(1, round((high - low) / 4)))
        rows = [(up(10.0**power), f"1e{power}") for power in powers]
    else:
        rows = [(up(value), _tick(value, panel.as_percent)) for value in round_numbers(low, high, 4)]
    quiet = len(everything) > 1 and panel.floor and max(everything) - min(everything) < panel.floor
    note = f"moves by less than {panel.floor:g}" if quiet else ""
    return Chart(panel.title, panel.unit, panel.metric, panel.as_percent, lines, ticks, rows, note)


def thin(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return at most MOST_POINTS points, each the mean of as many values, at the last of their steps."""
    size = max(1, math.ceil(len(values) / MOST_POINTS))
    starts = range(0, len(values), size)
    means = [math.fsum(part) / len(part) for part in (values[at : at + size] for at in starts)]
    return [steps[min(at + size, len(steps)) - 1] for at in starts], means


def round_numbers(low: float, high: float, count: int) -> list[float]:
    """Return about so many numbers between two, in steps of 1, 2 or 5 times a power of ten."""
    if not high - low > 1e-12 * abs(low) + 1e-290:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    begin = math.ceil(low / step - 1e-9)
    numbers = [index * step for index in range(begin, begin + 4 * count) if index * step <= high + 1e-9 * step]
    return numbers or [low]


def _drawable(steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """Return the points that an axis can be divided for."""
    kept = [(step, value) for step, value in zip(steps, values, strict=True) if abs(value) < LARGEST_DRAWN]
    return [step for step, _ in kept], [value for _, value in kept]


def _tick(value: float, as_percent: bool) -> str:
    if as_percent:
        return f"{100 * value:.3g}%"
    if abs(value) < 1e-12:
        return "0"
    return f"{value / 1e6:.4g}M" if abs(value) >= 1e6 else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
