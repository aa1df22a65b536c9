"""Checks that the models of a recipe can be cut as its layouts ask, before anything is made of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import get_args

from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.errors import DataError, ModelError, RecipeError
from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.fp8 import parts_of_blocks, unsupported_in_fp8
from rlhf_megatron.models.lora import fused_with, module_of
from rlhf_megatron.models.recompute import lacking_module
from rlhf_megatron.models.weight_map import is_expert, tensor_shapes
from rlhf_megatron.recipe import JudgeSection, Recipe, RewardModelingRecipe, RLRecipe
from rlhf_megatron.recipe.role_sections import LayoutSection, LinearLayer, RoleSection, transformer_engine_can
from rlhf_megatron.recipe.rollout import RolloutLayoutSection
from rlhf_megatron.recipe.world_checks import layout_of
from rlhf_megatron.topology.layout import Layout
from rlhf_megatron.topology.role_layout import make_layout


def check_tokens(tokenizer: Tokenizer, architecture: Architecture, folder: str | Path) -> None:
    """Raise DataError where the tokenizer knows ids that the model in ``folder`` has no embedding of."""
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


def check_architectures(recipe: Recipe, architectures: Mapping[str, Architecture]) -> None:
    """Raise RecipeError where a role's model cannot be cut as its layout asks, or the actor's as the rollout's does.

    ``architectures``: of each role (``role_architectures``). Whether the layouts fit a world is not looked at.
    """
    for check in architecture_checks(recipe, architectures):
        check()


def architecture_checks(recipe: Recipe, architectures: Mapping[str, Architecture]) -> list[Callable[[], None]]:
    """Return the parts of ``check_architectures``, each of which raises RecipeError by itself."""
    actor, part = architectures["actor"], functools.partial
    checks: list[Callable[[], None]] = [
        part(_check_role, recipe, name, section, architectures[name]) for name, section in recipe.roles.items()
    ]
    if isinstance(recipe, RLRecipe):
        checks += [
            part(_check_rollout, "rollout", recipe.rollout.layout, actor),
            part(_check_judge, recipe.judge, architectures.get("judge")),
            part(_check_speculative, recipe, actor),
            part(_check_router_replay, recipe, actor),
        ]
    of_actor = [part(_check_adapters, recipe, actor), part(_check_fp8, recipe, actor)]
    return [*checks, *of_actor, part(_check_positions, recipe, architectures)]


def _check_role(recipe: Recipe, name: str, section: RoleSection, model: Architecture) -> None:
    layout = layout_of(recipe, section)
    _check_layout(name, model, _smallest_layout(layout))
    for kind in model.kind_counts:
        _check_exchange_of_heads(name, section, layout, model.of_kind(kind).key_value_heads)
    _check_window(recipe, name, section, layout, model)
    _check_recompute(name, section, model)
    if recipe.shares_prompts(section):
        _check_shared_prompts(name, layout, model)


def _smallest_layout(section: LayoutSection) -> Layout:
    """Return the layout with as much data parallelism as its experts take, whatever the section asks for."""
    return make_layout(section.model_copy(update={"data": None}), section.model_gpus * section.expert_gpus)


def _check_layout(section: str, architecture: Architecture, layout: Layout) -> None:
    """Raise RecipeError that begins with the recipe's key, where the model cannot be cut into ``layout``."""
    try:
        architecture.check_layout(layout)
    except (ModelError, RecipeError) as error:
        raise RecipeError(f"{section}.{error}") from error


def _check_judge(section: JudgeSection | None, architecture: Architecture | None) -> None:
    """Check what is known of the judge's model before vLLM reads it."""
    if section is None or architecture is None:
        return
    _check_rollout("judge", section.layout, architecture)
    longest = section.max_prompt_length + section.max_response_length
    if longest > architecture.max_positions:
        raise RecipeError(
            f"judge.max_prompt_length={section.max_prompt_length} + judge.max_response_length="
            f"{section.max_response_length} = {longest} is beyond the judge's {architecture.max_positions} positions "
            "(max_position_embeddings); lower one"
        )


