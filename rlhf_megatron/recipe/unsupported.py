"""What a recipe can ask for and this version cannot do. An entry goes when its feature comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rlhf_megatron.recipe.recipe import Recipe
from rlhf_megatron.recipe.reward import RewardSection


class Limit(NamedTuple):
    """One thing that cannot be done yet."""

    key: str
    asked: Callable[[Recipe], bool]
    advice: str


# launch/evaluate.py takes recipes of all loops.
_FOR_EVALUATIONS = "leave it out, or give it to launch/evaluate.py as an override"

_SUPERVISED: tuple[Limit, ...] = (
    Limit("rollout", lambda r: r.rollout is not None, f"this loop generates nothing; {_FOR_EVALUATIONS}"),
    Limit("reward", lambda r: r.reward != RewardSection(), f"this loop has no rewards; {_FOR_EVALUATIONS}"),
    Limit(
        "algorithm.loss_aggregation",
        lambda r: r.algorithm.loss_aggregation == "sequence_sum_constant",
        "this loop has no longest response; use sequence_mean_token_sum, which differs by a constant factor",
    ),
    Limit(
        "batch.minibatch_prompts",
        lambda r: r.batch.minibatches_per_step > 1,
        "this loop takes one optimizer step per step; lower batch.prompts_per_step instead",
    ),
    Limit("batch.epochs_per_step", lambda r: r.batch.epochs_per_step > 1, "this loop goes on through the data; use 1"),
)


def unsupported(recipe: Recipe) -> list[str]:
    """One line for each key that asks for what this version cannot do: "key: why; what to do"."""
    limits = () if recipe.loop == "rl" else _SUPERVISED
    return [f"{limit.key}: {limit.advice}" for limit in limits if limit.asked(recipe)]
