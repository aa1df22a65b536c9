"""Recipes: what a run is asked to do, as checked, frozen values. Needs neither torch nor a GPU."""

from rlhf_megatron.errors import RecipeError, UserError
from rlhf_megatron.recipe.algorithm import AlgorithmSection
from rlhf_megatron.recipe.data import DataSection
from rlhf_megatron.recipe.judge import JudgeSection
from rlhf_megatron.recipe.load import (
    AnyRecipe,
    known_keys,
    load_evaluation,
    load_recipe,
    load_rl,
    make_recipe,
    require_rl,
    resolved_yaml,
)
from rlhf_megatron.recipe.operations import MonitorSection
from rlhf_megatron.recipe.optimizer import OptimizerSection
from rlhf_megatron.recipe.recipe import Recipe
from rlhf_megatron.recipe.reward import (
    RewardCodeSection,
    RewardPartSection,
    RewardSection,
    RewardServiceSection,
    RewardSource,
)
from rlhf_megatron.recipe.rl_recipe import RLRecipe
from rlhf_megatron.recipe.role_sections import (
    ActorSection,
    CriticSection,
    LayoutSection,
    LoraSection,
    RewardModelSection,
    RoleSection,
)
from rlhf_megatron.recipe.rollout import AgentSection, MultiTurnSection, RolloutSection
from rlhf_megatron.recipe.rollout_recipe import RolloutRecipe
from rlhf_megatron.recipe.supervised import RewardModelingRecipe, SFTRecipe
from rlhf_megatron.recipe.world_checks import check_world, give_way, judge_ranks, role_ranks, rollout_ranks

__all__ = [
    "ActorSection",
    "AgentSection",
    "AlgorithmSection",
    "AnyRecipe",
    "CriticSection",
    "DataSection",
    "JudgeSection",
    "LayoutSection",
    "LoraSection",
    "MonitorSection",
    "MultiTurnSection",
    "OptimizerSection",
    "RLRecipe",
    "Recipe",
    "RecipeError",
    "RewardModelSection",
    "RewardModelingRecipe",
    "RewardPartSection",
    "RewardCodeSection",
    "RewardSection",
    "RewardServiceSection",
    "RewardSource",
    "RoleSection",
    "RolloutRecipe",
    "RolloutSection",
    "SFTRecipe",
    "UserError",
    "check_world",
    "give_way",
    "judge_ranks",
    "known_keys",
    "load_evaluation",
    "load_recipe",
    "load_rl",
    "make_recipe",
    "require_rl",
    "resolved_yaml",
    "role_ranks",
    "rollout_ranks",
]
