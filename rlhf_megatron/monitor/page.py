"""Content of the page of runs, or of several beside each other, and the page as one file that loads nothing.

Reads what a run has written (metrics.jsonl, recipe.yaml, environment.json, recovery.jsonl, samples/, rollouts/), so it
can be made at any time and on any machine. Not here: HTML (rendering.py), curves (charts.py), the server.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from rlhf_megatron.durable import write_text
from rlhf_megatron.errors import MonitorError
from rlhf_megatron.monitor.charts import charts_of
from rlhf_megatron.monitor.comparison import apart, compared, recipe_differences
from rlhf_megatron.monitor.environment_report import redact_arguments
from rlhf_megatron.monitor.metrics import read_metrics
from rlhf_megatron.monitor.numbers import duration, number
from rlhf_megatron.monitor.panels import MACHINE_PANELS, panels_for
from rlhf_megatron.monitor.recipe_versions import versions_of
from rlhf_megatron.monitor.rendering import render
from rlhf_megatron.monitor.rollout_view import Filters, RolloutsView, rollouts_view
from rlhf_megatron.monitor.run_files import FilesOfRun, section_of
from rlhf_megatron.monitor.run_view import Curve, Headline, Points, RunView
from rlhf_megatron.monitor.verdict import silence, verdict_of
from rlhf_megatron.redaction import hide_secrets, redact
from rlhf_megatron.untrusted import shown

SAMPLES_SHOWN = 6
SPARK_POINTS, SPARK_WIDTH, SPARK_HEIGHT = 80, 120, 22
# What a run is judged by first, with what is better: more (1), less (-1) or neither (0).
HEADLINES = (
    ("eval/*/accuracy", "held-out accuracy", 1),
    ("eval/accuracy", "held-out accuracy", 1),
    ("eval/*/score", "held-out score", 1),
    ("eval/loss", "held-out loss", -1),
    ("reward/mean", "reward", 1),
    ("train/loss", "loss", -1),
    ("train/entropy", "entropy", 0),
    ("train/kl", "KL to the reference", 0),
    ("train/mismatch_kl", "mismatch", 0),
    ("rollout/response_length_mean", "response length", 0),
    ("perf/tokens_per_gpu_per_sec", "tokens per GPU and second", 1),
    ("perf/mfu_training", "MFU of training", 1),
    ("train/step_time_ms", "milliseconds per step", -1),
)
_OF_NETWORK = ("seconds", "mb", "planned_mb", "planned_seconds")
_SPEED = ("perf/", "train/step_time_ms")


def write_page(runs: Mapping[str, Path], output: Path, title: str = "") -> None:
    """Write the page of run folders, by label; raises MonitorError where one has no metrics or the page no place."""
    views = [view_of(label, folder) for label, folder in runs.items()]
    text = render("overview.html.j2", title or " / ".join(runs), live=False, **overview_values(views, runs))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_text(output, text)
    except OSError as error:
        raise MonitorError(
            f"{output}: cannot be written ({error.strerror or error}); choose another --output"
        ) from error


def overview_values(views: Sequence[RunView], runs: Mapping[str, Path]) -> dict[str, Any]:
    """Return what the template of the overview shows."""
    series = {view.label: view.series for view in views}
    return {
        "runs": views,
        "charts": charts_of(panels_for(views[0].series), series),
        "machine_charts": charts_of(MACHINE_PANELS, series),
        "rollouts": newest_rollouts(views, runs),
        "differences": recipe_differences(views),
        "compared": compared(views),
        "apart": apart(views),
        "spark": (SPARK_WIDTH, SPARK_HEIGHT),
    }


def newest_rollouts(views: Sequence[RunView], runs: Mapping[str, Path]) -> RolloutsView:
    """Return the rows of training that were kept last."""
    return rollouts_view({view.label: (runs[view.label], correct_from(view.recipe)) for view in views}, Filters())


def correct_from(recipe: Mapping[str, Any]) -> float | None:
    """Return the lowest score of a right response, None where the rewards are a reward model's alone."""
    if section_of(recipe, "reward").get("rule") == "none":
        return None
    value = section_of(recipe, "evaluation").get("correct_from", 1.0)
    return float(value) if isinstance(value, (int, float)) else 1.0


