"""The verdicts of a recipe's judge on the responses of an evaluation."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence

import torch.distributed as dist

from rlhf_megatron.data.prompts import Prompt
from rlhf_megatron.data.rollout_batch import batch_from_rows
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.generation.judge_building import build_judge
from rlhf_megatron.generation.judge_verdicts import Judge
from rlhf_megatron.generation.replica import replica_among
from rlhf_megatron.recipe import JudgeSection, RecipeError, RLRecipe, RolloutRecipe
from rlhf_megatron.rewards.score import Score
from rlhf_megatron.rollout.engine import Completion
from rlhf_megatron.topology.row_exchange import gather_rows
from rlhf_megatron.topology.team import whole_world


def judge_of(recipe: RolloutRecipe) -> JudgeSection | None:
    """Return the recipe's judge, if it has one."""
    return recipe.judge if isinstance(recipe, RLRecipe) else None


def check_judge(section: JudgeSection, tensor: int) -> None:
    """Raise RecipeError where the judge's replicas are not the model's, of ``tensor`` ranks."""
    if section.layout.tensor != tensor:
        raise RecipeError(
            f"judge.layout.tensor={section.layout.tensor}: an evaluation has the judge on the model's ranks, with its "
            f"layout; set it to rollout.layout.tensor={tensor}"
        )


def make_judge(recipe: RolloutRecipe, section: JudgeSection, policy_tokenizer: Tokenizer) -> Judge:
    """Build the judge on all ranks, beside the engines to come; collective."""
    replica = replica_among(range(dist.get_world_size()), section.layout.tensor, dist.get_rank())

    def say(text: str) -> None:
        if dist.get_rank() == 0:
            print(text, file=sys.stderr, flush=True)

    return build_judge(recipe, section, replica, policy_tokenizer, whole_world(), say)


def judged(
    judge: Judge, weight: float, prompts: Sequence[Prompt], completions: Sequence[Completion], scores: Sequence[Score]
) -> list[Score]:
    """Return this rank's scores with the judge's as another part; collective. NaN where it has none."""
    batch = batch_from_rows(
        [prompt.token_ids for prompt in prompts],
        [completion.token_ids for completion in completions],
        row_id=[completion.row_id for completion in completions],
    )
    rows = gather_rows(batch)
    score_of_row = dict(zip(rows.numbers.row_id.tolist(), judge.scores(rows, prompts).tolist(), strict=True))
    parts = [float(score_of_row[completion.row_id]) for completion in completions]
    return [
        dataclasses.replace(
            score,
            value=score.value + weight * part,
            parts=(*score.parts, part),
            failed=score.failed or math.isnan(part),
        )
        for score, part in zip(scores, parts, strict=True)
    ]
