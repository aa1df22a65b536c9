"""Roles as a recipe describes them: each on its ranks in its own layout, with its weights read."""

from __future__ import annotations

import contextlib

import torch

from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.data.tokenizer_loading import load_tokenizer
from rlhf_megatron.models.architecture import Architecture, Head, prediction_layer, read_architecture
from rlhf_megatron.models.draft_heads import draft_head
from rlhf_megatron.models.hf_files import CheckpointFiles
from rlhf_megatron.models.lora import Adaptation
from rlhf_megatron.models.peft_files import PeftAdapter
from rlhf_megatron.models.weight_source import RandomWeights, WeightSource
from rlhf_megatron.planning.feasibility import check_tokens, longest_row
from rlhf_megatron.recipe import OptimizerSection, Recipe, RewardModelSection, RLRecipe, RoleSection, role_ranks
from rlhf_megatron.roles.placed import PlacedRole
from rlhf_megatron.roles.reward_model import RewardModel
from rlhf_megatron.runtime.run_context import RunContext
from rlhf_megatron.topology.communicators import own_node
from rlhf_megatron.topology.role_layout import make_layout


class RoleBuilder:
    """Builder of the roles of one run. Every call is collective over the world.

    Attributes:
        built: all roles so far, in their order; what the recipe offloads of them leaves the GPU after every phase.
    """

    def __init__(self, context: RunContext[Recipe], architecture: Architecture) -> None:
        """Set up; ``architecture`` is that of model.path."""
        self._context, self._architecture = context, architecture
        self._node = own_node() if context.recipe.model.read_once else None  # later vLLM sets torchrun's variables
        self.built: list[PlacedRole] = []

    def build(
        self,
        name: str,
        section: RoleSection,
        optimizer: OptimizerSection | None = None,
        updates: int = 1,
        head: Head = "language",
    ) -> PlacedRole:
        """Build a role with the weights of its path or the recipe's; it is frozen without ``optimizer``.

        A scalar ``head`` is drawn from the recipe's seed where a role that learns starts from a language model.
        """
        context, recipe = self._context, self._context.recipe
        path = section.weights_folder or recipe.model.path
        read = self._read(section, head)
        architecture = read.for_rows(longest_row(recipe, read.max_positions))
        ranks = role_ranks(recipe, name, context.world_size)
        lora = section.adapters
        with context.phase(name), contextlib.ExitStack() as opened:
            start = PeftAdapter(lora.path, architecture, Adaptation.of(lora)) if lora and lora.path else None
            weights: WeightSource = RandomWeights(architecture, recipe.seed, torch.device(context.device))
            is_drawn = recipe.model.random_weights or (head == "draft" and section.weights_folder is None)
            if not is_drawn:  # a bad file that is there is refused before memory is taken
                files = CheckpointFiles(path, architecture, recipe.seed if optimizer else None)
                weights = opened.enter_context(files)
            role = PlacedRole(
                name,
                architecture,
                make_layout(section.layout or recipe.actor.layout, len(ranks)),
                ranks,
                section,
                dtype=recipe.dtype_of(section),
                seed=recipe.seed,
                temperature=recipe.temperature,
                optimizer=optimizer,
                training_steps=updates,
                deterministic=recipe.deterministic,
                shares_prompts=recipe.shares_prompts(section),
                replays_experts=name == "actor" and isinstance(recipe, RLRecipe) and recipe.algorithm.replays_experts,
                span=context.span,
                team=context.generators if name == "reward_model" else context.learners,
            )
            self.built.append(role)
            context.after_phase(role.offload)
            with context.span("weights"):
                if self._node and isinstance(weights, CheckpointFiles):
                    blocks = role.local.shard.blocks() if role.local else []
                    weights.read_once({block.tensor for block in blocks}, self._node)
                role.load(weights, start, weights.complete if isinstance(weights, CheckpointFiles) else None)
        return role

    def _read(self, section: RoleSection, head: Head) -> Architecture:
        """Return the architecture of a role; raises ModelError where its folder has none with this head."""
        own, model = section.weights_folder, self._context.recipe.model.path
        if head == "draft":
            return draft_head(self._architecture, own)
        architecture = self._architecture if own in (None, model) else read_architecture(own)
        return prediction_layer(architecture, model) if head == "prediction" else architecture.with_head(head)

    def build_reward_model(self, section: RewardModelSection, policy_tokenizer: Tokenizer) -> RewardModel:
        """Build the recipe's reward model, which scores what was written in ``policy_tokenizer``, the actor's."""
        trusts = self._context.recipe.model.trust_remote_code
        tokenizer = load_tokenizer(section.tokenizer or section.path, trusts, section.chat_template)
        role = self.build("reward_model", section, head="scalar")
        check_tokens(tokenizer, role.architecture, section.path)
        return RewardModel(role, tokenizer, policy_tokenizer, role.team.group)
