"""Panels that a run is drawn by: their metrics, units and the least that an axis spans. No drawing here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Series = dict[str, tuple[list[int], list[float]]]

POINTS_THAT_NEED_SMOOTHING = 24


@dataclass(frozen=True)
class Panel:
    """One panel: metrics by name, or every eval/SOURCE/METRIC for a name that is "eval/*/METRIC".

    An axis spans at least ``floor``: less is noise, which would otherwise fill the panel like a signal.
    """

    title: str
    unit: str
    metric: str
    colour: str
    as_percent: bool = False
    may_be_logarithmic: bool = False
    smoothed: bool = True
    floor: float = 0.0


RL_PANELS = (
    Panel("Reward", "mean over responses", "reward/mean", "#059669", floor=0.05),
    Panel("Held-out accuracy", "share of answers that are right", "eval/*/accuracy", "#2563eb", as_percent=True,
          floor=0.05),
    Panel("Response length", "tokens, mean", "rollout/response_length_mean", "#ea580c", floor=2.0),
    Panel("Entropy", "nats per token", "train/entropy", "#9333ea", floor=0.05),
    Panel("KL to the reference", "nats per token", "train/kl", "#db2777", floor=1e-3),
    Panel(
        "Mismatch", "KL of trainer against rollout, nats per token", "train/mismatch_kl", "#0891b2",
        may_be_logarithmic=True, floor=1e-4,
    ),
)  # fmt: skip
ACCURACY = RL_PANELS[1]
# Where the rewards are a reward model's alone, there is no right and wrong.
SCORE = Panel("Held-out score", "mean over responses", "eval/*/score", "#2563eb", floor=0.05)
SFT_PANELS = (
    Panel("Loss", "nats per token", "train/loss", "#059669", floor=0.01),
    Panel("Held-out loss", "nats per token", "eval/loss", "#2563eb", floor=0.01),
    Panel("Gradient norm", "before clipping", "train/grad_norm", "#ea580c", may_be_logarithmic=True, floor=1e-3),
    Panel("Learning rate", "per step", "train/learning_rate", "#9333ea", smoothed=False),
    Panel("Throughput", "tokens per GPU and second", "perf/tokens_per_gpu_per_sec", "#ca8a04"),
)
PAIR_PANELS = (
    Panel("Loss", "nats per pair", "train/loss", "#059669", floor=0.01),
    Panel("Held-out loss", "nats per pair", "eval/loss", "#2563eb", floor=0.01),
    Panel("Accuracy", "share of pairs in the right order", "train/accuracy", "#9333ea", as_percent=True, floor=0.05),
    Panel(
        "Held-out accuracy",
        "share of pairs in the right order",
        "eval/accuracy",
        "#db2777",
        as_percent=True,
        floor=0.05,
    ),
    Panel("Margin", "score of the chosen minus the rejected, mean", "train/margin", "#0891b2", floor=0.05),
    Panel("Gradient norm", "before clipping", "train/grad_norm", "#ea580c", may_be_logarithmic=True, floor=1e-3),
)
MACHINE_PANELS = (
    Panel("Throughput", "tokens per GPU and second", "perf/tokens_per_gpu_per_sec", "#ca8a04"),
    Panel("Step", "milliseconds", "train/step_time_ms", "#475569", floor=10.0),
    Panel("MFU of training", "of the GPU's peak", "perf/mfu_training", "#9333ea", as_percent=True, floor=0.05),
    Panel("GPUs at work", "share of the time, mean", "perf/gpu_utilization", "#2563eb", as_percent=True, floor=0.1),
    Panel("Least busy GPU", "share of the time", "perf/gpu_utilization_lowest", "#0891b2", as_percent=True, floor=0.1),
    Panel("Power", "watts per GPU", "perf/gpu_power_watts", "#ea580c", floor=20.0),
    Panel("Hottest GPU", "degrees Celsius", "perf/gpu_temperature_highest", "#db2777", floor=10.0),
    Panel("GPU memory, rank 0", "GB", "memory/gpu_gb", "#059669", floor=1.0),
    Panel("Host memory, rank 0", "GB", "memory/host_gb", "#059669", floor=1.0),
)


def panels_for(series: Series) -> tuple[Panel, ...]:
    """Return the panels of a run with these metrics, by the kind of its loop."""
    if "reward/mean" in series:
        judged = bool(curves_of(ACCURACY, series))
        return tuple(SCORE if panel is ACCURACY and not judged else panel for panel in RL_PANELS)
    return PAIR_PANELS if "train/margin" in series else SFT_PANELS


def curves_of(panel: Panel, series: Series) -> Series:
    """Return label -> (steps, values) with the finite values only; curves that have none are left out."""
    prefix, _, suffix = panel.metric.partition("*")
    chosen = {
        (name[len(prefix) : len(name) - len(suffix)] if suffix else ""): points
        for name, points in series.items()
        if (name.startswith(prefix) and name.endswith(suffix) if suffix else name == panel.metric)
    }
    finite = {}
    for label, (steps, values) in chosen.items():
        kept = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
        if kept:
            finite[label] = ([step for step, _ in kept], [value for _, value in kept])
    return finite


def is_logarithmic(panel: Panel, values: Sequence[float]) -> bool:
    """Return whether a panel's axis is logarithmic: where it may be, and what is above its floor needs it."""
    return panel.may_be_logarithmic and min(values) > 0 and max(values) > 100 * max(min(values), panel.floor)


def axis_bounds(values: Sequence[float], floor: float) -> tuple[float, float]:
    """Return (low, high) of an axis around values, at least ``floor`` apart and from 0 where that is near."""
    low, high = min(values), max(values)
    if high - low >= floor and high > low:
        margin = 0.05 * (high - low)
        return low - margin, high + margin
    span = floor or abs(high) or 1.0
    if low >= 0 and high <= span:
        return 0.0, span
    middle = (low + high) / 2
    return middle - span / 2, middle + span / 2


def smooth(values: list[float]) -> list[float]:
    """Return a centred mean over about a fifteenth of the run; at the ends over the part of the window that exists."""
    half = max(1, len(values) // 30)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    starts = np.maximum(np.arange(len(values)) - half, 0)
    ends = np.minimum(np.arange(len(values)) + half + 1, len(values))
    return [float(mean) for mean in (sums[ends] - sums[starts]) / (ends - starts)]
