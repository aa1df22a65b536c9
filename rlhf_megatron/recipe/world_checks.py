"""Checks of a recipe on a world of some size: its roles' ranks, and that its layouts fit there. Needs no model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from rlhf_megatron.errors import RecipeError
from rlhf_megatron.recipe.drafting import DRAFT
from rlhf_megatron.recipe.judge import JudgeSection
from rlhf_megatron.recipe.placement import ranks_of
from rlhf_megatron.recipe.recipe import Recipe
from rlhf_megatron.recipe.rl_recipe import RLRecipe
from rlhf_megatron.recipe.role_sections import LayoutSection, RoleSection
from rlhf_megatron.recipe.rollout_recipe import RolloutRecipe


def layout_of(recipe: Recipe, section: RoleSection) -> LayoutSection:
    """Return the role's own layout, or the actor's."""
    return section.layout or recipe.actor.layout


def role_ranks(recipe: Recipe, name: str, world_size: int) -> list[int]:
    """Return the rising global ranks of a role; raises RecipeError where the recipe names others than there are."""
    ranks = ranks_of(f"{name}.ranks", recipe.roles[name].ranks, world_size, recipe.cluster.gpus_per_node)
    return _last_stage(ranks, recipe.actor.layout.pipeline) if name == DRAFT else ranks


def _last_stage(ranks: list[int], stages: int) -> list[int]:
    """Return the ranks of the actor's last pipeline stage, of all."""
    return ranks[-(len(ranks) // stages) :]


def rollout_ranks(recipe: RolloutRecipe, world_size: int) -> list[int]:
    """Return the rising global ranks that generate; raises as ``role_ranks``."""
    return ranks_of("rollout.ranks", recipe.rollout.ranks, world_size, recipe.cluster.gpus_per_node)


def judge_ranks(recipe: RLRecipe, judge: JudgeSection, world_size: int) -> list[int]:
    """Return the rising global ranks of the judge, the rollout's unless it has its own; raises as ``role_ranks``."""
    return ranks_of("judge.ranks", _ranks_of_judge(recipe, judge), world_size, recipe.cluster.gpus_per_node)


def _ranks_of_judge(recipe: RLRecipe, judge: JudgeSection) -> str:
    return recipe.rollout.ranks if judge.ranks is None else judge.ranks


def give_way(recipe: RLRecipe, ranks: Sequence[int], world_size: int) -> bool:
    """Return whether engines on ``ranks`` are there in turn with roles, and so may sleep: not ahead of learning."""
    roles = set().union(*(role_ranks(recipe, name, world_size) for name in recipe.roles_made))
    return not recipe.rollout_is_ahead and not roles.isdisjoint(ranks)


def roles_together(recipe: Recipe, world_size: int) -> frozenset[frozenset[str]]:
    """Return the roles that are made, "rollout" and "judge", of each rank, once for ranks that have the same."""
    texts = {name: section.ranks for name, section in recipe.roles_made.items()}
    if isinstance(recipe, RLRecipe):
        texts["rollout"] = recipe.rollout.ranks
        if recipe.judge:
            texts["judge"] = _ranks_of_judge(recipe, recipe.judge)
    stages = recipe.actor.layout.pipeline if DRAFT in texts else 1
    return _roles_together(tuple(texts.items()), world_size, recipe.cluster.gpus_per_node, stages)


@functools.lru_cache(maxsize=16)  # all layouts of a search are placed alike
def _roles_together(
    texts: tuple[tuple[str, str], ...], world_size: int, gpus: int, stages: int
) -> frozenset[frozenset[str]]:
    of_rank: dict[int, list[str]] = {}
    for name, text in texts:
        ranks = ranks_of(f"{name}.ranks", text, world_size, gpus)
        for rank in _last_stage(ranks, stages) if name == DRAFT else ranks:
            of_rank.setdefault(rank, []).append(name)
    return frozenset(map(frozenset, of_rank.values()))


def check_world(recipe: Recipe, world_size: int) -> None:
    """Raise RecipeError where a layout does not fit on ``world_size`` GPUs."""
    for check in world_checks(recipe, world_size):
        check()


def world_checks(recipe: Recipe, world_size: int) -> list[Callable[[], None]]:
    """Return the parts of ``check_world``, each of which raises RecipeError by itself.

    A role that has the actor's layout and ranks is checked with the actor.
    """
    actor = recipe.actor
    alone = [
        name
        for name, section in recipe.roles.items()
        if name != DRAFT and (section is actor or section.layout is not None or section.ranks != actor.ranks)
    ]
    checks = [functools.partial(_check_role, recipe, name, world_size) for name in alone]
    if isinstance(recipe, RLRecipe):
        checks.append(functools.partial(_check_rollout, recipe, world_size))
    return [*checks, functools.partial(_check_profile, recipe, world_size)]


def _check_role(recipe: Recipe, name: str, world_size: int) -> None:
    layout = layout_of(recipe, recipe.roles[name])
    parts = {"tensor": layout.tensor, "pipeline": layout.pipeline, "context": layout.context, "data": layout.data}
    ranks = len(role_ranks(recipe, name, world_size))
    _check_fill(f"{name}.layout", parts, ranks)
    stage = ranks // layout.pipeline
    if stage % layout.expert_gpus:
        raise RecipeError(
            f"{name}.layout: expert {layout.expert} x expert_tensor {layout.expert_gpus // layout.expert} does not "
            f"divide the {stage} GPUs of a pipeline stage; change one"
        )


def _check_rollout(recipe: RLRecipe, world_size: int) -> None:
    rollout = recipe.rollout.layout
    generating = rollout_ranks(recipe, world_size)
    _check_fill("rollout.layout", {"tensor": rollout.tensor, "data": rollout.data}, len(generating))
    _check_judge(recipe, world_size, generating)
    _check_shares(recipe, len(generating) // rollout.tensor)
    if len(generating) < world_size or recipe.rollout.steps_ahead:
        _check_teams(recipe, world_size, set(generating))


def _check_judge(recipe: RLRecipe, world_size: int, generating: Sequence[int]) -> None:
    """Check that the judge has whole replicas, on ranks of their own or on those of a replica of the rollout: vLLM's
    groups are a process's."""
    if recipe.judge is None:
        return
    layout, ranks = recipe.judge.layout, judge_ranks(recipe, recipe.judge, world_size)
    if recipe.judge.sleep and not give_way(recipe, ranks, world_size):
        raise RecipeError("judge.sleep: no role has the judge's GPUs in turn with it; leave it out")
    _check_fill("judge.layout", {"tensor": layout.tensor, "data": layout.data}, len(ranks))
    of_rollout = {rank: replica for replica in _replicas(generating, recipe.rollout.layout.tensor) for rank in replica}
    for replica in _replicas(ranks, layout.tensor):
        shared = next((of_rollout[rank] for rank in replica if rank in of_rollout), replica)
        if shared != replica:
            raise RecipeError(
                f"judge.layout.tensor={layout.tensor}: ranks {replica[0]}-{replica[-1]} would be a replica, but "
                f"the rollout has {shared[0]}-{shared[-1]}; give both the same, or judge.ranks of its own"
            )


def _replicas(ranks: Sequence[int], tensor: int) -> list[Sequence[int]]:
    return [ranks[first : first + tensor] for first in range(0, len(ranks), tensor)]


def _check_profile(recipe: Recipe, world_size: int) -> None:
    profile = recipe.monitor.profile
    missing = next((rank for rank in profile.ranks if profile.steps and rank >= world_size), None)
    if missing is not None:
        raise RecipeError(f"monitor.profile.ranks: there is no rank {missing} of {world_size}")


def learners_of(recipe: Recipe, world_size: int) -> list[int]:
    """Return the rising ranks of the roles that learn, or that learning asks: all but the reward model."""
    roles = [name for name in recipe.roles_made if name != "reward_model"]
    return sorted(set().union(*(role_ranks(recipe, name, world_size) for name in roles)))


def _check_teams(recipe: RLRecipe, world_size: int, generating: set[int]) -> None:
    """Check that no GPU is without work, and where rollout is ahead of learning, that there is none that would have to
    do both at a time."""
    placed = {name: set(role_ranks(recipe, name, world_size)) for name in recipe.roles_made}
    texts = {name: section.ranks for name, section in recipe.roles_made.items()}
    if recipe.judge:
        placed["judge"] = set(judge_ranks(recipe, recipe.judge, world_size))
        texts["judge"] = _ranks_of_judge(recipe, recipe.judge)
    idle = set(range(world_size)).difference(generating, *placed.values())
    if idle:
        raise RecipeError(
            f"rollout.ranks={recipe.rollout.ranks}: rank {min(idle)} has neither a role nor rollout; give it one, or "
            "run on fewer GPUs"
        )
    if not recipe.rollout.steps_ahead:
        return
    for name, ranks in placed.items():
        if name in recipe.scoring_models and not ranks <= generating:
            raise RecipeError(
                f"{name}.ranks={texts[name]}: with rollout.steps_ahead=1 it judges while others "
                f"learn; name ranks of rollout.ranks={recipe.rollout.ranks}"
            )
        if name not in recipe.scoring_models and ranks & generating:
            raise RecipeError(
                f"{name}.ranks={texts[name]} has rank {min(ranks & generating)}, which generates "
                f"ahead (rollout.steps_ahead=1, rollout.ranks={recipe.rollout.ranks}); give each GPU to one of them"
            )


def _check_shares(recipe: RLRecipe, replicas: int) -> None:
    """Check replicas with fixed shares, each of which ends a step by itself: they must have equal ones."""
    filters = recipe.algorithm.filter_groups
    prompts = (filters.prompts_per_round if filters.enable else None) or recipe.batch.prompts_per_step
    section = recipe.rollout
    if section.updates_in_flight and section.scheduling == "static" and prompts % replicas:
        raise RecipeError(
            f"rollout.partial=resume: with scheduling=static each of {replicas} replicas gives as many of {prompts} "
            "groups; make that a multiple, or use queue"
        )


def _check_fill(where: str, parts: dict[str, int | None], world_size: int) -> None:
    """Check the given degrees, which must fill the world, or divide it where ``data`` is left to be what remains."""
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
