"""Evaluates a recipe's model: launch/torchrun.py ... launch/evaluate.py RECIPE [key.path=value ...]"""

from __future__ import annotations

import functools
import os
import sys

from rlhf_megatron.compat.vllm.names import check_installed
from rlhf_megatron.recipe import RolloutRecipe, load_evaluation
from rlhf_megatron.recipe.arguments import add_recipe_arguments
from rlhf_megatron.recipe.hub_names import with_folders
from rlhf_megatron.rollout.vllm.process_environment import prepare_environment
from rlhf_megatron.runtime.command import (
    INPUT_STATUS,
    ArgumentParser,
    check_environment,
    command,
    on_this_rank,
    say_that_imports_begin,
    was_refused,
)
from rlhf_megatron.runtime.rank_logs import redirect_output


@command
def main() -> int:
    """Return the exit status: 0 done, 2 for input that is not right."""
    check_environment(os.environ)
    redirect_output(os.environ)
    if was_refused():
        return INPUT_STATUS
    parser = ArgumentParser(
        description="Evaluate a recipe's model on its validation files, without training: mean@k, pass@k and maj@k.",
        epilog="For example: model.path=runs/NAME/export/step-100 evaluation.samples_per_prompt=8 "
        "evaluation.temperature=1.0",
    )
    add_recipe_arguments(parser)
    arguments = parser.parse_intermixed_args()
    recipe = load_evaluation(arguments.recipe, arguments.overrides)
    prepare_environment()  # before torch is imported
    say_that_imports_begin()
    from torch.distributed.elastic.multiprocessing.errors import record

    # torchrun shows the traceback of the rank that failed first
    return record(on_this_rank)(functools.partial(evaluate, recipe)) or 0


def evaluate(recipe: RolloutRecipe) -> int:
    """Do this rank's part."""
    check_installed()
    recipe = with_folders(recipe, weights=True)
    from rlhf_megatron.evaluation.standalone import evaluate as run

    run(recipe)
    return 0


if __name__ == "__main__":
    sys.exit(main())
