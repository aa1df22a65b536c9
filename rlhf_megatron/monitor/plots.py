"""One picture of a run, drawn from its metrics.jsonl. Reads that file only: no model, no recipe, no display."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from rlhf_megatron.durable import whole_file
from rlhf_megatron.errors import MonitorError
from rlhf_megatron.monitor.columns import GENERATING, PHASES
from rlhf_megatron.monitor.metrics import read_metrics
from rlhf_megatron.monitor.panels import (
    POINTS_THAT_NEED_SMOOTHING,
    Panel,
    Series,
    axis_bounds,
    curves_of,
    is_logarithmic,
    panels_for,
    smooth,
)
from rlhf_megatron.untrusted import reason_of

INK, MUTED, GRID = "#1f2933", "#697586", "#e4e7eb"
PALETTE = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#db2777", "#0891b2", "#ca8a04", "#475569")
PHASE_COLOURS = {
    "generate": "#2563eb", "score": "#f59e0b", "logprobs": "#10b981", "update": "#7c3aed", "regather": "#ec4899",
}  # fmt: skip
COLUMNS_OF_PANELS = 3
SINGLE_BARS = 60
LARGEST_DRAWN = 1e100


def plot_run(metrics_path: Path, out_png: Path, title: str = "") -> None:
    """Draw the curves of a run into one PNG; ``title`` is the run folder's name unless given.

    A run with rewards gets reward, held-out accuracy, response length, entropy, KL, mismatch and the seconds of each
    phase; a run with pairs or of supervised training gets the panels of its kind. Those without a value are left out.
    Raises MonitorError if the file is missing, a line of it is broken, or nothing in it can be drawn.
    """
    _save(_figure_of_run(metrics_path, title or Path(os.path.realpath(metrics_path.parent)).name), out_png)


def plot_comparison(runs: dict[str, Path], out_png: Path, title: str = "") -> None:
    """Draw several runs into the same panels; ``runs`` is label -> metrics.jsonl, of one kind of loop.

    Seconds per phase are left out. Raises MonitorError as plot_run does, and where nothing is common to draw.
    """
    _save(_figure_of_runs(runs, title or " / ".join(runs)), out_png)


def picture(runs: dict[str, Path]) -> bytes:
    """Return the PNG of one run, or of several, without a title; errors as above."""
    figure = _figure_of_runs(runs, "") if len(runs) > 1 else _figure_of_run(next(iter(runs.values())), "")
    content = io.BytesIO()
    figure.savefig(content, dpi=110, facecolor="white")
    return content.getvalue()


def _figure_of_run(metrics_path: Path, title: str) -> Figure:
    series = _read(metrics_path)
    panels = [(panel, curves) for panel in panels_for(series) if (curves := curves_of(panel, series))]
    phases = _phase_names(series)
    if not panels and not phases:
        raise MonitorError(f"{metrics_path}: holds no metric that can be drawn; has the run finished a step?")
    return _draw(panels, phases, series, title)


def _figure_of_runs(runs: dict[str, Path], title: str) -> Figure:
    series = {label: _read(path) for label, path in runs.items()}
    panels = []
    for panel in panels_for(next(iter(series.values()))):
        curves: Series = {}
        for label, of_run in series.items():
            of_parts = curves_of(panel, of_run)
            curves |= {f"{label}, {part}" if len(of_parts) > 1 else label: points for part, points in of_parts.items()}
        if curves:
            panels.append((panel, curves))
    if not panels:
        raise MonitorError(f"{', '.join(map(str, runs.values()))}: hold no metric that can be drawn")
    everything = {f"{label}/{name}": points for label, of_run in series.items() for name, points in of_run.items()}
    return _draw(panels, [], everything, title, sorted({name for _, curves in panels for name in curves}))


def _read(path: Path) -> Series:
    if not path.is_file():
        raise MonitorError(f"{path}: no such file; give the metrics.jsonl of a run folder")
    return {name: (steps, [_drawn(value) for value in values]) for name, (steps, values) in read_metrics(path).items()}


def _drawn(value: float) -> float:
    """Return a value as it is drawn: not, where it is beyond what axes can be divided for."""
    return value if abs(value) < LARGEST_DRAWN else math.nan


def _save(figure: Figure, out_png: Path) -> None:
    try:
        out_png.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(out_png) as partial:
            figure.savefig(partial, dpi=144, facecolor="white", format="png")
    except OSError as error:
        raise MonitorError(f"{out_png}: cannot be written ({reason_of(error)}); choose another place") from error


def _phase_names(series: Series) -> list[str]:
    present = {name.removeprefix("time/") for name in series if name.startswith("time/")}
    return [name for name in PHASES if name in present] + sorted(present.difference(PHASES))


def _draw(
    panels: list[tuple[Panel, Series]], phases: list[str], series: Series, title: str, names: Sequence[str] = ()
) -> Figure:
    """Lay the panels out in rows of three; the seconds per phase fill the last row's rest, or a row of their own.

    ``names`` of curves have one colour each in all panels, also where one of them is alone.
    """
    count = len(panels)
    free = -count % COLUMNS_OF_PANELS
    span = free if free >= 2 else COLUMNS_OF_PANELS
    rows = math.ceil(count / COLUMNS_OF_PANELS) + (1 if phases and (free < 2) else 0)
    height = 3.0 * rows + 0.9
    layout = ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.12, rect=(0.005, 0.0, 0.99, 1 - 0.62 / height))
    figure = Figure(figsize=(14, height), layout=layout)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(rows, COLUMNS_OF_PANELS)
    steps = sorted({step for points in series.values() for step in points[0]})
    figure.text(0.018, 1 - 0.30 / height, title, fontsize=17, fontweight="bold", color=INK, va="center")
    figure.text(
        0.982, 1 - 0.30 / height, f"steps {steps[0]} to {steps[-1]}", fontsize=11, color=MUTED, va="center", ha="right"
    )
    for index, (panel, curves) in enumerate(panels):
        axes = figure.add_subplot(grid[divmod(index, COLUMNS_OF_PANELS)])
        order = list(names or sorted(curves))
        colours = {name: PALETTE[order.index(name) % len(PALETTE)] for name in curves}
        _draw_panel(axes, panel, curves, colours if len(order) > 1 else {}, (steps[0], steps[-1]))
    if phases:
        axes = figure.add_subplot(grid[rows - 1, COLUMNS_OF_PANELS - span :])
        _draw_phases(axes, phases, series, legend_columns=2 * span)
    return figure


def _draw_panel(axes: Axes, panel: Panel, curves: Series, colours: Mapping[str, str], extent: tuple[int, int]) -> None:
    """Draw a panel; ``colours``: of the curves by name; without them it is the one curve of the panel's own colour."""
    _dress(axes, panel.title, panel.unit)
    for name, (steps, values) in sorted(curves.items()):
        label = name.replace("$", r"\$")  # two of them would begin and end a formula
        colour = colours.get(name, panel.colour)
        if len(values) < POINTS_THAT_NEED_SMOOTHING:
            axes.plot(steps, values, color=colour, linewidth=2, marker="o", markersize=4.5, label=label)
        elif not panel.smoothed:
            axes.plot(steps, values, color=colour, linewidth=2.2, label=label)
        else:
            axes.plot(steps, values, color=colour, linewidth=0.9, alpha=0.3)
            axes.plot(steps, smooth(values), color=colour, linewidth=2.2, label=label)
    everything = [value for _, values in curves.values() for value in values]
    if is_logarithmic(panel, everything):
        axes.set_yscale("log")
    elif panel.as_percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        axes.set_ylim(max(-0.02, min(everything) - 0.05), min(1.03, max(everything) + 0.05))
    elif max(everything) - min(everything) < panel.floor:
        axes.set_ylim(*axis_bounds(everything, panel.floor))
    if extent[1] > extent[0]:
        margin = 0.02 * (extent[1] - extent[0])
        axes.set_xlim(extent[0] - margin, extent[1] + margin)
    if colours:
        axes.legend(frameon=False, fontsize=8.5, labelcolor=MUTED)
    else:
        _annotate_ends(axes, panel, next(iter(curves.values())))


