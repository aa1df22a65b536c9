"""Records each step: times, throughput, memory and metrics, and the stop that a health rule asks for."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from rlhf_megatron.checkpoint.best_metric import BestMetric
from rlhf_megatron.checkpoint.parts import TeamOwnedState
from rlhf_megatron.data.row_numbers import RowNumbers
from rlhf_megatron.data.shared_prompts import SharedPrefixes
from rlhf_megatron.data.stream import PromptStream
from rlhf_megatron.gpu_kinds import peak_flops
from rlhf_megatron.models.flops import training_flops
from rlhf_megatron.monitor.run_report import Report
from rlhf_megatron.monitor.timeline import Clock
from rlhf_megatron.recipe import Recipe
from rlhf_megatron.recipe.drafting import DRAFT
from rlhf_megatron.roles.placed import PlacedRole
from rlhf_megatron.runtime import faults
from rlhf_megatron.runtime.gpu_use import GpuUses
from rlhf_megatron.runtime.health_rules import Health, memory_metrics
from rlhf_megatron.runtime.run_context import RunContext
from rlhf_megatron.runtime.skipped_steps import SkippedSteps
from rlhf_megatron.runtime.watchdog import watchdog


class StepRecorder:
    """Recorder that begins, measures and logs the steps of a run. Every call is collective.

    Attributes:
        skipped_steps: counts those whose gradient was not finite.
        best_metric: the evaluations' metric that checkpoints are compared by.
        recipe_changes: key -> [value before, value now] where the run resumes with another recipe; of rank 0.
    """

    def __init__(
        self,
        context: RunContext[Recipe],
        train: PromptStream,
        roles: Sequence[PlacedRole],
        report: Report | None,
        gpus: GpuUses,
        clocks: list[Clock],
        data_skips: Mapping[int, Mapping[str, Any]],
    ) -> None:
        """Set up; ``roles``: all that the run has, also those that come later, the actor the first. ``report`` is rank
        0's.

        ``clocks``: of all ranks, for timelines. ``data_skips``: see ``Adaptation.skips``.
        """
        recipe = context.recipe
        self._context, self._train, self._roles, self._report = context, train, roles, report
        self._gpus, self._clocks, self._data_skips = gpus, clocks, data_skips
        self._health = Health(recipe.health, recipe.name, context.say)
        self.skipped_steps = SkippedSteps(recipe.retry.max_skipped_steps)
        self.best_metric = BestMetric(recipe.checkpoint.keep_best)
        self.recipe_changes: dict[str, list[Any]] = dict(report.changes) if report else {}
        self._start_metrics: dict[str, float] = {}  # seconds before the first step, for its record

    def end_start(self) -> None:
        """Note how long it took from the process's start to here."""
        gc.collect()
        gc.freeze()  # else a collection amid a step goes through all that the start has made
        phases = self._context.phases
        seconds = {"total": time.perf_counter() - phases.began, **phases.times()}
        self._start_metrics = {f"start/{name}": value for name, value in seconds.items()}
        self._write_timeline(0)

    def begin_step(self, step: int) -> bool:
        """Start a step's clocks; return whether data before it are skipped, on which an earlier attempt failed."""
        watchdog.beat("step", step)
        faults.at("step", step)
        skips_data = step in self._data_skips
        if skips_data:
            self._train.load({**self._train.state(), **self._data_skips[step]})
            self._context.say(f"step {step} passes over the data of steps that were skipped")
        self._context.profiler.begin(step)
        self._context.phases.begin(self._context.recipe.monitor.timeline.has(step))
        self._context.network.begin()
        return skips_data

    def end_step(self, step: int, metrics: Mapping[str, float], tokens: int, trained_on: RowNumbers) -> None:
        """Log a step with its phase times, ``tokens`` (of all ranks, prompt and response) and memory.

        ``trained_on``: the rows of the phase ``update``, if there was one.
        Raises TooManySkippedSteps on all ranks where retry.max_skipped_steps is reached.
        """
        context = self._context
        measured = self._measured(tokens, trained_on)
        of_data = {**self._train.metrics(), **self._train.take_wait()}
        self.log(step, {**of_data, **metrics, **measured, **self._start_metrics})
        self._start_metrics = {}
        for role in self._roles:
            bad_gradients = role.take_bad_gradients()
            if bad_gradients:
                context.say(f"step {step}: {role.name}: gradient {bad_gradients}")
        self.skipped_steps.after(step, metrics, self._data_position)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add numbers to a step's record, and act on the health rules that they break.

        Raises HealthStop on all ranks where a rule stops the run.
        """
        watchdog.beat()
        if self._report:
            self._report.step(step, metrics)
        self.best_metric.observe(step, metrics)
        self._health.after(step, metrics)

    def show_rollouts(self, step: int, table: pa.Table | None) -> None:
        """Hand kept rows to the trackers that show tables; they are on the rank that reports."""
        if self._report and table is not None:
            self._report.rollouts(step, table)

    def end_evaluation(self, step: int) -> None:
        """Warn where checkpoint.keep_best names no metric of the evaluation; they are rank 0's."""
        metric = self.best_metric.missing(step)
        if metric:
            self._context.say(
                f"warning: checkpoint.keep_best: no metric {metric} came with the evaluation of step {step}"
            )

    def close_step(self, step: int) -> None:
        """End the profile of a step and write its timeline, where the recipe asks for them."""
        self._context.profiler.end()
        self._write_timeline(step)

    def abandon(self) -> None:
        """Restore the terminal as the run fails on this rank; the process ends next."""
        self._health.close()
        self._gpus.close()
        self._context.network.close()
        if self._report:
            self._report.console.close()

    def log_model(self, step: int, folder: Path | None) -> None:
        """Hand the last export to trackers, where the recipe says so; ``folder``: None where there was none."""
        if self._report and self._context.recipe.monitor.log_model:
            if folder:
                self._report.model(step, folder)
            else:
                self._context.say("warning: monitor.log_model: nothing was exported at the end; no model is logged")

    def close(self) -> None:
        """Draw the plots and restore the terminal."""
        self._health.close()
        self._gpus.close()
        self._context.network.close()
        if self._report:
            self._report.close()

    def _measured(self, tokens: int, trained_on: RowNumbers) -> dict[str, float]:
        """Return time, speed and memory of the step so far."""
        context = self._context
        elapsed = time.perf_counter() - context.phases.began
        peaks = context.phases.peaks()
        measured = {
            **{f"time/{name}": seconds for name, seconds in context.phases.times().items()},
            **{f"memory/{name}_gb": peak for name, peak in peaks.items()},
            **memory_metrics(),
            **self._gpus.metrics(),
            "train/step_time_ms": elapsed * 1000.0,
            "perf/tokens_per_gpu_per_sec": tokens / elapsed / context.world_size,
            "perf/samples_per_sec": trained_on.rows / elapsed,
            **context.network.metrics(context.phases.times(), elapsed, tokens),
            **training_speed(context.recipe, self._roles[0], trained_on, context.seconds("update")),
            **{
                f"{'train' if role is self._roles[0] else role.name}/{name}": milliseconds
                for role in self._roles
                if role.learns and role.name != DRAFT  # whose passes are in the actor's
                for name, milliseconds in role.take_times_ms().items()
            },
        }
        actor_peaks = [peaks[phase] for phase in ("logprobs", "update") if phase in peaks]
        if actor_peaks and torch.cuda.is_available():
            measured["memory/actor_gpu_mem_mb"] = max(actor_peaks) * 2**10
        return measured

    def _data_position(self) -> dict[str, Any]:
        """Return the position in the data, without the description of their order."""
        state = TeamOwnedState(self._train, self._context.generators).state()
        return {name: value for name, value in state.items() if name != "order"}

    def _write_timeline(self, step: int) -> None:
        """Write what all ranks have done since the step began."""
        context = self._context
        if not context.recipe.monitor.timeline.has(step):
            return
        name = f"step {step}" if step else "start"
        try:
            context.phases.write(context.folder.timeline_file(step), name, self._clocks)
        except OSError as error:
            context.say(f"warning: no timeline of step {step} was written: {error.strerror or error}")


def training_speed(recipe: Recipe, actor: PlacedRole, rows: RowNumbers, seconds: float) -> dict[str, float]:
    """Return the training throughput of ``rows`` in ``seconds``, and MFU on GPUs of known peak; {} without an
    update.

    No MFU where trajectories have several rows and prefixes are shared: their numbers do not say how much they share.
    """
    if not seconds:
        return {}
    gpu_seconds = seconds * len(actor.ranks) / recipe.batch.passes
    speed = {"perf/tokens_per_gpu_per_sec_training": rows.tokens / gpu_seconds}
    peak = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    shares = recipe.actor.shared_prompts
    if peak and not (shares and rows.of_trajectories().rows < rows.rows):
        outputs = int(rows.response_lengths.sum())
        spared = SharedPrefixes.of_numbers(rows).repeated if shares else ()
        flops = training_flops(
            actor.architecture, rows.lengths.tolist(), outputs, frozen=recipe.actor.lora is not None, spared=spared
        )
        speed["perf/mfu_training"] = flops / gpu_seconds / peak
    return speed
