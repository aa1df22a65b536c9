"""Weight synchronisation of the model that drafts: a layer of the policy's checkpoint, or a head beside it.

It has a plan of its own, whose sources are the layer and, where the engine has copies of them, the actor's embeddings
and output layer; or the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from rlhf_megatron.generation.replica import Replica
from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.draft_heads import write_head_config
from rlhf_megatron.models.draft_vocabulary import (
    OFFSETS_IN_VLLM,
    DraftVocabulary,
    read_draft_vocabulary,
    whole_vocabulary,
)
from rlhf_megatron.models.weight_map import Block, rollout_blocks
from rlhf_megatron.recipe import RLRecipe
from rlhf_megatron.regather.by_type import RegatherByType
from rlhf_megatron.regather.learned_rollout import learned_draft_blocks
from rlhf_megatron.regather.plan import plan_regather
from rlhf_megatron.regather.shard_specs import rollout_shards
from rlhf_megatron.roles.placed import JoinedWeights, PlacedRole
from rlhf_megatron.rollout.engine import RolloutEngine
from rlhf_megatron.rollout.engine_registry import speculative_config
from rlhf_megatron.runtime.run_context import RunContext
from rlhf_megatron.topology.exchange import by_rank, from_rank, refused_by_all
from rlhf_megatron.topology.world import hosts_of_ranks


def head_folder(context: RunContext[RLRecipe], draft: Architecture) -> Path | None:
    """Write the config.json of a head that drafts into the run's folder, for vLLM; return the folder, None of a layer
    of the policy's checkpoint. Collective over the world; raises OSError where the disk fails."""
    if draft.head != "draft":
        return None
    folder, section = context.folder.draft_head, context.recipe.rollout.speculative
    assert section is not None
    by_rank(0, lambda: write_head_config(folder, draft, section.path))
    return folder


def draft_vocabulary(recipe: RLRecipe, head: Architecture) -> DraftVocabulary:
    """Return the tokens that the recipe's head drafts; raises ModelError as ``read_draft_vocabulary``."""
    assert recipe.rollout.speculative is not None
    path = recipe.rollout.speculative.path
    return whole_vocabulary(head) if path is None else read_draft_vocabulary(path, head)


class DraftSync:
    """Weight sync of the model that drafts; every call is collective over the world."""

    def __init__(self, context: RunContext[RLRecipe], replica: Replica, actor: PlacedRole, draft: PlacedRole) -> None:
        """Find out how vLLM lays the model out, before there is an engine."""
        self._context, self._replica, self._draft = context, replica, draft
        recipe, layout, head = context.recipe, context.recipe.rollout.layout, draft.architecture
        assert recipe.rollout.speculative is not None
        self._offsets: Tensor | None = None
        if head.head == "draft":
            self._parts = [draft.weights]
            self._blocks = [rollout_blocks(head, layout.tensor, rank) for rank in range(layout.tensor)]
            self._offsets = draft_vocabulary(recipe, head).offsets
            return
        self._parts = [actor.weights, draft.weights]
        self._blocks = learned_draft_blocks(
            head,
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
        own = sorted(self._parameters(engine))
        written = set(from_rank(own, self._replica.ranks[0]))
        blocks = [[block for block in of_rank if block.parameter in written] for of_rank in self._blocks]
        with refused_by_all():
            self._check(blocks, own)
        tensors = {block.tensor for of_rank in blocks for block in of_rank}
        self._weights = JoinedWeights(self._parts, tensors)
        wanted = rollout_shards(self._draft.architecture, section.layout.tensor, self._replica.ranks, learned=blocks)
        plan = plan_regather(self._weights.shard_spec(), wanted, context.rank, hosts_of_ranks())
        self._regather = RegatherByType(
            plan,
            tensors,
            getattr(torch, section.dtype or recipe.model.dtype),
            context.device,
            staging_bytes=recipe.regather.buffer_mb << 20,
            source_dtype=getattr(torch, recipe.model.dtype),
        )

    def _parameters(self, engine: RolloutEngine | None) -> dict[str, Tensor]:
        """Return the parameters that are regathered, without the table of a reduced vocabulary."""
        parameters = engine.draft_parameters() if engine else {}
        return {name: parameter for name, parameter in parameters.items() if name != OFFSETS_IN_VLLM}

    def _check(self, blocks: Sequence[Sequence[Block]], own: Sequence[str]) -> None:
        if not own:
            return
        of_rank = blocks[self._replica.ranks.index(self._context.rank) % len(blocks)]
        odd = {block.parameter for block in of_rank} ^ set(own)
        if odd:
            raise RuntimeError(f"the weight map of the model that drafts lacks vLLM's parameter {min(odd)}")

    def run(self, engine: RolloutEngine | None) -> None:
        """Write the weights."""
        self._regather.run(self._weights.parameters(), self._parameters(engine))
        table = engine.draft_parameters().get(OFFSETS_IN_VLLM) if engine else None
        if table is not None and self._offsets is not None:
            table.copy_(self._offsets)
        self._draft.offload()

    def verify(self, engine: RolloutEngine | None) -> None:
        """Raise RegatherError on every rank where the engine's weights are not those of the roles."""
        self._regather.verify(self._weights.parameters(), self._parameters(engine))
        self._draft.offload()
