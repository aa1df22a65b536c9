"""Recipes of the loops that learn given responses: supervised fine-tuning and reward modeling."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ClassVar, Literal

from rlhf_megatron.recipe.algorithm import TokenAggregationSection
from rlhf_megatron.recipe.recipe import Recipe


class SFTRecipe(Recipe):
    """A run of supervised fine-tuning."""

    loop: Literal["sft"]
    """Supervised fine-tuning."""
    algorithm: TokenAggregationSection = TokenAggregationSection()
    """The objective."""

    evaluation_metrics: ClassVar[tuple[str, ...]] = ("eval/loss",)

    def _checks(self) -> list[Callable[[], None]]:
        """See Recipe."""
        return [*super()._checks(), self._check_no_shared_prompts]


class RewardModelingRecipe(Recipe):
    """A run that trains a reward model on pairs of responses."""

    loop: Literal["reward_modeling"]
    """A reward model from pairs of responses."""

    evaluation_metrics: ClassVar[tuple[str, ...]] = ("eval/accuracy", "eval/margin", "eval/loss")

    def _checks(self) -> list[Callable[[], None]]:
        """See Recipe."""
        unread = [functools.partial(self._check_reads, key) for key in ("response_column", "learned_turns")]
        return [*super()._checks(), *unread, self._check_no_shared_prompts, self._check_head]

    def _check_head(self) -> None:
        """Refuse a head that would not learn."""
        if self.actor.lora is not None:
            raise ValueError("actor.lora: a reward model's head has to learn too, and adapters have none; leave it out")

    @property
    def rows_per_response(self) -> int:
        """See Recipe: a pair has two."""
        return 2

    @property
    def longest_sequence(self) -> int:
        """See Recipe; data.max_response_length limits the whole conversation here."""
        return self.data.max_response_length or super().longest_sequence
