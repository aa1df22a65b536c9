"""The agent loop that ``peer_verl.py`` gives to verl: a single turn, each response as long as the data say."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import (  # type: ignore[import-not-found,unused-ignore]
    SingleTurnAgentLoop,
)


class LengthsOfData(SingleTurnAgentLoop):  # type: ignore[misc,unused-ignore]
    """verl's own single turn, with the length of each response from the column ``response_lengths`` ("12,80,...")."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Sample one response, of as many tokens as its place among the prompt's responses has."""
        lengths = [int(each) for each in str(kwargs["response_lengths"]).split(",")]
        length = lengths[int(kwargs.get("session_id", 0)) % len(lengths)]
        return await super().run(sampling_params | {"max_tokens": length, "ignore_eos": True}, **kwargs)
