"""The recipe of an evaluation of a model by itself, read from a recipe of any loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rlhf_megatron.recipe.rollout_recipe import RolloutRecipe


class EvaluationRecipe(RolloutRecipe):
    """A recipe of any loop with a rollout."""

    needed: ClassVar[Mapping[str, str]] = {
        "rollout": "an evaluation needs this section, at least rollout.max_response_length"
    }
