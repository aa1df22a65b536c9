"""A task of reasoning-gym in several turns: its scorer says whether an answer is right, and the model tries again.

Named by rollout.multi_turn.environment; rows are those of ``tools/prepare_data.py reasoning-gym``, of any task.
recipes/tiny_reasoning_gym.yaml trains on it.
"""

from __future__ import annotations

from typing import Any

from rlhf_megatron.rewards import reasoning_gym

reasoning_gym.load()  # says what to install where the package is missing

FIRST, LATER = 1.0, 0.5  # what a right answer pays


class Environment:
    """One row; its state is the number of answers so far."""

    def reset(self, row: dict[str, Any]) -> None:
        """Add nothing: the row's prompt asks the question."""
        self.row, self.answers = row, 0

    def step(self, action: str) -> tuple[str | None, float, bool]:
        """Pay for full marks alone; see ``reasoning_gym.score``."""
        self.answers += 1
        truth, info = self.row["ground_truth"], self.row["extra_info"]
        if reasoning_gym.score(self.row["data_source"], action, truth, info) == 1.0:
            return None, FIRST if self.answers == 1 else LATER, True
        return "No. Try again.", 0.0, False

    def state(self) -> bytes:
        """Return it for a killed run, which resumes from here."""
        return str(self.answers).encode()

    def load(self, row: dict[str, Any], state: bytes) -> None:
        """Go on, in place of ``reset``, in that run."""
        self.row, self.answers = row, int(state)
