"""A game of guesses: the model answers the row's question until it is right, and hears whether that is more or less.

Named by rollout.multi_turn.environment; recipes/tiny_guess.yaml plays it. A wrong guess costs a tenth of a right one.
"""

from __future__ import annotations

import json
import re
from typing import Any

NUMBER = re.compile(r"-?\d+")


class Environment:
    """One game; its state is what the guesses so far have left open."""

    def reset(self, row: dict[str, Any]) -> None:
        """Add nothing: the row's prompt asks the question."""
        self.answer = int(row["ground_truth"])
        self.low, self.high = float("-inf"), float("inf")

    def step(self, action: str) -> tuple[str | None, float, bool]:
        """Return the last number of what the model has said is its guess."""
        guesses = [int(text) for text in NUMBER.findall(action) if len(text) < 20]
        if not guesses:
            return "a number", -0.1, False
        if guesses[-1] == self.answer:
            return None, 1.0, True
        if guesses[-1] < self.answer:
            self.low = max(self.low, guesses[-1])
        else:
            self.high = min(self.high, guesses[-1])
        return f"more than {self.low:g}, less than {self.high:g}", -0.1, False

    def state(self) -> bytes:
        """Return it for a killed run, which resumes from here."""
        return json.dumps([self.low, self.high]).encode()

    def load(self, row: dict[str, Any], state: bytes) -> None:
        """Go on, in place of ``reset``, in that run."""
        self.reset(row)
        self.low, self.high = json.loads(state)
