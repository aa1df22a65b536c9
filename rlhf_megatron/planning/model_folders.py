"""Folders whose config.json describes the models of a recipe's roles, before any weights are there."""

from __future__ import annotations

import os
from pathlib import Path

from rlhf_megatron.errors import RecipeError
from rlhf_megatron.models.architecture import (
    Architecture,
    Head,
    check_generates,
    prediction_layer,
    read_architecture,
    read_config,
)
from rlhf_megatron.models.draft_heads import draft_head
from rlhf_megatron.models.families import FAMILIES
from rlhf_megatron.recipe.drafting import DRAFT
from rlhf_megatron.recipe.recipe import Recipe
from rlhf_megatron.recipe.rl_recipe import RLRecipe
from rlhf_megatron.recipe.role_sections import RoleSection
from rlhf_megatron.recipe.supervised import RewardModelingRecipe
from rlhf_megatron.rollout.model_checks import check_classes
from rlhf_megatron.untrusted import shown


def planning_folder(recipe: Recipe) -> Path:
    """Return ``model.path``, or ``model.config`` where the former has no config.json; raises RecipeError if neither
    has."""
    given = given_folder(recipe)
    if given is None:
        tried = " nor ".join(shown(folder / "config.json") for folder in _candidates(recipe))
        raise RecipeError(
            f"model.path: there is no {tried}; give the model's folder or its OWNER/NAME on the hub, or set "
            "model.config to a folder with its config.json"
        )
    return given


def given_folder(recipe: Recipe) -> Path | None:
    """Return the same; None if neither has a config.json."""
    return next(filter(has_config, _candidates(recipe)), None)


def _candidates(recipe: Recipe) -> list[Path]:
    return [Path(folder) for folder in (recipe.model.path, recipe.model.config) if folder is not None]


def role_folder(recipe: Recipe, section: RoleSection) -> Path | None:
    """Return the role's own folder, if it names one that is here and is not the model's."""
    own = section.weights_folder
    return None if own in (None, recipe.model.path) or not has_config(Path(own)) else Path(own)


def role_architectures(recipe: Recipe, model: Architecture) -> dict[str, Architecture]:
    """Return the architecture of each of ``recipe.roles`` with its head, where ``model`` is that of the recipe's model;
    and "judge", where its folder is here and of a family that is known: vLLM has more.

    Raises ModelError where the config in a role's own folder, which is here, is damaged or not supported.
    """
    architectures = {name: _role_architecture(recipe, name, section, model) for name, section in recipe.roles.items()}
    judge = Path(recipe.judge.path) if isinstance(recipe, RLRecipe) and recipe.judge else None
    if judge and has_config(judge):
        check_classes(judge / "config.json", read_config(judge))
        if str(read_config(judge).get("model_type")) in FAMILIES:
            architectures["judge"] = read_architecture(judge)
            check_generates(architectures["judge"], judge)
    return architectures


def model_architecture(recipe: Recipe, folder: Path) -> Architecture:
    """Return the architecture of the recipe's model, whose config is in ``folder``.

    Raises ModelError where it is damaged or not supported; RolloutError where it generates nothing and the recipe wants
    it to.
    """
    architecture = read_architecture(folder)
    if isinstance(recipe, RLRecipe):
        check_classes(folder / "config.json", read_config(folder))
        check_generates(architecture, folder)
    return architecture


def planned_architectures(recipe: Recipe) -> dict[str, Architecture]:
    """Return the ``role_architectures`` with the model of the ``planning_folder``; raises as both."""
    return role_architectures(recipe, model_architecture(recipe, planning_folder(recipe)))


def _role_architecture(recipe: Recipe, name: str, section: RoleSection, model: Architecture) -> Architecture:
    own = role_folder(recipe, section)
    if name == DRAFT:
        return prediction_layer(model, planning_folder(recipe)) if recipe.predicts else draft_head(model, own)
    scalar = name in ("critic", "reward_model") or isinstance(recipe, RewardModelingRecipe)
    head: Head = "scalar" if scalar else "language"
    return (model if own is None else read_architecture(own)).with_head(head)


def has_config(folder: str | Path) -> bool:
    """Return whether there is something of that name, which may be no file that can be read."""
    return os.path.lexists(Path(folder) / "config.json")


def is_elsewhere(recipe: Recipe) -> bool:
    """Return True if the recipe is planned by model.config alone, on a machine without its model, and so without its
    data."""
    return recipe.model.config is not None and not has_config(recipe.model.path)
