"""Whether the models of a recipe can be read and cut as its layouts ask, before anything is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.errors import DataError, RecipeError
from rlhf_megatron.models.architecture import Architecture, read_architecture, read_config
from rlhf_megatron.planning.model_shape import experts_of, role_config, role_folder, size
from rlhf_megatron.recipe import Recipe, RewardModelingRecipe, RLRecipe
from rlhf_megatron.recipe.roles import LayoutSection, RoleSection
from rlhf_megatron.recipe.world_checks import layout_of, stage_layers
from rlhf_megatron.rollout.vllm.model_config import check_generates

_EXPERT_COLUMNS = "columns of an expert (moe_intermediate_size)"


def checked_architecture(recipe: Recipe, folder: str | Path) -> Architecture:
    """Return what the config in ``folder``, the model's, describes.

    Raises ModelError where it, or that in a role's own folder which is here, is damaged or not supported; RolloutError
    where it generates nothing and the recipe wants it to.
    """
    architecture = read_architecture(folder)
    if isinstance(recipe, RLRecipe):
        check_generates(Path(folder) / "config.json", read_config(folder))
    for section in recipe.roles.values():
        own = role_folder(recipe, section)
        if own is not None:
            read_architecture(own)
    return architecture


def check_tokens(tokenizer: Tokenizer, architecture: Architecture, folder: str | Path) -> None:
    """Raises DataError where the tokenizer knows ids that the model in ``folder`` has no embedding of."""
    if tokenizer.vocab_size > architecture.vocabulary:
        raise DataError(
            f"tokenizer: {tokenizer.path} has ids up to {tokenizer.vocab_size - 1}, and the model {folder} has a "
            f"vocabulary of {architecture.vocabulary}; set model.tokenizer to the model's own"
        )
    stops = [token for token in tokenizer.stop_token_ids if token >= architecture.vocabulary]
    if stops:
        raise DataError(
            f"tokenizer: {tokenizer.path} ends texts with token {stops[0]}, and the model {folder} has a vocabulary of "
            f"{architecture.vocabulary}; correct eos_token_id in generation_config.json"
        )


def check_architecture(recipe: Recipe, config: dict[str, Any]) -> None:
    """Raises RecipeError where the model of a Hugging Face ``config`` cannot be cut as the layouts ask."""
    for name, section in recipe.roles.items():
        layout, own = layout_of(recipe, section), role_config(recipe, section, config)
        _check_tensor(f"{name}.layout.tensor={layout.tensor}", layout.tensor, own)
        _check_experts(f"{name}.layout", layout, own)
        _check_exchange_of_heads(name, section, layout, _key_value_heads(own))
        layers = size(own, "num_hidden_layers")
        try:
            stage_layers(layout, layers)
        except RecipeError as error:
            raise RecipeError(f"{name}.{error}") from None
    if isinstance(recipe, RLRecipe):
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
    if isinstance(recipe, RLRecipe):
        limits = {"rollout.max_response_length": recipe.rollout.max_response_length} | limits
    elif given is not None and isinstance(recipe, RewardModelingRecipe):  # which limits a conversation, prompt included
        limits = {"data.max_response_length": given}
    elif given is not None:
        limits = {"data.max_response_length": given} | limits
    longest = sum(limits.values())
    for name, section in recipe.roles.items():
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
