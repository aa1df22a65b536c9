"""Trains a model by a recipe: torchrun --nproc-per-node N launch/train.py RECIPE [key.path=value ...] [--dry-run]"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from rlhf_megatron.recipe import Recipe, load_recipe, unsupported
from rlhf_megatron.recipe.errors import UserError
from rlhf_megatron.rollout.environment import prepare_environment

# torchrun looks at its ranks every 0.1 s and ends them all when one has failed.
SECONDS_UNTIL_ENDED = 2.0


def main() -> int:
    """Returns the exit status: 0 done, 2 for input that is not right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", help="a YAML file, see recipes/")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="replace a value of the recipe")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop; needs no GPU and no torchrun")
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|none|PATH",
        help="go on from the run's newest sound checkpoint if it has one (auto), start anew, or from a given one",
    )
    parser.add_argument("--world", type=int, help="with --dry-run: the number of GPUs to plan for")
    arguments = parser.parse_intermixed_args()
    try:
        recipe = load_recipe(arguments.recipe, arguments.overrides)
        if arguments.dry_run:
            from rlhf_megatron.loops.planning import plan_text

            print(plan_text(recipe, arguments.world or int(os.environ.get("WORLD_SIZE", "1"))))
            return 0
        refuse_unsupported(recipe)
    except UserError as error:
        return tell(error)
    prepare_environment()  # before torch is imported
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(train)(recipe, arguments.resume) or 0  # torchrun shows the traceback of the rank that failed first


def refuse_unsupported(recipe: Recipe) -> None:
    """Raises UserError with one line for each key that asks for what cannot be done."""
    lines = unsupported(recipe)
    if lines:
        raise UserError("this version cannot do what the recipe asks for:\n  " + "\n  ".join(lines))


def train(recipe: Recipe, resume: str) -> int:
    """Runs the recipe's loop on this rank, in step with all others; returns the exit status."""
    try:
        from rlhf_megatron.loops.run import run

        run(recipe, resume)
    except UserError as error:
        return tell(error)
    except Exception:
        # Where another rank has died, this one's lost connection explains nothing: torchrun ends it while it sleeps.
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            time.sleep(SECONDS_UNTIL_ENDED)
        raise
    return 0


def tell(error: UserError) -> int:
    """Prints the error in one line, once where all ranks fail alike; returns the exit status."""
    rank = os.environ.get("RANK")
    line = f"error: {error}" if rank in (None, "0") else f"[rank {rank}] error: {error}"
    if rank is not None:
        from rlhf_megatron.topology.world import first_to_say

        report = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if report:  # what torchrun shows of this rank at the end
            cause = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
            Path(report).write_text(json.dumps({"message": cause}), encoding="utf-8")
        if not first_to_say(str(error)):
            return 2
    print(line, file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
