"""The judge as a recipe describes it: its engines on their ranks, with the weights of its folder."""

from __future__ import annotations

import functools

from rlhf_megatron.data.tokenizer import Tokenizer, load_tokenizer
from rlhf_megatron.evaluation.standalone import check_weights
from rlhf_megatron.generation.judge import Judge, build_judge_engine
from rlhf_megatron.generation.replica import replica_among
from rlhf_megatron.planning.model_folders import has_config
from rlhf_megatron.recipe import JudgeSection, RecipeError, RLRecipe, judge_ranks
from rlhf_megatron.runtime.run_context import RunContext
from rlhf_megatron.topology.exchange import refused_by_all
from rlhf_megatron.untrusted import shown


def build_judge(context: RunContext[RLRecipe], section: JudgeSection, policy_tokenizer: Tokenizer) -> Judge:
    """Builds the recipe's judge, which reads what was written in ``policy_tokenizer``; collective over the world."""
    recipe = context.recipe
    replica = replica_among(judge_ranks(recipe, context.world_size), section.layout.tensor, context.rank)
    trusts = recipe.model.trust_remote_code
    if not has_config(section.path):
        raise RecipeError(f"judge.path: there is no {shown(section.path)}/config.json; download the model")
    with context.phase("judge"):
        tokenizer = load_tokenizer(section.tokenizer or section.path, trusts, section.chat_template)
        engine = build_judge_engine(section, section.dtype or recipe.model.dtype, recipe.seed, replica)
        with refused_by_all():
            if engine:
                check_weights(section.path, engine.parameters())
    return Judge(
        section,
        replica,
        engine,
        tokenizer,
        policy_tokenizer,
        recipe.seed,
        context.generators,
        context.say,
        functools.partial(context.progress, "score"),
    )