def _check_rollout(name: str, layout: RolloutLayoutSection, architecture: Architecture) -> None:
    """Check what vLLM divides: attention and feed-forward layers as Megatron does, but experts in its own way."""
    tensor, experts = layout.tensor, architecture.experts
    repeats = dataclasses.replace(architecture, gated_attention=False)  # vLLM repeats key-value heads, gated or not
    _check_layout(name, repeats, Layout(tensor, expert_tensor=1 if experts else None))
    if experts is None:
        return
    if experts.biased and tensor > 1 and not layout.expert_parallel:
        raise RecipeError(
            f"{name}.layout.expert_parallel must be true with {name}.layout.tensor above 1: the model's experts have "
            "biases, which vLLM leaves to one rank"
        )
    what, count = "columns of an expert (moe_intermediate_size)", experts.feed_forward
    if layout.expert_parallel:
        what, count = f"experts ({name}.layout.expert_parallel)", experts.count
    if count % tensor:
        raise RecipeError(
            f"{name}.layout.tensor={tensor} does not divide the model's {count} {what}; use a divisor of {count}, or "
            "pipeline"
        )


def _check_speculative(recipe: RLRecipe, architecture: Architecture) -> None:
    """Refuse drafts for layers whose state would have to be taken back with a draft that is wrong."""
    if recipe.rollout.speculative is not None and architecture.delta_net is not None:
        raise RecipeError(
            "rollout.speculative: the states of the model's delta nets go back to no earlier token here; leave it out"
        )


def _check_router_replay(recipe: RLRecipe, architecture: Architecture) -> None:
    """Refuse replay of routers that are not there, or whose choices vLLM forgets with the tokens of its cache."""
    if not recipe.algorithm.replays_experts:
        return
    if architecture.experts is None:
        raise RecipeError("algorithm.router_replay=rollout: the model is dense, without routers; leave it out")
    if all(kind.attention == "window" for kind in architecture.layer_kinds):
        raise RecipeError(
            "algorithm.router_replay=rollout: every layer has a sliding window, and vLLM's cache forgets what was "
            "chosen for tokens before it; leave it out"
        )
    if "moe" in recipe.actor.recompute.selected and recipe.actor.layout.pipeline > 1:
        raise RecipeError(
            "actor.recompute.modules: with a pipeline, moe would replay the experts of a later micro-batch "
            "(algorithm.router_replay); use granularity full"
        )


def _check_adapters(recipe: Recipe, architecture: Architecture) -> None:
    """Refuse adapters of layers that the model does not have, and those of experts that PEFT could not load."""
    lora = recipe.actor.lora
    if lora is None:
        return
    named = () if lora.target_modules == "all-linear" else lora.target_modules
    matrices = [tensor for tensor, shape in tensor_shapes(architecture).items() if len(shape) == 2]
    modules = {module_of(tensor) for tensor in matrices}
    has = ", ".join(module for module in get_args(LinearLayer) if module in modules)
    missing = [module for module in named if module not in modules]
    if missing:
        raise RecipeError(
            f"actor.lora.target_modules: the layers of {architecture.family} have no {missing[0]}; name some of {has}"
        )
    together = {frozenset(map(module_of, fused_with(tensor))) for tensor in matrices if is_expert(tensor)}
    parted = next((pair for pair in together if 0 < len(pair.intersection(named)) < len(pair)), None)
    if parted:
        raise RecipeError(
            f"actor.lora.target_modules: {' and '.join(sorted(parted))} are one parameter of PEFT's experts; name "
            "both or none"
        )


def _check_fp8(recipe: Recipe, architecture: Architecture) -> None:
    """Refuse 8 bits, in training or by blocks in the rollout, for layers without such products or of odd widths."""
    reason = recipe.actor.fp8 and unsupported_in_fp8(architecture, recipe.actor.layout.tensor)
    if reason:
        raise RecipeError(f"actor.fp8={recipe.actor.fp8}: {reason}; leave it out")
    if isinstance(recipe, RLRecipe) and recipe.rollout.quantization == "fp8_blockwise":
        reason = parts_of_blocks(architecture, recipe.rollout.layout.tensor)
        if reason:
            raise RecipeError(f"rollout.quantization=fp8_blockwise: {reason}; use fp8")


