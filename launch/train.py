"""Trains a model by a recipe: torchrun --nproc-per-node N launch/train.py RECIPE [key.path=value ...] [--dry-run]"""

from __future__ import annotations

import argparse
import os
import sys

from torch.distributed.elastic.multiprocessing.errors import record

from rlhf_megatron.recipe import Recipe, load_recipe, unsupported
from rlhf_megatron.recipe.errors import UserError
from rlhf_megatron.rollout.environment import prepare_environment


def main() -> int:
    """Returns the exit status: 0 done, 2 for input that is not right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", help="a YAML file, see recipes/")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="replace a value of the recipe")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop; needs no GPU and no torchrun")
    parser.add_argument("--world", type=int, help="with --dry-run: the number of GPUs to plan for")
    arguments = parser.parse_intermixed_args()
    try:
        recipe = load_recipe(arguments.recipe, arguments.overrides)
        if arguments.dry_run:
            from rlhf_megatron.loops.planning import plan_text

            print(plan_text(recipe, arguments.world or int(os.environ.get("WORLD_SIZE", "1"))))
            return 0
    except UserError as error:
        return tell(error)
    return train(recipe) or 0


@record  # torchrun shows the traceback of the rank that failed first
def train(recipe: Recipe) -> int:
    """Runs the recipe's loop on this rank, in step with all others; returns the exit status."""
    try:
        lines = unsupported(recipe)
        if lines:
            raise UserError("this version cannot do what the recipe asks for:\n  " + "\n  ".join(lines))
        prepare_environment()
        from rlhf_megatron.loops.run import run

        run(recipe)
    except UserError as error:
        return tell(error)
    return 0


def tell(error: UserError) -> int:
    """Prints the error in one line; where all ranks fail alike, torchrun's first one speaks."""
    rank = os.environ.get("RANK")
    where = f"[rank {rank}] " if rank not in (None, "0") else ""
    print(f"{where}error: {error}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
