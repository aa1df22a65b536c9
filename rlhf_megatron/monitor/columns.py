"""Columns of the console for each loop: the metric, its heading and its number format. No drawing here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Column:
    """One column: ``read`` gives the number of a step or None, ``write`` its text of at most ``width`` characters.

    Where a terminal is too narrow, those that are not ``essential`` go first and together, then the last ones.
    """

    heading: str
    width: int
    read: Callable[[Metrics], float | None]
    write: Callable[[float], str]
    style: str = ""
    essential: bool = True
    otherwise: Column | None = None

    def text(self, metrics: Metrics) -> str:
        """Return the cell of a step, and ``nan`` or ``inf`` in words; where the step lacks the metric, that of the
        column ``otherwise``, or ""."""
        value = self.read(metrics)
        if value is None:
            return self.otherwise.text(metrics) if self.otherwise else ""
        return self.write(value) if math.isfinite(value) else str(float(value))


def metric(*names: str) -> Callable[[Metrics], float | None]:
    """Return a reader of the first of ``names`` that a step has."""

    def read(metrics: Metrics) -> float | None:
        return next((metrics[name] for name in names if name in metrics), None)

    return read


def mean_over_sources(name: str) -> Callable[[Metrics], float | None]:
    """Return a reader of the mean of eval/SOURCE/``name`` over the sources, each counting once."""

    def read(metrics: Metrics) -> float | None:
        values = [value for key, value in metrics.items() if key.startswith("eval/") and key.endswith(f"/{name}")]
        return fmean(values) if values else None

    return read


def step_seconds(metrics: Metrics) -> float | None:
    """Return the seconds of the whole step: train/step_time_ms, or else the sum of time/*."""
    if "train/step_time_ms" in metrics:
        return metrics["train/step_time_ms"] / 1000
    phases = [value for name, value in metrics.items() if name.startswith("time/")]
    return sum(phases) if phases else None


def short(value: float) -> str:
    """Write a count in at most six characters: 87.3, 1,234, 45.6k, 1.23M."""
    size = abs(value)
    if size < 1e4:
        return f"{value:.1f}" if size < 100 else f"{value:,.0f}"
    divisor, ending = (1e3, "k") if size < 1e6 else (1e6, "M") if size < 1e9 else (1e9, "G")
    scaled = value / divisor
    return f"{scaled:.3g}{ending}" if abs(scaled) < 999.5 else f"{scaled:.0f}{ending}"


def small(value: float) -> str:
    """Write a quantity that spans magnitudes in at most eight characters: 0, 0.0123, 4.6e-05, 12.3."""
    if value == 0:
        return "0"
    return f"{value:.1e}" if abs(value) < 1e-3 or abs(value) >= 1e4 else f"{value:.3g}"


def fixed(digits: int) -> Callable[[float], str]:
    """Return a writer with that many digits behind the point."""
    return lambda value: f"{value:.{digits}f}"


def scientific(value: float) -> str:
    """Write a number as 1.25e-05."""
    return f"{value:.2e}"


def percent(value: float) -> str:
    """Write a fraction as 61.3%."""
    return f"{100 * value:.1f}%"


def seconds(value: float) -> str:
    """Write seconds with the digits that matter: 0.031, 4.52, 61.3, 1,234."""
    if value < 10:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


_TIME_STYLE = "dim"
PHASES = ("generate", "score", "logprobs", "update", "regather")
# Of ranks that generate ahead; the last only runs with such ranks have.
GENERATING = ("generate", "score", "wait_for_update")

# A run whose rewards are a reward model's alone has no right and wrong.
_EVALUATION_SCORE = Column("eval", 6, mean_over_sources("score"), fixed(3))

RL_COLUMNS = (
    Column("reward", 7, metric("reward/mean"), fixed(3), "bold green"),
    Column("eval", 6, mean_over_sources("accuracy"), percent, "bold cyan", otherwise=_EVALUATION_SCORE),
    Column("length", 6, metric("rollout/response_length_mean"), short),
    Column("entropy", 7, metric("train/entropy"), fixed(3)),
    Column("KL", 7, metric("train/kl"), small),
    Column("mismatch", 8, metric("train/mismatch_kl"), small, "magenta"),
    Column("tokens/s", 8, metric("rollout/throughput_tokens_per_sec"), short, "yellow"),
    Column("step s", 6, step_seconds, seconds, _TIME_STYLE),
    *(Column(phase, 8, metric(f"time/{phase}"), seconds, _TIME_STYLE, essential=False) for phase in PHASES),
)
SFT_COLUMNS = (
    Column("loss", 8, metric("train/loss"), fixed(4), "bold green"),
    Column("held out", 8, metric("eval/loss"), fixed(4), "bold cyan"),
    Column("grad norm", 9, metric("train/grad_norm"), small),
    Column("lr", 8, metric("train/learning_rate"), scientific),
    Column("tokens/s", 8, metric("perf/tokens_per_sec", "perf/tokens_per_gpu_per_sec"), short, "yellow"),
    Column("step s", 6, step_seconds, seconds, _TIME_STYLE),
)
PAIR_COLUMNS = (
    SFT_COLUMNS[0],
    Column("right", 6, metric("train/accuracy"), percent, "green"),
    Column("held out", 8, metric("eval/accuracy"), percent, "bold cyan"),
    Column("margin", 7, metric("train/margin"), small),
    *SFT_COLUMNS[2:],
)
COLUMNS = {"rl": RL_COLUMNS, "sft": SFT_COLUMNS, "reward_modeling": PAIR_COLUMNS}
# The curve under the table: what a user looks at first.
HEADLINE = {"rl": metric("reward/mean"), "sft": metric("train/loss"), "reward_modeling": metric("train/loss")}
HEADLINE_NAME = {"rl": "reward", "sft": "loss", "reward_modeling": "loss"}