def _annotate_ends(axes: Axes, panel: Panel, points: tuple[list[int], list[float]]) -> None:
    """Write "first -> last" into the panel's upper right corner, above the axes."""

    def write(value: float) -> str:
        return f"{100 * value:.1f}%" if panel.as_percent else _three_digits(value)

    smoothed = panel.smoothed and len(points[1]) >= POINTS_THAT_NEED_SMOOTHING
    values = smooth(points[1]) if smoothed else points[1]
    text = write(values[-1]) if len(values) == 1 else f"{write(values[0])} → {write(values[-1])}"
    axes.annotate(
        text, (1, 1), xytext=(0, 20), xycoords="axes fraction", textcoords="offset points",
        ha="right", va="baseline", fontsize=10.5, fontweight="bold", color=panel.colour,
    )  # fmt: skip


def _draw_phases(axes: Axes, phases: list[str], series: Series, legend_columns: int) -> None:
    """Stack the seconds of the phases, one bar per step; shares in the legend.

    Phases of ranks that generate while others learn go down from zero: both halves of a bar are the same seconds.
    """
    steps = sorted({step for phase in phases for step in series[f"time/{phase}"][0]})
    seconds = np.zeros((len(phases), len(steps)))
    position = {step: index for index, step in enumerate(steps)}
    for row, phase in enumerate(phases):
        for step, value in zip(*series[f"time/{phase}"], strict=True):
            seconds[row, position[step]] = value if math.isfinite(value) else 0.0
    total = max(seconds.sum(), 1e-12)
    down = GENERATING if GENERATING[-1] in phases else ()
    upper, lower = np.zeros(len(steps)), np.zeros(len(steps))
    spare = iter(PALETTE[::-1])
    # An area of steps takes no longer for a long run, where single bars could not be told apart anyway.
    single = len(steps) <= SINGLE_BARS
    edges = [step - 0.5 for step in (*steps, steps[-1] + 1)]
    for row, phase in enumerate(phases):
        colour = PHASE_COLOURS.get(phase) or next(spare, MUTED)
        ran = seconds[row][seconds[row] > 0]
        median = float(np.median(ran)) if ran.size else 0.0
        label = f"{phase} {_three_digits(median)} s, {100 * seconds[row].sum() / total:.0f}%"
        base = lower if phase in down else upper
        heights = -seconds[row] if phase in down else seconds[row]
        if single:
            axes.bar(steps, heights, bottom=base.copy(), width=0.82, color=colour, linewidth=0, label=label)
        else:
            axes.stairs(base + heights, edges, baseline=base.copy(), fill=True, color=colour, linewidth=0, label=label)
        base += heights
    # One slow step (a first compilation) must not flatten the others.
    ordinary, highest = float(np.percentile(upper, 95, method="lower")), float(upper.max())
    cut = highest > 3 * ordinary > 0
    if cut:
        axes.set_ylim(-1.25 * ordinary if down else 0, 1.25 * ordinary)
    cut_text = f"; the highest, {_three_digits(highest)} s, is cut" if cut else ""
    legend_rows = math.ceil(len(phases) / legend_columns)
    _dress(axes, "Seconds per phase", "", pad=20 + 14 * (legend_rows - 1))  # the legend has its unit's place
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: _tick(abs(value), position)))
    axes.set_xlim(steps[0] - 0.6, steps[-1] + 0.6)
    axes.legend(
        frameon=False, fontsize=9, labelcolor=INK, loc="lower right", bbox_to_anchor=(1.005, 1.0),
        ncols=math.ceil(len(phases) / legend_rows),
        borderaxespad=0.2, handlelength=0.9, handletextpad=0.5, columnspacing=1.6,
        title=f"stacked{'; down: ranks that generate' if down else ''}; median of a step, share of all{cut_text}",
        title_fontproperties={"size": 8.5},
        alignment="right",
    )  # fmt: skip


def _dress(axes: Axes, title: str, unit: str, pad: float = 20) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=pad)
    axes.annotate(
        unit, (0, 1), xytext=(0, 6), xycoords="axes fraction", textcoords="offset points", fontsize=9, color=MUTED
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.grid(axis="y", color=GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes.yaxis.set_major_formatter(FuncFormatter(_tick))


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _tick(value: float, position: Any) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}" if abs(value) < 1e-12 else f"{value:.4g}"
