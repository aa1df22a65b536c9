"""Recipes: what a run is asked to do, as checked, frozen values. Needs neither torch nor a GPU."""

from rlhf_megatron.errors import RecipeError, UserError
from rlhf_megatron.recipe.algorithm import AlgorithmSection
from rlhf_megatron.recipe.data import DataSection
from rlhf_megatron.recipe.load import known_keys, load_recipe, make_recipe, resolved_yaml
from rlhf_megatron.recipe.operations import MonitorSection
from rlhf_megatron.recipe.recipe import Recipe
from rlhf_megatron.recipe.reward import RewardPartSection, RewardSection, RewardServiceSection, RewardSource
from rlhf_megatron.recipe.roles import (
    ActorSection,
    CriticSection,
    LayoutSection,
    LoraSection,
    OptimizerSection,
    RewardModelSection,
    RoleSection,
)
from rlhf_megatron.recipe.rollout import MultiTurnSection, RolloutSection
from rlhf_megatron.recipe.unsupported import unsupported
from rlhf_megatron.recipe.world_checks import check_world, role_ranks

__all__ = [
    "ActorSection",
    "AlgorithmSection",
    "CriticSection",
    "DataSection",
    "LayoutSection",
    "LoraSection",
    "MonitorSection",
    "MultiTurnSection",
    "OptimizerSection",
    "Recipe",
    "RecipeError",
    "RewardPartSection",
    "RewardModelSection",
    "RewardSection",
    "RewardServiceSection",
    "RewardSource",
    "RoleSection",
    "RolloutSection",
    "UserError",
    "check_world",
    "known_keys",
    "load_recipe",
    "make_recipe",
    "role_ranks",
    "resolved_yaml",
    "unsupported",
]
