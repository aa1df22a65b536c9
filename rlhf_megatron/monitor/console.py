"""The console of a run: a live table on a terminal, aligned plain lines in a log file. What it shows: columns.py.

Used on one rank only. It prints what it is given and never computes or stores a metric for others.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rlhf_megatron.monitor.columns import COLUMNS, HEADLINE, HEADLINE_NAME, Column, Metrics, seconds

VISIBLE_ROWS = 12
ROWS_PER_HEADER = 20
SECONDS_BETWEEN_PLAIN_PROGRESS = 15.0
CURVE_WIDTH = 48
PANEL_BORDER = 4
STEP_WIDTH = 5


class Console:
    """Display of the steps of a run as they end and the phase that is running now.

    On a terminal: a table with the last 12 steps, a curve of the headline metric, and a line with the running phase;
    lines printed by others appear above it. Elsewhere: one line per step, a header every 20 steps, and a line about a
    phase only when it takes long. Use as a context manager, or call ``close``.
    """

    def __init__(
        self, loop: str, total_steps: int | None = None, title: str = "", stream: TextIO | None = None
    ) -> None:
        """Set up; ``loop`` is the recipe's; ``stream`` is stdout unless given (its isatty() decides between table and
        lines)."""
        self._columns: tuple[Column, ...] = COLUMNS[loop]
        self._headline, self._headline_name = HEADLINE[loop], HEADLINE_NAME[loop]
        self._total_steps = total_steps
        self._title = title or loop
        self._stream = stream or sys.stdout
        self._rows: deque[tuple[int, Metrics]] = deque(maxlen=VISIBLE_ROWS)
        self._curve: list[float] = []
        self._started = time.monotonic()
        self._first_step: tuple[int, float] | None = None
        self._phase, self._done, self._total = "", 0, 0
        self._phase_started = self._phase_shown = self._started
        self._plain_rows = 0
        self._spinner = Spinner("dots")
        self._live: Live | None = None
        if self._stream.isatty():
            self._rich = RichConsole(file=self._stream)
            self._live = Live(get_renderable=self._render, console=self._rich, refresh_per_second=4, transient=False)
            self._live.start()

    def row(self, step: int, metrics: Metrics) -> None:
        """Show one step. Metrics that the step lacks leave their cells empty."""
        self._phase = ""
        self._first_step = self._first_step or (step, time.monotonic())
        more = bool(self._rows) and self._rows[-1][0] == step
        earlier = self._rows.pop()[1] if more else {}
        self._rows.append((step, {**earlier, **metrics}))
        self._add_to_curve(metrics)
        if self._live is not None:
            self._live.refresh()
        elif more:
            self._print_more(step, metrics)
        else:
            self._print_plain(step, metrics)

    def earlier(self, steps: Mapping[int, Metrics]) -> None:
        """Show the last steps of attempts before, rising, which a resumed run continues."""
        for metrics in steps.values():
            self._add_to_curve(metrics)
        last = list(steps.items())[-VISIBLE_ROWS:]
        self._rows.extend(last)
        if self._live is not None:
            self._live.refresh()
            return
        for step, metrics in last:
            self._print_plain(step, metrics)

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        """Show what runs now, such as phase("generate", 96, 256); total 0 means that its extent is unknown."""
        now = time.monotonic()
        if name != self._phase:
            self._phase, self._phase_started, self._phase_shown = name, now, now
        self._done, self._total = done, total
        if self._live is None and now - self._phase_shown >= SECONDS_BETWEEN_PLAIN_PROGRESS:
            self._phase_shown = now
            extent = f" {done}/{total}" if total else ""
            self._write(f"       {name}{extent}, {seconds(now - self._phase_started)} s so far")

    def message(self, text: str) -> None:
        """Print a line above the table."""
        if self._live is not None:
            self._rich.print(text, markup=False, highlight=False)
        else:
            self._write(text)

    def close(self) -> None:
        """Leave the table as it stands and give the terminal back. May be called twice."""
        self._phase = ""
        if self._live is not None:
            self._live.stop()

    def __enter__(self) -> Console:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _add_to_curve(self, metrics: Metrics) -> None:
        value = self._headline(metrics)
        if value is not None and math.isfinite(value):
            self._curve.append(value)

    def _write(self, line: str) -> None:
        self._stream.write(line.rstrip() + "\n")
        self._stream.flush()

    def _print_plain(self, step: int, metrics: Metrics) -> None:
        if self._plain_rows % ROWS_PER_HEADER == 0:
            self._write("  ".join([" step", *(column.heading.rjust(column.width) for column in self._columns)]))
        self._plain_rows += 1
        # A dash keeps empty cells countable for awk and for the eye.
        cells = [(column.text(metrics) or "-").rjust(column.width) for column in self._columns]
        self._write("  ".join([f"{step:{STEP_WIDTH}d}", *cells]))

    def _print_more(self, step: int, metrics: Metrics) -> None:
        """Print metrics that came in for a step after its line: those cells alone, with their headings."""
        cells = [f"{column.heading} {text}" for column in self._columns if (text := column.text(metrics))]
        if cells:
            self._write("  ".join([f"{step:{STEP_WIDTH}d}", *cells]))

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [self._table()]
        if len(self._curve) > 1:
            curve = Text(f"  {self._headline_name} {self._curve[0]:.3f} ", style="dim")
            curve.append(sparkline(self._curve, CURVE_WIDTH), style="green")
            curve.append(f" {self._curve[-1]:.3f}", style="bold green")
            parts.append(curve)
        if self._phase:
            parts.append(self._phase_line())
        subtitle = Text(self._time_line(), style="dim")
        return Panel(Group(*parts), title=Text(self._title, style="bold"), subtitle=subtitle, border_style="blue")

    def _table(self) -> Table:
        columns = fitting_columns(self._columns, self._rich.width - PANEL_BORDER)
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        table.add_column("step", justify="right", width=STEP_WIDTH)
        for column in columns:
            table.add_column(column.heading, justify="right", style=column.style, width=column.width, no_wrap=True)
        for step, metrics in self._rows:
            table.add_row(str(step), *(_cell(column.text(metrics)) for column in columns))
        return table

    def _phase_line(self) -> RenderableType:
        elapsed = seconds(time.monotonic() - self._phase_started)
        line = Table.grid(padding=(0, 1))
        label = Text(f"{self._phase} {elapsed} s", style="bold")
        if self._total:
            bar = ProgressBar(total=self._total, completed=self._done, width=32)
            line.add_row(" ", self._spinner, label, bar, Text(f"{self._done}/{self._total}", style="dim"))
        else:
            line.add_row(" ", self._spinner, label)
        return line

    def _time_line(self) -> str:
        elapsed = time.monotonic() - self._started
        step = self._rows[-1][0] if self._rows else 0
        extent = f"/{self._total_steps}" if self._total_steps else ""
        text = f"step {step}{extent} · {clock(elapsed)}"
        if self._total_steps and self._first_step and step > self._first_step[0]:
            per_step = (time.monotonic() - self._first_step[1]) / (step - self._first_step[0])
            text += f" · about {clock(per_step * max(0, self._total_steps - step))} left"
        return text


def _cell(text: str) -> Text:
    return Text(text, style="bold white on red" if text in ("nan", "inf", "-inf") else "")


def fitting_columns(columns: tuple[Column, ...], available: int) -> list[Column]:
    """Return the columns that fit beside the step column into ``available`` characters, two between neighbours."""

    def needed(chosen: list[Column]) -> int:
        return STEP_WIDTH + sum(column.width + 2 for column in chosen)

    chosen = list(columns)
    if needed(chosen) > available:
        chosen = [column for column in columns if column.essential]
    while len(chosen) > 1 and needed(chosen) > available:
        chosen.pop()
    return chosen


def clock(duration: float) -> str:
    """Write seconds as 0:42, 12:05 or 3:12:05."""
    minutes, rest = divmod(int(duration), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def sparkline(values: list[float], width: int) -> str:
    """Draw finite values as at most ``width`` block characters; more values than that are averaged in bins."""
    bins = min(width, len(values))
    edges = [len(values) * index // bins for index in range(bins + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = 7 / (high - low) if high > low else 0.0
    return "".join("▁▂▃▄▅▆▇█"[round((value - low) * scale)] for value in means)
