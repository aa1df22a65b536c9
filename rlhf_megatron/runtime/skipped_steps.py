"""Steps skipped for their gradient: how many in a row, and the end of an attempt that has too many of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlhf_megatron.errors import UserError

_METRICS = ("train/skipped", "critic/skipped")


class TooManySkippedSteps(UserError):
    """The attempt is to end; ``details`` tell the next one which steps' data it passes over."""

    is_transient = True

    def __init__(self, first: int, last: int, position: dict[str, Any]) -> None:
        steps = f"steps {first}-{last} were skipped" if last > first else f"step {first} was skipped"
        super().__init__(f"{steps} for their gradients (retry.max_skipped_steps={last - first + 1})")
        self.details = {"kind": "not_finite", "first": first, "last": last, "data": position}


class SkippedSteps:
    """Count of skipped steps; a step counts where the actor or the critic took no optimizer step at all."""

    def __init__(self, most: int) -> None:
        """Set up; ``most``: retry.max_skipped_steps."""
        self._most = most
        self._first: int | None = None

    @property
    def are_going_on(self) -> bool:
        """True if the last step was skipped. What would be saved then is no state to roll back to."""
        return self._first is not None

    def after(self, step: int, metrics: Mapping[str, float], position: Callable[[], dict[str, Any]]) -> None:
        """Count a step. ``position`` says where the data stand after it; metrics are the same on every rank.

        Raises TooManySkippedSteps, on all ranks.
        """
        if not any(metrics.get(name) == 1.0 for name in _METRICS):
            self._first = None
            return
        if self._first is None:
            self._first = step
        if self._most and step - self._first + 1 >= self._most:
            raise TooManySkippedSteps(self._first, step, position())