def longest_row(recipe: Recipe, positions: int) -> int:
    """Return how many tokens a row of ``recipe`` may have; in reinforcement learning that is vLLM's max_model_len.

    Without a limit of given responses it is ``positions``, those of the model.
    """
    is_limited = isinstance(recipe, RLRecipe) or recipe.data.max_response_length is not None
    return sum(_row_limits(recipe).values()) if is_limited else positions


def _row_limits(recipe: Recipe) -> dict[str, int]:
    """Return the keys that limit a row, and the tokens that each allows."""
    limits = {"data.max_prompt_length": recipe.data.max_prompt_length}
    given = recipe.data.max_response_length
    if isinstance(recipe, RLRecipe):
        return {"rollout.max_response_length": recipe.rollout.max_response_length} | limits
    if given is None:
        return limits
    if isinstance(recipe, RewardModelingRecipe):  # which limits a conversation, prompt included
        return {"data.max_response_length": given}
    return {"data.max_response_length": given} | limits


def _check_positions(recipe: Recipe, architectures: Mapping[str, Architecture]) -> None:
    """Check the longest row that the limits let through; without one for given responses only data can tell."""
    limits = _row_limits(recipe)
    longest = sum(limits.values())
    for name in recipe.roles:
        positions = architectures[name].max_positions
        # A reward model reads the same text in tokens of its own.
        if longest > positions and name != "reward_model":
            shown = " + ".join(f"{key}={tokens}" for key, tokens in limits.items())
            total, lower = (f" = {longest}", "one") if len(limits) > 1 else ("", "it")
            model = "model" if name == "actor" else name
            raise RecipeError(
                f"{shown}{total} is beyond the {model}'s {positions} positions (max_position_embeddings); lower {lower}"
            )


def _check_window(
    recipe: Recipe, name: str, section: RoleSection, layout: LayoutSection, architecture: Architecture
) -> None:
    """Refuse Transformer Engine's ring for layers with a sliding window, which it does not have."""
    fused = section.transformer_implementation != "local"
    if architecture.window is None or not fused or section.cp_comm_type != "p2p" or layout.context == 1:
        return
    if transformer_engine_can(layout.context, recipe.dtype_of(section) == "float32"):
        raise RecipeError(
            f"{name}.cp_comm_type=p2p: Transformer Engine's ring has no sliding window, and the model has one of "
            f"{architecture.window} tokens (sliding_window); use a2a or all_gather, or {name}.layout.context=1"
        )


def _check_recompute(name: str, section: RoleSection, architecture: Architecture) -> None:
    """Refuse to recompute what no layer has."""
    lacking = lacking_module(architecture, section.recompute.selected)
    if lacking:
        raise RecipeError(f"{name}.recompute.modules: {lacking}; leave it out")


def _check_shared_prompts(name: str, layout: LayoutSection, architecture: Architecture) -> None:
    """Refuse shared prompts where rows are cut, and for layers whose state goes on from token to token."""
    if layout.context > 1:
        raise RecipeError(
            f"actor.shared_prompts: with {name}.layout.context={layout.context} the rows of a prompt would be cut; "
            "leave it out, or set context to 1"
        )
    if architecture.delta_net:
        raise RecipeError(
            f"actor.shared_prompts: the {name}'s layers with a delta net have a state, and no keys to repeat; leave it "
            "out"
        )


def _check_exchange_of_heads(name: str, section: RoleSection, layout: LayoutSection, key_value_heads: int) -> None:
    per_rank = max(1, key_value_heads // layout.tensor)
    if section.cp_comm_type == "a2a" and per_rank % layout.context:
        raise RecipeError(
            f"{name}.layout.context={layout.context} does not divide the {per_rank} key-value heads of a GPU, which "
            f"{name}.cp_comm_type=a2a deals out; use p2p or all_gather, or a divisor"
        )
