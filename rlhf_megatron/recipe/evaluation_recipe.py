"""What an evaluation of a model by itself reads, of a recipe of any loop."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from rlhf_megatron.recipe.rl import RolloutRecipe


class EvaluationRecipe(RolloutRecipe):
    """A recipe of any loop with a rollout."""

    @model_validator(mode="before")
    @classmethod
    def _responses_are_generated(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("rollout") is None:
            raise ValueError("rollout: an evaluation needs this section, at least rollout.max_response_length")
        return values
