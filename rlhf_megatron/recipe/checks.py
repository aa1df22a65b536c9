"""Checks that need more than the recipe: the world's size, and the model's config. What cannot be done yet at all is
the matter of ``unsupported``."""

from __future__ import annotations

from typing import Any

from rlhf_megatron.errors import RecipeError
from rlhf_megatron.recipe.model_shape import experts_of, role_config, size
from rlhf_megatron.recipe.placement import ranks_of
from rlhf_megatron.recipe.recipe import Recipe
from rlhf_megatron.recipe.roles import LayoutSection, RoleSection
from rlhf_megatron.recipe.rollout import RolloutLayoutSection

_EXPERT_COLUMNS = "columns of an expert (moe_intermediate_size)"


def roles_of(recipe: Recipe) -> dict[str, RoleSection]:
    """The roles that the recipe has sections for, by name."""
    named = {name: getattr(recipe, name) for name in ("actor", "reference", "critic", "reward_model")}
    return {name: section for name, section in named.items() if section is not None}


def is_made(recipe: Recipe, name: str) -> bool:
    """Whether the run makes the role of this name, which has a section."""
    if name == "reference":
        return recipe.loop == "rl" and recipe.algorithm.kl_coef != 0.0
    return name == "actor" or recipe.loop == "rl"


def roles_made(recipe: Recipe) -> dict[str, RoleSection]:
    """Those of ``roles_of`` that the run makes."""
    return {name: section for name, section in roles_of(recipe).items() if is_made(recipe, name)}


def layout_of(recipe: Recipe, section: RoleSection) -> LayoutSection:
    """The role's own layout, or the actor's."""
    return section.layout or recipe.actor.layout


def role_ranks(recipe: Recipe, name: str, world_size: int) -> list[int]:
    """The rising global ranks of the role of this name, or of "rollout"; raises RecipeError where it names others."""
    section = recipe.rollout if name == "rollout" else roles_of(recipe)[name]
    assert section is not None
    return ranks_of(f"{name}.ranks", section.ranks, world_size, recipe.cluster.gpus_per_node)


