"""One HTML page of a run, or of several beside each other: made from their folders, and loading nothing from elsewhere.

Reads what a run has written (metrics.jsonl, recipe.yaml, environment.json, recovery.jsonl, samples/), so it can be made
at any time and on any machine. Not here: the curves (plots.py), and what is in these files (run_folder.py).
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import jinja2
import yaml

from rlhf_megatron.durable import write_text
from rlhf_megatron.errors import MonitorError
from rlhf_megatron.monitor.environment_report import redact_arguments
from rlhf_megatron.monitor.metrics import read_metrics
from rlhf_megatron.monitor.plots import picture
from rlhf_megatron.monitor.run_files import FilesOfRun, section_of
from rlhf_megatron.redaction import hide_secrets, redact

TEMPLATE = Path(__file__).with_name("page.html.j2")
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
_SPEED = ("perf/", "train/step_time_ms")

Points = tuple[list[int], list[float]]


@dataclass(frozen=True)
class Curve:
    """One metric of a run: its first and last value, its bounds, and its curve as the points of a polyline."""

    name: str
    first: float
    last: float
    low: float
    high: float
    points: str


@dataclass(frozen=True)
class Headline:
    """A metric that a run is judged by, at its first and its last step; speeds have no first, and their median."""

    label: str
    metric: str
    first: float | None
    last: float
    better: int


@dataclass
class RunView:
    """One run on the page."""

    label: str
    state: str
    facts: list[tuple[str, str]]
    headlines: list[Headline]
    phases: list[tuple[str, float, float]]
    evaluations: tuple[list[str], list[tuple[int, list[str]]]]
    events: list[dict[str, Any]]
    curves: list[Curve]
    recipe: dict[str, Any]
    recipe_text: str
    environment_text: str
    samples: list[dict[str, Any]] = field(default_factory=list)
    samples_step: int | None = None


def write_page(runs: Mapping[str, Path], output: Path, title: str = "") -> None:
    """Writes the page of run folders, by label; raises MonitorError where one has no metrics or the page no place."""
    views = [view_of(label, folder) for label, folder in runs.items()]
    curves = base64.b64encode(picture({label: folder / "metrics.jsonl" for label, folder in runs.items()})).decode()
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page.filters.update(number=number, signed=signed)
    text = page.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=title or " / ".join(runs),
        runs=views,
        picture=curves,
        differences=recipe_differences(views),
        compared=compared(views),
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        spark=(SPARK_WIDTH, SPARK_HEIGHT),
    )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_text(
            output, text.encode("utf-8", "backslashreplace").decode("utf-8")
        )  # half a pair of UTF-16 has no UTF-8
    except OSError as error:
        raise MonitorError(
            f"{output}: cannot be written ({error.strerror or error}); choose another --output"
        ) from error


def view_of(label: str, folder: Path) -> RunView:
    """Reads a run's view from its folder; raises MonitorError where it has no metrics.

    What else there is and cannot be read is named under the facts.
    """
    metrics = folder / "metrics.jsonl"
    if not metrics.exists():
        raise MonitorError(f"{folder}: no metrics.jsonl; name the folder of a run that has finished a step")
    series = {name: _finite(points) for name, points in read_metrics(metrics).items()}
    series = {name: points for name, points in series.items() if points[0]}
    files = FilesOfRun(folder)
    recipe, recipe_text = _without_secrets(files.recipe(), files.text("recipe.yaml"), _as_yaml)
    environment, environment_text = _without_secrets(files.environment(), files.text("environment.json"), _as_json)
    events = [redact(event) for event in files.events()]
    samples, step = files.newest_samples(SAMPLES_SHOWN)
    return RunView(
        label,
        _state(events, series, recipe),
        _facts(series, recipe, environment, events) + [("not read", problem) for problem in files.problems],
        _headlines(series),
        _phases(series),
        _evaluations(series),
        events,
        [_curve(name, points) for name, points in sorted(series.items())],
        recipe,
        recipe_text,
        environment_text,
        [redact(row) for row in samples],
        step,
    )


def _finite(points: Points) -> Points:
    kept = [(step, value) for step, value in zip(*points, strict=True) if math.isfinite(value)]
    return [step for step, _ in kept], [value for _, value in kept]


def _without_secrets(values: dict[str, Any], text: str, write: Callable[[Any], str]) -> tuple[dict[str, Any], str]:
    """A file's values and text without secrets, which earlier versions and other programs may have left in it."""
    hidden = redact(values)
    if isinstance(values.get("argv"), list):  # in it, names and values are one text, or two
        hidden["argv"] = redact_arguments([str(argument) for argument in values["argv"]])
    return hidden, hide_secrets(text if hidden == values else write(hidden))


def _as_yaml(value: Any) -> str:
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    return text


def _as_json(value: Any) -> str:
    return json.dumps(value, indent=2)


