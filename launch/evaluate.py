"""Evaluates a recipe's model: torchrun --nproc-per-node N launch/evaluate.py RECIPE [key.path=value ...]"""

from __future__ import annotations

import argparse
import functools
import os
import sys

from rlhf_megatron.errors import UserError
from rlhf_megatron.loops.command import on_this_rank, tell
from rlhf_megatron.recipe import Recipe, load_recipe
from rlhf_megatron.rollout.environment import prepare_environment
from rlhf_megatron.runtime.rank_logs import redirect_output


def main() -> int:
    """Returns the exit status: 0 done, 2 for input that is not right."""
    redirect_output(os.environ)
    parser = argparse.ArgumentParser(
        description="Evaluate a recipe's model on its validation files, without training: mean@k, pass@k and maj@k.",
        epilog="For example: model.path=runs/NAME/export/step-100 evaluation.samples_per_prompt=8 "
        "evaluation.temperature=1.0",
    )
    parser.add_argument("recipe", help="a YAML file, see recipes/")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="replace a value of the recipe")
    arguments = parser.parse_intermixed_args()
    try:
        recipe = load_recipe(arguments.recipe, arguments.overrides)
    except UserError as error:
        return tell(error)
    prepare_environment()  # before torch is imported
    from torch.distributed.elastic.multiprocessing.errors import record

    # torchrun shows the traceback of the rank that failed first
    return record(on_this_rank)(functools.partial(evaluate, recipe)) or 0


def evaluate(recipe: Recipe) -> int:
    """Does this rank's part."""
    from rlhf_megatron.loops.evaluation import evaluate as run

    run(recipe)
    return 0


if __name__ == "__main__":
    sys.exit(main())
