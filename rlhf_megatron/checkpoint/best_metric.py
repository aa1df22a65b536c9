"""The metric that checkpoint.keep_best compares checkpoints by, as the evaluations report it."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from statistics import fmean

from rlhf_megatron.recipe.operations import KeepBestSection


class BestMetric:
    """The metric's value by step, on rank 0, which has the metrics of evaluations."""

    def __init__(self, section: KeepBestSection | None) -> None:
        """Set up; without ``section`` no step has a value."""
        self._section = section
        self._values: dict[int, float] = {}

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the mean of those of a step's ``metrics`` that the section's pattern fits, if there are any."""
        section = self._section
        compared = [value for name, value in metrics.items() if section and fnmatchcase(name, section.metric)]
        if compared:
            self._values[step] = fmean(compared)

    def value(self, step: int) -> float | None:
        """Return the step's value; None where it was not evaluated."""
        return self._values.get(step)

    def missing(self, step: int) -> str | None:
        """Return the pattern that no metric of an evaluated ``step`` has fitted; None where one has."""
        return self._section.metric if self._section and step not in self._values else None
