"""A game of textarena for one player, as the package has it: its messages are observations, its reward ends the game.

Named by rollout.multi_turn.environment; rows are those of ``tools/prepare_data.py episodes --environment
textarena/GAME``. recipes/tiny_textarena.yaml trains on it.
"""

from __future__ import annotations

import json
from typing import Any

try:
    import textarena
except ImportError as error:
    raise ImportError(f"{error}; games need the package: pip install textarena==0.7.4") from error


class Environment:
    """One game. What was done so far is its state: the row's seed decides everything else."""

    def reset(self, row: dict[str, Any]) -> str:
        """Return the rules and what the player sees first."""
        name, episode = row["data_source"].removeprefix("textarena/"), row["extra_info"]
        # Without wrappers that repeat the conversation; with the one that puts an action without brackets into some.
        game = textarena.make(f"{name}-raw", **json.loads(episode["settings"]))
        self.game = textarena.wrappers.ActionFormattingWrapper(game)
        self.game.reset(num_players=1, seed=episode["seed"])
        self.actions: list[str] = []
        return self._observation()

    def step(self, action: str) -> tuple[str | None, float, bool]:
        """Return the game's answer to what follows thoughts; it pays at its end alone."""
        self.actions.append(action)
        done, _ = self.game.step(action.rpartition("</think>")[2].strip())
        if not done:
            return self._observation(), 0.0, False
        rewards, _ = self.game.close()
        # ThreeCardMonte of textarena 0.7.4 exchanges reward and reason where an invalid move ends it.
        return None, rewards[0] if isinstance(rewards[0], (int, float)) else 0.0, True

    def _observation(self) -> str:
        """Return messages of the game since the last action, without that action."""
        _, messages = self.game.get_observation()
        return "\n".join(text for _, text, kind in messages if kind != textarena.ObservationType.PLAYER_ACTION)

    def state(self) -> bytes:
        """Return it for a killed run, which resumes from here."""
        return json.dumps(self.actions).encode()

    def load(self, row: dict[str, Any], state: bytes) -> None:
        """Go on, in place of ``reset``, in that run."""
        self.reset(row)
        for action in json.loads(state):
            self.step(action)
            self._observation()
