"""The report of a run while it goes on, on rank 0: its table on the terminal, and its files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping

from rlhf_megatron.durable import write_text
from rlhf_megatron.errors import MonitorError
from rlhf_megatron.monitor.console import Console
from rlhf_megatron.monitor.environment_report import environment_report
from rlhf_megatron.monitor.metrics import MetricsLogger
from rlhf_megatron.monitor.run_folder import RunFolder
from rlhf_megatron.recipe import Recipe, resolved_yaml
from rlhf_megatron.redaction import redact
from rlhf_megatron.untrusted import reason_of


class Report:
    """Shows a run and writes its recipe, environment and metrics, the plots and the page."""

    def __init__(self, run: RunFolder, recipe: Recipe, first_step: int = 1) -> None:
        """``first_step`` is beyond 1 where the run resumes."""
        self._run, self._recipe = run, recipe
        moved = run.prepare(resume=first_step > 1)
        for path, text in (
            (run.recipe, resolved_yaml(recipe, redact)),
            (run.environment, json.dumps(environment_report(), indent=2)),
        ):
            try:
                write_text(path, text)
            except OSError as error:
                raise MonitorError(
                    f"{path}: cannot be written ({reason_of(error)}); make room, or move it away"
                ) from error
        self._logger = MetricsLogger(run, recipe.monitor, recipe.model_dump(mode="json"), first_step)
        stream = None if recipe.monitor.console else open(os.devnull, "w")  # noqa: SIM115  (open as long as the run)
        self.console = Console(recipe.loop, total_steps=recipe.steps, title=recipe.name, stream=stream)
        for path in moved:
            self.console.message(f"this run begins anew; what an earlier one has left is {path} now")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes and shows one step."""
        self._logger.log(step, metrics)
        self.console.row(step, metrics)

    def close(self) -> None:
        """Draws the plot, writes the page and gives the terminal back."""
        self.console.close()
        self._logger.close()
        monitor, run = self._recipe.monitor, self._run
        if run.metrics.stat().st_size:
            # matplotlib takes a second to import
            from rlhf_megatron.monitor.page import write_page
            from rlhf_megatron.monitor.plots import plot_run

            if monitor.plots:
                _or_warn("picture was drawn", lambda: plot_run(run.metrics, run.plot_file("run")))
            if monitor.report:
                _or_warn("page was written", lambda: write_page({run.name: run.path}, run.report))


def _or_warn(done: str, action: Callable[[], None]) -> None:
    """Whatever ails a picture or a page, it is no fault of a run whose steps are all done."""
    try:
        action()
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        print(f"warning: no {done} ({type(error).__name__}: {said})", flush=True)