def _state(events: Sequence[Mapping[str, Any]], series: Mapping[str, Points], recipe: Mapping[str, Any]) -> str:
    """The state of the run, by its last event."""
    last = max((points[0][-1] for points in series.values()), default=0)
    extent = f"step {last} of {recipe['steps']}" if recipe.get("steps") else f"step {last}"
    begun = max((index for index, event in enumerate(events) if event["what"] in ("start", "restart")), default=0)
    endings = [event for event in events[begun:] if event["what"] not in ("start", "restart", "resume")]
    if endings and endings[-1]["what"] != "done":
        return f"{extent}, {endings[-1]['what'].replace('_', ' ')}: {endings[-1].get('why', '')}"
    # The page of a run's end is made before its last event.
    return f"done, {extent}" if endings or last == recipe.get("steps") else f"{extent}, not ended"


def _facts(
    series: Mapping[str, Points],
    recipe: Mapping[str, Any],
    environment: Mapping[str, Any],
    events: Sequence[Mapping[str, Any]],
) -> list[tuple[str, str]]:
    """Model, sizes, hardware and what the run has cost, as far as they are known."""
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
        facts.append(("time in steps", _duration(seconds)))
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
            shown = f"{label}, {source}" if source else label
            if fits and shown not in headlines:
                speed = name.startswith(_SPEED)
                first, last = (None, median(values)) if speed else (values[0], values[-1])
                headlines[shown] = Headline(shown, name, first, last, better)
    if "reward/mean" in series:
        headlines.pop("loss", None)  # what a policy's loss is, says nothing
    judged = any(label.startswith("held-out accuracy") for label in headlines)
    return [each for label, each in headlines.items() if not (judged and label.startswith("held-out score"))]


def _phases(series: Mapping[str, Points]) -> list[tuple[str, float, float]]:
    """(phase, median seconds of the steps that had it, share of all phases' time), the longest first."""
    totals = {name: sum(values) for name, (_, values) in series.items() if name.startswith("time/")}
    everything = sum(totals.values()) or 1.0
    return sorted(
        ((name.removeprefix("time/"), median(series[name][1]), total / everything) for name, total in totals.items()),
        key=lambda phase: -phase[2],
    )


def _evaluations(series: Mapping[str, Points]) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Names of what evaluations measured, and (step, values) of each; intervals stand behind their means."""
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
    """A metric's numbers, and its curve of at most SPARK_POINTS points, each the mean of as many values."""
    values = points[1]
    size = max(1, math.ceil(len(values) / SPARK_POINTS))
    means = [sum(part) / len(part) for part in (values[at : at + size] for at in range(0, len(values), size))]
    low, high = min(means), max(means)
    across, up = SPARK_WIDTH / max(1, len(means) - 1), (SPARK_HEIGHT - 4) / (high - low) if high > low else 0.0
    line = " ".join(f"{at * across:.1f},{SPARK_HEIGHT - 2 - (mean - low) * up:.1f}" for at, mean in enumerate(means))
    return Curve(name, values[0], values[-1], min(values), max(values), line if len(means) > 1 else "")


def recipe_differences(runs: Sequence[RunView]) -> list[tuple[str, list[str]]]:
    """(key, each run's value) of the keys in which the recipes differ, but for their names; none for one run."""
    differences = _differences([run.recipe for run in runs], "")
    return [(key, values) for key, values in differences if key not in ("name", "run_root")]


def _differences(values: Sequence[Any], key: str) -> list[tuple[str, list[str]]]:
    if all(isinstance(value, Mapping) for value in values):
        keys = dict.fromkeys(inner for value in values for inner in value)
        inside = [_differences([value.get(inner) for value in values], f"{key}.{inner}".strip(".")) for inner in keys]
        return [difference for of_key in inside for difference in of_key]
    shown = [_in_yaml(value) for value in values]
    return [(key, shown)] if len(set(shown)) > 1 else []


def _in_yaml(value: Any) -> str:
    """A value as a recipe writes it, in one line."""
    if isinstance(value, Mapping):
        return "{...}"
    text: str = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


@dataclass(frozen=True)
class Compared:
    """One headline of several runs: each one's value, NaN where it has none, and the places of the best."""

    label: str
    values: list[float]
    best: list[int]


def compared(runs: Sequence[RunView]) -> list[Compared]:
    """The headlines of several runs beside each other; the best is marked where more, or less, is better."""
    if len(runs) == 1:
        return []
    rows = []
    for label in dict.fromkeys(headline.label for run in runs for headline in run.headlines):
        of_runs = [{each.label: each for each in run.headlines}.get(label) for run in runs]
        better = next(each.better for each in of_runs if each)
        known = [each.last for each in of_runs if each]
        top = (max(known) if better > 0 else min(known)) if better and len(set(known)) > 1 else None
        best = [index for index, each in enumerate(of_runs) if each and each.last == top]
        rows.append(Compared(label, [each.last if each else math.nan for each in of_runs], best))
    return rows


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


def _duration(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {left:02d} s"