def view_of(label: str, folder: Path, live: bool = False) -> RunView:
    """Read a run's view from its folder; raises MonitorError where it has no metrics.

    ``live``: now is when somebody looks, so a run that has been silent for long is in trouble.
    What else there is and cannot be read is named under the facts.
    """
    metrics = folder / "metrics.jsonl"
    if not metrics.exists():
        raise MonitorError(f"{shown(folder)}: no metrics.jsonl; name the folder of a run that has finished a step")
    whole = read_metrics(metrics)
    series = {name: points for name, of_name in whole.items() if (points := _finite(of_name))[0]}
    files = FilesOfRun(folder)
    recipe, recipe_text = _without_secrets(files.recipe(), files.text("recipe.yaml"), _as_yaml)
    environment, environment_text = _without_secrets(files.environment(), files.text("environment.json"), _as_json)
    events = [redact(event) for event in files.events()]
    samples, samples_step = files.newest_samples(SAMPLES_SHOWN)
    recipes = _recipes(files, folder, recipe)
    step, steps = _extent(series, recipe)
    ending = _ending(events)
    goes_on = ending is None and step != steps
    verdict, written = verdict_of(whole, recipe, ending), metrics.stat().st_mtime
    silent = silence(verdict, time.time() - written) if live and goes_on else ""
    return RunView(
        label,
        _state(ending, step, steps),
        "bad" if silent else verdict.level,
        silent or verdict.text,
        verdict.findings,
        step,
        steps,
        written,
        duration((steps - step) * verdict.usual_seconds) if goes_on and steps > step and verdict.usual_seconds else "",
        series,
        _facts(series, recipe, environment, events) + [("not read", problem) for problem in files.problems],
        _headlines(series),
        _phases(series),
        _network(series),
        _evaluations(series),
        events,
        [_curve(name, points) for name, points in sorted(series.items())],
        recipes,
        recipe_text,
        environment_text,
        [redact(row) for row in samples],
        samples_step,
    )


def _finite(points: Points) -> Points:
    kept = [(step, value) for step, value in zip(*points, strict=True) if math.isfinite(value)]
    return [step for step, _ in kept], [value for _, value in kept]


def _without_secrets(values: dict[str, Any], text: str, write: Callable[[Any], str]) -> tuple[dict[str, Any], str]:
    """Return a file's values and text without secrets, which earlier versions and other programs may have left in
    it."""
    hidden = redact(values)
    if isinstance(values.get("argv"), list):  # in it, names and values are one text, or two
        hidden["argv"] = redact_arguments([str(argument) for argument in values["argv"]])
    return hidden, hide_secrets(text if hidden == values else write(hidden))


def _as_yaml(value: Any) -> str:
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    return text


def _as_json(value: Any) -> str:
    return json.dumps(value, indent=2)


def _extent(series: Mapping[str, Points], recipe: Mapping[str, Any]) -> tuple[int, int]:
    """Return (last step, all steps); 0 steps where the recipe says none."""
    steps = recipe.get("steps")
    last = max((points[0][-1] for points in series.values()), default=0)
    return last, steps if type(steps) is int and steps > 0 else 0


