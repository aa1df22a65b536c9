"""The report of a run while it goes on, on rank 0: its table on the terminal, and its files."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rlhf_megatron.durable import write_text
from rlhf_megatron.errors import MonitorError
from rlhf_megatron.monitor.console import Console
from rlhf_megatron.monitor.environment_report import environment_report
from rlhf_megatron.monitor.metrics import MetricsLogger, steps_before
from rlhf_megatron.monitor.recipe_versions import write_recipe
from rlhf_megatron.monitor.run_folder import RunFolder
from rlhf_megatron.recipe import Recipe, resolved_yaml
from rlhf_megatron.recipe.differences import shown_value
from rlhf_megatron.redaction import redact
from rlhf_megatron.untrusted import reason_of

if TYPE_CHECKING:
    from rlhf_megatron.monitor.page_process import PageProcess


class Report:
    """Display of a run, and writer of its recipe, environment and metrics, the plots and the page.

    Attributes:
        console: the terminal.
        changes: (key, [value before, value now]) of a recipe that has changed since the checkpoint.
    """

    def __init__(self, run: RunFolder, recipe: Recipe, first_step: int = 1, source: Path | None = None) -> None:
        """Set up; ``first_step`` is beyond 1 where the run resumes, from a checkpoint of the run in the folder
        ``source``, or its own."""
        self._run, self._recipe = run, recipe
        moved = run.prepare(resume=first_step > 1)
        with _told(run.recipe):
            written = write_recipe(run, resolved_yaml(recipe, redact), first_step - 1, source or run.path)
        with _told(run.environment):
            write_text(run.environment, json.dumps(environment_report(), indent=2))
        self._logger = MetricsLogger(run, recipe.monitor, recipe.model_dump(mode="json"), first_step)
        self._page = _page_of(run, recipe)
        stream = None if recipe.monitor.console else open(os.devnull, "w")  # noqa: SIM115  (open as long as the run)
        self.console = Console(recipe.loop, total_steps=recipe.steps, title=recipe.name, stream=stream)
        for path in moved:
            self.console.message(f"this run begins anew; what an earlier one has left is {path} now")
        for path in written.moved:
            self.console.message(f"the recipe of steps that are repeated is {path} now")
        self.changes = written.changes
        for line in change_lines(written.changes, written.earlier):
            self.console.message(line)
        if first_step > 1:
            self.console.earlier(steps_before(run.metrics, first_step))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write and show one step."""
        self._logger.log(step, metrics)
        self.console.row(step, metrics)

    def rollouts(self, step: int, table: pa.Table) -> None:
        """Hand kept rows to the trackers that show tables."""
        self._logger.log_rollouts(step, table)

    def model(self, step: int, folder: Path) -> None:
        """Hand an exported model to the trackers that keep models."""
        self._logger.log_model(step, folder)

    def close(self) -> None:
        """Draw the plot, write the page and give the terminal back."""
        self.console.close()
        self._logger.close()
        if self._page:
            self._page.close()
        monitor, run = self._recipe.monitor, self._run
        if run.metrics.stat().st_size:
            # matplotlib takes a second to import
            from rlhf_megatron.monitor.page import write_page

            if monitor.plots:
                from rlhf_megatron.monitor.plots import plot_run

                _or_warn("picture was drawn", lambda: plot_run(run.metrics, run.plot_file("run")))
            if monitor.report:
                _or_warn("page was written", lambda: write_page({run.name: run.path}, run.report))


def change_lines(changes: Sequence[tuple[str, list[Any]]], earlier: Path | None) -> list[str]:
    """Say which keys of the recipe have which values now, and where the recipe of before is; nothing for none."""
    if not changes:
        return []
    lines = [f"  {key}: {shown_value(before)} -> {shown_value(now)}" for key, (before, now) in changes]
    return [f"the recipe has changed since the checkpoint; the earlier one is {earlier}", *lines]


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Raise MonitorError where a file cannot be written."""
    try:
        yield
    except OSError as error:
        raise MonitorError(f"{path}: cannot be written ({reason_of(error)}); make room, or move it away") from error


def _page_of(run: RunFolder, recipe: Recipe) -> PageProcess | None:
    """Return the page of the run, if the recipe asks for it; its address is printed."""
    if recipe.monitor.page.port is None:
        return None
    from rlhf_megatron.monitor.page_process import PageProcess

    page = PageProcess(run.path, recipe.monitor.page)
    print(f"page: {page.url}{page.warning}", flush=True)
    return page


def _or_warn(done: str, action: Callable[[], None]) -> None:
    """Warn of whatever ails a picture or a page: it is no fault of a run whose steps are all done."""
    try:
        action()
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        print(f"warning: no {done} ({type(error).__name__}: {said})", flush=True)
