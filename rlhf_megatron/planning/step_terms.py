"""Expected time of a step by what it goes to, beside the phases of its engines: arithmetic alone.

What a rank's processor does for each row is from docs/results/scaling.json; what the network carries goes over the
slowest link that it takes (links.py), with nothing else on it.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.planning.generation_time import tail_seconds
from rlhf_megatron.planning.links import ring
from rlhf_megatron.planning.memory import estimate
from rlhf_megatron.planning.stage_memory import GB
from rlhf_megatron.planning.step_time import ExpectedTime, bubble_share
from rlhf_megatron.recipe import RLRecipe, rollout_ranks
from rlhf_megatron.recipe.world_checks import learners_of

# Seconds of a processor: of each prompt of the step, of each row of the step, and of each row and token of its own.
_OF_A_PROMPT, _OF_A_NUMBER, _OF_OWN_REQUEST, _OF_OWN_TOKEN = 5.5e-6, 7e-7, 1.7e-4, 3.5e-8
NUMBER_BYTES = 72  # of a row, as all ranks know it (data.row_numbers)
TOKEN_BYTES = 9  # of a token that goes to another rank: id, logprob, whether it was sampled


def step_terms(
    recipe: RLRecipe, architectures: Mapping[str, Architecture], world: int, time: ExpectedTime
) -> dict[str, float]:
    """Return seconds of a step on ``world`` GPUs by term, of the expected ``time`` and beside it.

    In ``time`` are the tail of the longest response, pipeline bubbles and gradients; not in it are requests, the
    numbers of all rows, the rows themselves and the weight sync.
    """
    return {
        "tail": tail_seconds(recipe, architectures, world),
        "bubbles": time.phases["update"] * bubble_share(recipe, world),
        "gradients": time.exchange,
        "requests": request_seconds(recipe, world),
        "numbers": number_seconds(recipe, world),
        "rows": row_seconds(recipe, world, time.tokens),
        "weights": weight_seconds(recipe, architectures, world),
    }


def request_seconds(recipe: RLRecipe, world: int) -> float:
    """Return those of a step's prompts, of which a rank knows the lengths of all, and of its own requests."""
    prompts = recipe.batch.prompts_per_step * recipe.rollout.groups_begun
    replicas = len(rollout_ranks(recipe, world)) // recipe.rollout.layout.tensor
    return prompts * _OF_A_PROMPT + prompts * recipe.batch.rows_per_prompt / replicas * _OF_OWN_REQUEST


def number_seconds(recipe: RLRecipe, world: int) -> float:
    """Return those of the numbers of all rows, which are summed over all ranks that generate: each has them twice."""
    rows = recipe.batch.prompts_per_step * recipe.batch.rows_per_prompt
    ranks = len(rollout_ranks(recipe, world))
    carried = 2 * NUMBER_BYTES * rows * (ranks - 1) / ranks
    return rows * _OF_A_NUMBER + carried / ring(recipe.cluster, ranks, 1)


def row_seconds(recipe: RLRecipe, world: int, tokens: float) -> float:
    """Return those of the rows that a rank gets, of ``tokens`` of all, from ranks that are most likely not its own."""
    generating, learning = len(rollout_ranks(recipe, world)), len(learners_of(recipe, world))
    own = tokens / min(generating, learning)
    elsewhere = 1 - 1 / max(generating, learning)
    return own * (_OF_OWN_TOKEN + TOKEN_BYTES * elsewhere / ring(recipe.cluster, world, 1))


def weight_seconds(recipe: RLRecipe, architectures: Mapping[str, Architecture], world: int) -> float:
    """Return those of the weights of a rollout rank that are not the actor's memory, all from other ranks; within a
    node where the actor's model is whole there."""
    rollout = estimate(recipe, architectures, world).rollout
    assert rollout is not None
    return (rollout.weights - rollout.shared) * GB / ring(recipe.cluster, recipe.actor.layout.model_gpus, 1)
