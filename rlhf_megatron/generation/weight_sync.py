"""Weight synchronisation from trainer to rollout by resharding: after each update the engine has the actor's weights.

Where both layouts give a rank the same numbers, vLLM's parameters are views of Megatron's; the rest is regathered.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.generation.draft_sync import DraftSync
from rlhf_megatron.generation.replica import Replica
from rlhf_megatron.models.architecture import Architecture, check_generates, wrapped_language
from rlhf_megatron.models.weight_map import tensor_shapes
from rlhf_megatron.recipe import RLRecipe, give_way
from rlhf_megatron.regather.by_type import RegatherByType
from rlhf_megatron.regather.learned_rollout import check_engine, learned_rollout_blocks
from rlhf_megatron.regather.peer_memory import describe_transfer, map_peers
from rlhf_megatron.regather.plan import RankPlan, plan_regather
from rlhf_megatron.regather.shard_specs import rollout_shards
from rlhf_megatron.regather.views import describe_sharing, shareable
from rlhf_megatron.roles.placed import PlacedRole
from rlhf_megatron.rollout.engine import RolloutEngine
from rlhf_megatron.rollout.engine_registry import make_engine
from rlhf_megatron.runtime.run_context import RunContext
from rlhf_megatron.topology.team import world_of_their_own
from rlhf_megatron.topology.world import hosts_of_ranks


class WeightSync:
    """The rollout engine of this rank, and what brings the actor's weights into it.

    Attributes:
        engine: this rank's share of its replica; None where it generates nothing.
        regather: carries out the transfer.
        version: of the weights in the engine, which each ``refresh`` raises by one.
    """

    def __init__(
        self,
        context: RunContext[RLRecipe],
        replica: Replica,
        actor: PlacedRole,
        architecture: Architecture,
        draft: PlacedRole | None = None,
    ) -> None:
        """Build the engine on the ranks of ``replica``, where ``draft`` drafts; collective over the world."""
        recipe = context.recipe
        self._context, self._actor, self.version = context, actor, 0
        layout = recipe.rollout.layout
        check_generates(architecture, recipe.model.path)
        with context.phase("weight_map"):
            learned = learned_rollout_blocks(
                architecture,
                recipe.model.path,
                replica.ranks,
                layout.tensor,
                layout.expert_parallel,
                recipe.rollout.dtype or recipe.model.dtype,
                recipe.run_root,
            )
            self._drafts = DraftSync(context, replica, actor, draft) if draft else None
        wanted = rollout_shards(architecture, layout.tensor, replica.ranks, layout.expert_parallel, learned)
        plan = plan_regather(actor.weights.shard_spec(), wanted, context.rank, hosts_of_ranks())
        why_copied = recipe.why_weights_are_copied
        parameters = {} if why_copied else actor.weights.parameters()
        shared = shareable(plan, parameters) if parameters else {}
        self.engine = build_engine(context, replica, shared, draft)
        if learned is not None:
            blocks = learned[replica.ranks.index(context.rank) % layout.tensor] if self.engine else None
            names = list(self.engine.parameters()) if self.engine else []
            check_engine(architecture, blocks, names, recipe.model.path)
        if self.engine:
            sharing = f"all are copies, since {why_copied}" if why_copied else None
            context.say(f"rollout weights: {sharing or describe_sharing(plan, parameters, self.engine.parameters())}")
        self._sleeps = give_way(recipe, replica.ranks, context.world_size)
        self.regather = self._make_regather(plan, architecture)
        if self._drafts:
            self._drafts.prepare(self.engine)

    def _make_regather(self, plan: RankPlan, architecture: Architecture) -> RegatherByType:
        """Return the transfer of ``plan``, by the way that the machine and the recipe allow; collective over the
        world."""
        context, recipe, section = self._context, self._context.recipe, self._context.recipe.rollout
        source_dtype = getattr(torch, recipe.model.dtype)
        dtype = getattr(torch, section.dtype or recipe.model.dtype)
        # What leaves the GPU comes back elsewhere, and numbers that are to be cast travel better when they have been.
        stays = dtype == source_dtype and not recipe.actor.offload.parameters
        self._peers = (
            map_peers(plan, self._actor.weights.parameters()) if recipe.regather.peer_memory and stays else None
        )
        if plan.arriving:
            context.say(f"regathering: {describe_transfer(plan, self._peers, dtype)}")
        elif not self.engine:  # where rank 0 has one, that line is its own
            given = plan.bytes_sent(dtype.itemsize) / 1e9
            context.say(f"regathering: {given:.3g} GB go to the rollout's ranks {section.ranks}, from rank 0")
        return RegatherByType(
            plan,
            tensor_shapes(architecture),
            dtype,
            context.device,
            staging_bytes=recipe.regather.buffer_mb << 20,
            source_dtype=source_dtype,
            peers=self._peers,
        )

    def refresh(self) -> None:
        """Wake the engine and bring the actor's weights into it; collective over the world.

        Shared ones are there already: an optimizer step returns when its parameters are whole on every rank.
        """
        context = self._context
        if self.engine:
            with context.span("wake"):
                self.engine.wake_weights()
        sources, destinations = self._actor.weights.parameters(), self.engine.parameters() if self.engine else {}
        with context.span("transfer"):
            self.regather.run(sources, destinations)
            if self._drafts:
                self._drafts.run(self.engine)
        self.version += 1
        interval = context.recipe.regather.verify
        if interval and self.version % interval == 0:
            self.regather.verify(sources, destinations)
            if self._drafts:
                self._drafts.verify(self.engine)
        self._actor.offload()
        if self.engine:
            with context.span("wake"):
                self.engine.wake_kv_cache()
            self.engine.weights_updated(self.version)

    def sleep(self) -> None:
        """Give the engine's memory to the roles that are on its GPUs, until ``refresh``."""
        if self.engine and self._sleeps:
            self.engine.sleep()

    def close(self) -> None:
        """End the engine, and the mapping of other ranks' memory."""
        if self.engine:
            self.engine.close()
        if self._peers:
            self._peers.close()


def build_engine(
    context: RunContext[RLRecipe], replica: Replica, shared: Mapping[str, Tensor], draft: PlacedRole | None
) -> RolloutEngine | None:
    """Build this rank's engine, whose ``shared`` parameters are the actor's memory, and for which ``draft`` drafts;
    collective over the world."""
    recipe, section, engine = context.recipe, context.recipe.rollout, None
    has_head = draft is not None and draft.architecture.head == "draft"
    with context.phase("engine"):
        # To vLLM a replica is the whole world: it makes groups for all ranks that it sees, most of them of one rank.
        with world_of_their_own(replica.own_ranks):
            if replica.index is not None:
                engine = make_engine(
                    recipe.model.path,
                    section,
                    recipe.model.dtype,
                    recipe.data.max_prompt_length,
                    recipe.seed,
                    shared=shared,
                    records_experts=recipe.algorithm.replays_experts,
                    language=wrapped_language(recipe.model.path),
                    draft_model=str(context.folder.draft_head) if has_head else None,
                )
        dist.barrier()  # engines compile at different speeds, and the wait for the slowest is the engines' time
    return engine
