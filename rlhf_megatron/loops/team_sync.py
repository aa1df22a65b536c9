"""The two teams of a run, learners and generators, and where they synchronise.

With rollout.steps_ahead some ranks only generate; without it both teams are the whole world, and nothing is exchanged.
"""

from __future__ import annotations

import torch.distributed as dist

from rlhf_megatron.recipe import Recipe, RLRecipe, rollout_ranks
from rlhf_megatron.recipe.world_checks import learners_of
from rlhf_megatron.runtime.run_context import RunContext
from rlhf_megatron.topology.exchange import from_rank
from rlhf_megatron.topology.team import Team, make_team, whole_world
from rlhf_megatron.topology.world import waiting_minutes


def make_teams(recipe: Recipe) -> tuple[Team, Team]:
    """Return (the ranks that learn, the ranks that generate); collective over the world."""
    if not (isinstance(recipe, RLRecipe) and recipe.rollout_is_ahead):
        world = whole_world()
        return world, world
    world_size, minutes = dist.get_world_size(), waiting_minutes(recipe.retry.hang_seconds)
    learners = make_team(learners_of(recipe, world_size), minutes)
    return learners, make_team(rollout_ranks(recipe, world_size), minutes)


def sync_teams(context: RunContext[Recipe], train_metrics: dict[str, float]) -> dict[str, float]:
    """Return the learners' ``train_metrics`` on every rank, when all ranks are done with the step's work.

    Where there are two teams, each gets the times of the other's phases; collective over the world.
    """
    learners, generators, phases = context.learners, context.generators, context.phases
    if learners.group is None:
        return train_metrics
    with context.waiting():
        dist.barrier()
    for team in (learners, generators):
        phases.add_missing(from_rank(phases.times(), team.first))
    return from_rank(train_metrics, learners.first)