def _ending(events: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """Return (what, why) of the last attempt's end, None while it goes on."""
    begun = max((index for index, event in enumerate(events) if event["what"] in ("start", "restart")), default=0)
    endings = [event for event in events[begun:] if event["what"] not in ("start", "restart", "resume")]
    return (endings[-1]["what"], str(endings[-1].get("why", ""))) if endings else None


def _state(ending: tuple[str, str] | None, step: int, steps: int) -> str:
    """Return the state of the run, by its last event."""
    extent = f"step {step} of {steps}" if steps else f"step {step}"
    if ending and ending[0] != "done":
        return f"{extent}, {ending[0].replace('_', ' ')}: {ending[1]}"
    # The page of a run's end is made before its last event.
    return f"done, {extent}" if ending or (steps and step == steps) else f"{extent}, not ended"


def _facts(
    series: Mapping[str, Points],
    recipe: Mapping[str, Any],
    environment: Mapping[str, Any],
    events: Sequence[Mapping[str, Any]],
) -> list[tuple[str, str]]:
    """Return model, sizes, hardware and what the run has cost, as far as they are known."""
    facts: list[tuple[str, str]] = []
    model = section_of(recipe, "model")
    if model.get("path"):
        facts.append(("model", f"{model['path']}, {model.get('dtype', '')}"))
    algorithm = section_of(recipe, "algorithm")
    loop = str(recipe.get("loop", ""))
    if loop:
        facts.append(
            ("loop", f"rl: {algorithm.get('advantage')}, {algorithm.get('policy_loss')}" if loop == "rl" else loop)
        )
    batch = section_of(recipe, "batch")
    if batch.get("prompts_per_step"):
        responses = batch.get("responses_per_prompt", 1)
        facts.append(("step", f"{batch['prompts_per_step']} prompts" + f" x {responses} responses" * (responses != 1)))
    said = str(section_of(environment, "variables").get("WORLD_SIZE"))
    world = int(said) if re.fullmatch("[0-9]{1,9}", said) else 0
    hardware = section_of(environment, "hardware")
    gpus = hardware.get("gpus")
    names = sorted(
        {str(gpu.get("name", gpu)) if isinstance(gpu, dict) else str(gpu) for gpu in gpus if gpu}
        if isinstance(gpus, list)
        else ()
    )
    if world:
        facts.append(("processes", f"{world}, {', '.join(names) or hardware.get('cpu', '')}"))
    seconds = sum(series["train/step_time_ms"][1]) / 1000 if "train/step_time_ms" in series else 0.0
    if 0 < seconds < math.inf:
        facts.append(("time in steps", duration(seconds)))
        if world and names:
            facts.append(("GPU hours in steps", f"{seconds * world / 3600:,.1f}"))
    if seconds and world and "perf/tokens_per_gpu_per_sec" in series:
        rates = dict(zip(*series["perf/tokens_per_gpu_per_sec"], strict=True))
        took = dict(zip(*series["train/step_time_ms"], strict=True))
        tokens = sum(rate * took.get(step, 0.0) / 1000 * world for step, rate in rates.items())
        facts.append(("tokens", f"{tokens:,.0f}"))
    begun = sum(event["what"] in ("start", "restart") for event in events)
    if begun > 1:
        facts.append(("attempts", str(begun)))
    git = section_of(environment, "git")
    if git.get("commit"):
        facts.append(("code", str(git["commit"])[:12] + (", changed" if git.get("dirty") else "")))
    if environment.get("date"):
        facts.append(("begun", str(environment["date"])))
    return facts


def _headlines(series: Mapping[str, Points]) -> list[Headline]:
    headlines: dict[str, Headline] = {}
    for pattern, label, better in HEADLINES:
        prefix, star, suffix = pattern.partition("*")
        for name, (_, values) in series.items():
            fits = name.startswith(prefix) and name.endswith(suffix) if star else name == pattern
            source = name[len(prefix) : len(name) - len(suffix)] if star else ""
            label_and_source = f"{label}, {source}" if source else label
            if fits and label_and_source not in headlines:
                speed = name.startswith(_SPEED)
                first, last = (None, median(values)) if speed else (values[0], values[-1])
                headlines[label_and_source] = Headline(label_and_source, name, first, last, better)
    if "reward/mean" in series:
        headlines.pop("loss", None)  # what a policy's loss is, says nothing
    judged = any(label.startswith("held-out accuracy") for label in headlines)
    return [each for label, each in headlines.items() if not (judged and label.startswith("held-out score"))]


def _phases(series: Mapping[str, Points]) -> list[tuple[str, float, float]]:
    """Return (phase, median seconds of the steps that had it, share of all phases' time), the longest first."""
    totals = {name: sum(values) for name, (_, values) in series.items() if name.startswith("time/")}
    everything = sum(totals.values()) or 1.0
    return sorted(
        ((name.removeprefix("time/"), median(series[name][1]), total / everything) for name, total in totals.items()),
        key=lambda phase: -phase[2],
    )


def _network(series: Mapping[str, Points]) -> list[tuple[str, list[str]]]:
    """Return (phase, median seconds, those in which the link was busy, MB, planned MB and seconds), the busiest
    first."""
    medians = {name: median(values) for name, (_, values) in series.items() if name.startswith(("network/", "time/"))}
    phases = [name[len("network/") : -len("_mb")] for name in medians if name.endswith("_mb")]
    phases = [phase for phase in phases if not phase.endswith("_planned")]
    rows = []
    for phase in sorted(phases, key=lambda phase: -medians[f"network/{phase}_seconds"]):
        names = [f"time/{phase}", *(f"network/{phase}_{what}" for what in _OF_NETWORK)]
        rows.append((phase, [number(medians[name]) if name in medians else "" for name in names]))
    return rows


def _evaluations(series: Mapping[str, Points]) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return the names of what evaluations measured, and (step, values) of each; intervals stand behind their means."""
    names = [name for name in sorted(series) if name.startswith("eval/") and not name.endswith(("_low", "_high"))]
    by_name = {name: dict(zip(*series[name], strict=True)) for name in series if name.startswith("eval/")}
    rows = []
    for step in sorted({step for name in names for step in by_name[name]}):
        cells = []
        for name in names:
            value, low, high = (by_name.get(f"{name}{end}", {}).get(step) for end in ("", "_low", "_high"))
            interval = f" ({number(low)} to {number(high)})" if low is not None and high is not None else ""
            cells.append("" if value is None else number(value) + interval)
        rows.append((step, cells))
    return [name.removeprefix("eval/") for name in names], rows


def _curve(name: str, points: Points) -> Curve:
    """Return a metric's numbers, and its curve of at most SPARK_POINTS points, each the mean of as many values."""
    values = points[1]
    size = max(1, math.ceil(len(values) / SPARK_POINTS))
    means = [sum(part) / len(part) for part in (values[at : at + size] for at in range(0, len(values), size))]
    low, high = min(means), max(means)
    across, up = SPARK_WIDTH / max(1, len(means) - 1), (SPARK_HEIGHT - 4) / (high - low) if high > low else 0.0
    line = " ".join(f"{at * across:.1f},{SPARK_HEIGHT - 2 - (mean - low) * up:.1f}" for at, mean in enumerate(means))
    return Curve(name, values[0], values[-1], min(values), max(values), line if len(means) > 1 else "")


def _recipes(files: FilesOfRun, folder: Path, newest: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return (steps, recipe) of each version of a run's recipe, the oldest first; the steps are "" where there is but
    one."""
    recipes, first_step = list[tuple[str, dict[str, Any]]](), 1
    for version in versions_of(folder):
        if version.last_step < math.inf:
            steps = f"steps {first_step} to {version.last_step:.0f}"
            recipes.append((steps, redact(files.recipe(version.name))))
            first_step = int(version.last_step) + 1
    return [*recipes, (f"from step {first_step}" if recipes else "", newest)]