def stage_layers(layout: LayoutSection, layers: int) -> list[int]:
    """How many of ``layers`` decoder layers each pipeline stage holds, from the first to the last.

    Raises RecipeError where the layers between the given edge stages do not divide evenly.
    """
    edge = {0: layout.first_stage_layers, layout.pipeline - 1: layout.last_stage_layers}
    given = {stage: count for stage, count in edge.items() if count is not None}
    left, stages = layers - sum(given.values()), layout.pipeline - len(given)
    # Every stage has a layer: an empty one would only pass activations on.
    if (stages and (left % stages or left < stages)) or (not stages and left):
        besides = f" with first {layout.first_stage_layers} and last {layout.last_stage_layers} given" if given else ""
        raise RecipeError(
            f"layout.pipeline={layout.pipeline}: {layers} layers do not divide over {layout.pipeline} stages{besides}; "
            "set first_stage_layers and last_stage_layers so that the stages between are equal"
        )
    counts = [given.get(stage, left // stages if stages else 0) for stage in range(layout.pipeline)]
    if layout.virtual_pipeline and any(count % layout.virtual_pipeline for count in counts):
        raise RecipeError(
            f"layout.virtual_pipeline={layout.virtual_pipeline} does not divide the layers of every pipeline stage, "
            f"{', '.join(map(str, counts))}; use a divisor"
        )
    return counts


def check_world(recipe: Recipe, world_size: int) -> None:
    """Raises RecipeError where a layout does not fit on ``world_size`` GPUs."""
    for name, section in roles_of(recipe).items():
        layout = layout_of(recipe, section)
        parts = {"tensor": layout.tensor, "pipeline": layout.pipeline, "context": layout.context, "data": layout.data}
        ranks = len(role_ranks(recipe, name, world_size))
        _check_fill(f"{name}.layout", parts, ranks)
        stage = ranks // layout.pipeline
        if stage % layout.expert_gpus:
            raise RecipeError(
                f"{name}.layout: expert {layout.expert} x expert_tensor {layout.expert_gpus // layout.expert} does not "
                f"divide the {stage} GPUs of a pipeline stage; change one"
            )
    if recipe.loop == "rl" and recipe.rollout is not None:
        rollout: RolloutLayoutSection = recipe.rollout.layout
        generating = role_ranks(recipe, "rollout", world_size)
        _check_fill("rollout.layout", {"tensor": rollout.tensor, "data": rollout.data}, len(generating))
        if len(generating) < world_size or recipe.rollout.steps_ahead:
            _check_teams(recipe, world_size, set(generating))
    profile = recipe.monitor.profile
    missing = next((rank for rank in profile.ranks if profile.steps and rank >= world_size), None)
    if missing is not None:
        raise RecipeError(f"monitor.profile.ranks: there is no rank {missing} of {world_size}")


def learners_of(recipe: Recipe, world_size: int) -> list[int]:
    """The rising ranks of the roles that learn, or that learning asks: all but the reward model."""
    roles = [name for name in roles_made(recipe) if name != "reward_model"]
    return sorted(set().union(*(role_ranks(recipe, name, world_size) for name in roles)))


def _check_teams(recipe: Recipe, world_size: int, generating: set[int]) -> None:
    """No GPU without work; and where rollout is ahead of learning, none that would have to do both at a time."""
    assert recipe.rollout is not None
    made = roles_made(recipe)
    placed = {name: set(role_ranks(recipe, name, world_size)) for name in made}
    idle = set(range(world_size)).difference(generating, *placed.values())
    if idle:
        raise RecipeError(
            f"rollout.ranks={recipe.rollout.ranks}: rank {min(idle)} has neither a role nor rollout; give it one, or "
            "run on fewer GPUs"
        )
    if not recipe.rollout.steps_ahead:
        return
    for name, ranks in placed.items():
        if name == "reward_model" and not ranks <= generating:
            raise RecipeError(
                f"{name}.ranks={made[name].ranks}: with rollout.steps_ahead=1 it judges while others "
                f"learn; name ranks of rollout.ranks={recipe.rollout.ranks}"
            )
        if name != "reward_model" and ranks & generating:
            raise RecipeError(
                f"{name}.ranks={made[name].ranks} has rank {min(ranks & generating)}, which generates "
                f"ahead (rollout.steps_ahead=1, rollout.ranks={recipe.rollout.ranks}); give each GPU to one of them"
            )


def _check_fill(where: str, parts: dict[str, int | None], world_size: int) -> None:
    """The given degrees must fill the world, or divide it where ``data`` is left to be what remains."""
    product = 1
    for degree in parts.values():
        product *= degree or 1
    shown = [f"{name} {degree}" for name, degree in parts.items() if degree not in (None, 1) or name == "tensor"]
    degrees = " x ".join(shown) + (f" = {product}" if len(shown) > 1 else "")
    if parts["data"] is None and world_size % product:
        raise RecipeError(
            f"{where}: {degrees} does not divide {world_size} GPUs; change a degree, or run on a multiple of {product}"
        )
    if parts["data"] is not None and product != world_size:
        raise RecipeError(
            f"{where}: {degrees} is not {world_size} GPUs; change a degree, or leave data out so that it fills them"
        )


def check_architecture(recipe: Recipe, config: dict[str, Any]) -> None:
    """Raises RecipeError where the model of a Hugging Face ``config`` cannot be cut as the layouts ask."""
    for name, section in roles_of(recipe).items():
        layout, own = layout_of(recipe, section), role_config(recipe, section, config)
        _check_tensor(f"{name}.layout.tensor={layout.tensor}", layout.tensor, own)
        _check_experts(f"{name}.layout", layout, own)
        _check_exchange_of_heads(name, section, layout, _key_value_heads(own))
        layers = size(own, "num_hidden_layers")
        try:
            stage_layers(layout, layers)
        except RecipeError as error:
            raise RecipeError(f"{name}.{error}") from None
    if recipe.loop == "rl" and recipe.rollout is not None:
        tensor = recipe.rollout.layout.tensor
        where = f"rollout.layout.tensor={tensor}"
        _check_tensor(where, tensor, config)
        if recipe.rollout.layout.expert_parallel:
            _check_divides(where, tensor, "experts (rollout.layout.expert_parallel)", experts_of(config))
        elif experts_of(config):
            _check_divides(where, tensor, _EXPERT_COLUMNS, size(config, "moe_intermediate_size"))
    _check_adapters(recipe, config)
    _check_positions(recipe, config)


def _check_adapters(recipe: Recipe, config: dict[str, Any]) -> None:
    """Experts have no adapters: their layers are grouped, and tokens come to them in another order."""
    lora, attention = recipe.actor.lora, ("q_proj", "k_proj", "v_proj", "o_proj")
    if lora is not None and experts_of(config) and not set(lora.modules) <= set(attention):
        raise RecipeError(
            f"actor.lora.target_modules={lora.target_modules}: layers of experts have no adapters; name some of "
            f"{', '.join(attention)}"
        )


def _check_positions(recipe: Recipe, config: dict[str, Any]) -> None:
    """The longest row that the recipe's limits let through; without one for given responses only data can tell."""
    limits = {"data.max_prompt_length": recipe.data.max_prompt_length}
    given = recipe.data.max_response_length
    if recipe.loop == "rl" and recipe.rollout is not None:
        limits = {"rollout.max_response_length": recipe.rollout.max_response_length} | limits
    elif given is not None and recipe.loop == "reward_modeling":  # which limits a conversation, prompt included
        limits = {"data.max_response_length": given}
    elif given is not None:
        limits = {"data.max_response_length": given} | limits
    longest = sum(limits.values())
    for name, section in roles_of(recipe).items():
        positions = _positions(role_config(recipe, section, config))
        # A reward model reads the same text in tokens of its own.
        if positions is not None and longest > positions and name != "reward_model":
            shown = " + ".join(f"{key}={tokens}" for key, tokens in limits.items())
            total, lower = (f" = {longest}", "one") if len(limits) > 1 else ("", "it")
            model = "model" if name == "actor" else name
            raise RecipeError(
                f"{shown}{total} is beyond the {model}'s {positions} positions (max_position_embeddings); lower {lower}"
            )


def _check_exchange_of_heads(name: str, section: RoleSection, layout: LayoutSection, key_value_heads: int) -> None:
    per_rank = max(1, key_value_heads // layout.tensor)
    if section.cp_comm_type == "a2a" and per_rank % layout.context:
        raise RecipeError(
            f"{name}.layout.context={layout.context} does not divide the {per_rank} key-value heads of a GPU, which "
            f"{name}.cp_comm_type=a2a deals out; use p2p or all_gather, or a divisor"
        )


def _check_tensor(where: str, tensor: int, config: dict[str, Any]) -> None:
    """What tensor parallelism divides beside experts. Key-value heads that are too few are shared."""
    _check_divides(where, tensor, "attention heads (num_attention_heads)", size(config, "num_attention_heads"))
    key_value_heads = _key_value_heads(config)
    if key_value_heads % tensor and tensor % key_value_heads:
        raise RecipeError(
            f"{where} neither divides the model's {key_value_heads} key-value heads (num_key_value_heads) nor is a "
            "multiple; change it"
        )
    if not experts_of(config):
        what = "columns of the feed-forward layers (intermediate_size)"
        _check_divides(where, tensor, what, size(config, "intermediate_size"))


def _check_experts(where: str, layout: LayoutSection, config: dict[str, Any]) -> None:
    experts = experts_of(config)
    if not experts:
        if layout.expert > 1 or layout.expert_tensor not in (None, layout.tensor):
            raise RecipeError(f"{where}.expert and expert_tensor are for models with experts; leave them out")
        return
    _check_divides(f"{where}.expert={layout.expert}", layout.expert, "experts (num_experts)", experts)
    parts = layout.expert_gpus // layout.expert
    _check_divides(f"{where}.expert_tensor={parts}", parts, _EXPERT_COLUMNS, size(config, "moe_intermediate_size"))


def _key_value_heads(config: dict[str, Any]) -> int:
    return size(config, "num_key_value_heads", size(config, "num_attention_heads"))


def _check_divides(where: str, tensor: int, what: str, count: int) -> None:
    if count % tensor:
        raise RecipeError(f"{where} does not divide the model's {count} {what}; use a divisor of {count}, or pipeline")


def _positions(config: dict[str, Any]) -> int | None:
    field = "max_position_embeddings"
    return None if config.get(field) is None else size(config, field)
