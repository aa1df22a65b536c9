"""One run as the page shows it. No reading of files here (page.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlhf_megatron.monitor.panels import RL_PANELS, Series

_FLOORS = {panel.metric: panel.floor for panel in RL_PANELS if panel.metric in ("train/kl", "train/mismatch_kl")}

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

    @property
    def floor(self) -> float:
        """Changes below it are no signal."""
        return _FLOORS.get(self.metric, 0.0)

    @property
    def is_speed(self) -> bool:
        """True where steps are repetitions of one measurement."""
        return self.first is None

    @property
    def same_questions(self) -> bool:
        """True where first and last are of the same questions, so that one can be better than the other."""
        return self.metric.startswith("eval/")


@dataclass
class RunView:
    """One run on the page."""

    label: str
    state: str
    level: str
    health: str
    findings: list[str]
    step: int
    steps: int
    written: float
    left: str
    series: Series
    facts: list[tuple[str, str]]
    headlines: list[Headline]
    phases: list[tuple[str, float, float]]
    network: list[tuple[str, list[str]]]
    evaluations: tuple[list[str], list[tuple[int, list[str]]]]
    events: list[dict[str, Any]]
    curves: list[Curve]
    recipes: list[tuple[str, dict[str, Any]]]
    recipe_text: str
    environment_text: str
    samples: list[dict[str, Any]] = field(default_factory=list)
    samples_step: int | None = None

    @property
    def recipe(self) -> dict[str, Any]:
        """The newest of its recipes."""
        return self.recipes[-1][1]
