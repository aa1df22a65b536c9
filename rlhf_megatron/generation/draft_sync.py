"""Weight synchronisation of the model that drafts: a layer of the policy's checkpoint, or a head beside it.

It has a plan of its own, whose sources are the layer and, where the engine has copies of them, the actor's embeddings
and output layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlhf_megatron.generation.replica import Replica
from rlhf_megatron.models.weight_map import Block
from rlhf_megatron.recipe import RLRecipe
from rlhf_megatron.regather.by_type import RegatherByType
from rlhf_megatron.regather.learned_rollout import learned_draft_blocks
from rlhf_megatron.regather.plan import plan_regather
from rlhf_megatron.regather.shard_specs import rollout_shards
from rlhf_megatron.roles.placed import JoinedWeights, PlacedRole
from rlhf_megatron.rollout.engine import RolloutEngine
from rlhf_megatron.rollout.engine_registry import speculative_config
from rlhf_megatron.runtime.run_context import RunContext
from rlhf_megatron.topology.exchange import from_rank, refused_by_all
from rlhf_megatron.topology.world import hosts_of_ranks


class DraftSync:
    """What brings the weights of the model that drafts into the engine; every call is collective over the world."""

    def __init__(self, context: RunContext[RLRecipe], replica: Replica, actor: PlacedRole, draft: PlacedRole) -> None:
        """Learn how vLLM lays the model out, before there is an engine."""
        self._context, self._replica, self._actor, self._draft = context, replica, actor, draft
        recipe, layout = context.recipe, context.recipe.rollout.layout
        assert recipe.rollout.speculative is not None
        self._learned = learned_draft_blocks(
            draft.architecture,
            recipe.model.path,
            replica.ranks,
            layout.tensor,
            layout.expert_parallel,
            recipe.rollout.dtype or recipe.model.dtype,
            speculative_config(recipe.rollout.speculative),
        )

    def prepare(self, engine: RolloutEngine | None) -> None:
        """Plan the transfer to ``engine``, which may share some parameters with the policy."""
        context, recipe, section = self._context, self._context.recipe, self._context.recipe.rollout
        own = sorted(engine.draft_parameters()) if engine else []
        written = set(from_rank(own, self._replica.ranks[0]))
        learned = [[block for block in blocks if block.parameter in written] for blocks in self._learned]
        with refused_by_all():
            self._check(learned, own)
        tensors = {block.tensor for blocks in learned for block in blocks}
        self._weights = JoinedWeights([self._actor.weights, self._draft.weights], tensors)
        wanted = rollout_shards(self._draft.architecture, section.layout.tensor, self._replica.ranks, learned=learned)
        plan = plan_regather(self._weights.shard_spec(), wanted, context.rank, hosts_of_ranks())
        self._regather = RegatherByType(
            plan,
            tensors,
            getattr(torch, section.dtype or recipe.model.dtype),
            context.device,
            staging_bytes=recipe.regather.buffer_mb << 20,
            source_dtype=getattr(torch, recipe.model.dtype),
        )

    def _check(self, learned: Sequence[Sequence[Block]], own: Sequence[str]) -> None:
        if not own:
            return
        blocks = learned[self._replica.ranks.index(self._context.rank) % len(learned)]
        odd = {block.parameter for block in blocks} ^ set(own)
        if odd:
            raise RuntimeError(f"the learned map of the model that drafts lacks vLLM's parameter {min(odd)}")

    def run(self, engine: RolloutEngine | None) -> None:
        """Write the weights."""
        sources: dict[str, Any] = self._weights.parameters()
        self._regather.run(sources, engine.draft_parameters() if engine else {})
        self._draft.offload()
