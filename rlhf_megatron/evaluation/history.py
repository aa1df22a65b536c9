"""History of a run's evaluations: the first and the last are shown at its end, also after a resume."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, TypeAdapter

_VALUES = TypeAdapter(dict[Annotated[str, Field(pattern="^[0-9]{1,15}$")], float])


class History:
    """One number per evaluation, such as the mean held-out accuracy."""

    def __init__(self) -> None:
        """Begin with nothing evaluated."""
        self._values: dict[int, float] = {}

    def add(self, step: int, value: float) -> None:
        """Add the evaluation after ``step``."""
        self._values[step] = value

    def summary(self) -> dict[str, float]:
        """Return ``first`` and ``last``; empty where nothing has been evaluated."""
        ordered = [self._values[step] for step in sorted(self._values)]
        return {"first": ordered[0], "last": ordered[-1]} if ordered else {}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"values": {str(step): value for step, value in self._values.items()}}

    def load(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        self._values = {int(step): value for step, value in _VALUES.validate_python(state["values"]).items()}
