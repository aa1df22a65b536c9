"""The judge as a recipe describes it: its engines on their ranks, with the weights of its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.data.tokenizer_loading import load_tokenizer
from rlhf_megatron.generation.judge_verdicts import Judge, build_judge_engine
from rlhf_megatron.generation.replica import Replica
from rlhf_megatron.models.architecture import ModelError
from rlhf_megatron.planning.model_folders import has_config
from rlhf_megatron.recipe import JudgeSection, RecipeError, RolloutRecipe
from rlhf_megatron.runtime.finite import nonfinite
from rlhf_megatron.topology.exchange import refused_by_all
from rlhf_megatron.topology.team import Team
from rlhf_megatron.untrusted import shown


def build_judge(
    recipe: RolloutRecipe,
    section: JudgeSection,
    replica: Replica,
    policy_tokenizer: Tokenizer,
    team: Team,
    say: Callable[[str], None],
    on_progress: Callable[[int, int], None] | None = None,
    sleeps: bool = False,
) -> Judge:
    """Build the recipe's judge, which reads what was written in ``policy_tokenizer``; collective over the world.

    ``replica``: this rank's part in it; ``team``: the ranks that ask; ``sleeps``: whether others have its GPU when it
    has judged.
    """
    if not has_config(section.path):
        raise RecipeError(f"judge.path: there is no {shown(section.path)}/config.json; download the model")
    tokenizer = load_tokenizer(section.tokenizer or section.path, recipe.model.trust_remote_code, section.chat_template)
    engine = build_judge_engine(section, section.dtype or recipe.model.dtype, recipe.seed, replica)
    with refused_by_all():
        if engine:
            check_weights(section.path, engine.parameters())
    return Judge(section, replica, engine, tokenizer, policy_tokenizer, recipe.seed, team, say, on_progress, sleeps)


def check_weights(path: str, parameters: Mapping[str, Tensor]) -> None:
    """Raise ModelError where what an engine has read from ``path`` is not finite; it would answer nonsense."""
    weights = {name: each for name, each in parameters.items() if each.is_floating_point() and each.itemsize > 1}
    for bad in nonfinite(weights.items()):
        raise ModelError(
            f"{path}: {bad.name} holds {bad.nan + bad.infinite} values that are not finite (NaN or infinity), as the "
            "engine has read it; download the model again"
        )
