"""Extensions of verl that ``peer_verl.py`` needs, by verl's own means: an agent loop and a replay buffer."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import (  # type: ignore[import-not-found,unused-ignore]
    SingleTurnAgentLoop,
)
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer  # type: ignore[import-not-found,unused-ignore]


class LengthsOfData(SingleTurnAgentLoop):  # type: ignore[misc,unused-ignore]
    """verl's own single turn, with the length of each response from the column ``response_lengths`` ("12,80,...")."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Sample one response, of as many tokens as its place among the prompt's responses has."""
        lengths = [int(each) for each in str(kwargs["response_lengths"]).split(",")]
        length = lengths[int(kwargs.get("session_id", 0)) % len(lengths)]
        return await super().run(sampling_params | {"max_tokens": length, "ignore_eos": True}, **kwargs)


class EagerReplayBuffer(ReplayBuffer):  # type: ignore[misc,unused-ignore]
    """Replay buffer of verl that looks for a whole batch every 20 ms; verl 0.9.1 does so every 2 s, and so waits for a
    second on average after a step's last response."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, poll_interval=0.02)
