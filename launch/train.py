"""Trains a model by a recipe: launch/torchrun.py ... launch/train.py RECIPE [key.path=value ...] [--dry-run]"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

from rlhf_megatron.checkpoint.manifest import read_manifest
from rlhf_megatron.child_python import end_with_parent
from rlhf_megatron.compat.vllm.names import check_installed
from rlhf_megatron.errors import UserError, errors_of
from rlhf_megatron.recipe import AnyRecipe, RolloutRecipe, load_recipe
from rlhf_megatron.recipe.arguments import add_recipe_arguments
from rlhf_megatron.recipe.hub_names import planned, with_run_folders
from rlhf_megatron.rollout.vllm.process_environment import prepare_environment
from rlhf_megatron.runtime.command import (
    INPUT_STATUS,
    ArgumentParser,
    check_environment,
    command,
    number_of_gpus,
    on_this_rank,
    say_that_imports_begin,
    tell,
    was_refused,
)
from rlhf_megatron.runtime.rank_logs import redirect_output
from rlhf_megatron.runtime.signals import stop_signals


@command
def main() -> int:
    """Return the exit status: 0 done, 2 for input that is not right, 85 stopped and to be started again."""
    check_environment(os.environ)
    redirect_output(os.environ)
    if was_refused():
        return INPUT_STATUS
    parser = ArgumentParser(description=__doc__)
    add_recipe_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop; needs no GPU and no torchrun")
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|none|PATH",
        help="resume from the run's newest sound checkpoint if it has one (auto), start anew, or from a given one",
    )
    parser.add_argument("--preflight", action="store_true", help="check machines, files and rewards before training")
    parser.add_argument("--world", help="with --dry-run: the number of GPUs to plan for")
    arguments = parser.parse_intermixed_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if arguments.dry_run:
        return show_plan(planned(recipe), planned_world(arguments.world))
    if "RANK" in os.environ:
        end_with_parent()
    stop_signals.listen()
    prepare_environment(recipe.deterministic)  # before torch is imported
    say_that_imports_begin()
    from torch.distributed.elastic.multiprocessing.errors import record

    # torchrun shows the traceback of the rank that failed first
    return record(on_this_rank)(functools.partial(train, recipe, arguments.resume, arguments.preflight)) or 0


def show_plan(recipe: AnyRecipe, world_size: int) -> int:
    """Print the plan and what checks of files saw, then every mistake that was found; return the exit status."""
    from rlhf_megatron.data.epochs import planned_in_steps
    from rlhf_megatron.planning.model_folders import is_elsewhere
    from rlhf_megatron.planning.report import plan_errors, plan_text
    from rlhf_megatron.preflight.check import Check, check_lines, mistakes_of

    recipe = planned_in_steps(recipe)
    errors, checks, plan = plan_errors(recipe, world_size), list[Check](), list[str]()
    if is_elsewhere(recipe):
        files = [f"not checked: there is no {recipe.model.path}/config.json on this machine"]
    else:
        from rlhf_megatron.preflight.file_checks import file_checks  # and with it what training imports

        checks = file_checks(recipe)
        files = check_lines(checks)
    errors = errors or errors_of([lambda: plan.append(plan_text(recipe, world_size))])
    if plan:
        print("\n  ".join([f"{plan[0]}\nFiles", *files]))
    mistakes = [*map(str, errors), *mistakes_of(checks)]
    for mistake in dict.fromkeys(mistakes):
        tell(UserError(mistake))
    return INPUT_STATUS if mistakes else 0


def planned_world(asked: str | None) -> int:
    """Return the GPUs to plan for: those of ``--world``, or torchrun's; raises UserError where that is no number above
    0."""
    where, text = ("WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")) if asked is None else ("--world", asked)
    return number_of_gpus(where, text)


def train(recipe: AnyRecipe, resume: str, check_first: bool) -> int:
    """Run the recipe's loop on this rank; return the exit status."""
    run_folder = Path(recipe.run_root) / recipe.name
    if isinstance(recipe, RolloutRecipe):
        check_installed()
    # A preflight compares the nodes' files, so it needs them all.
    saved = functools.partial(commits_of_checkpoint, resume)
    recipe = with_run_folders(recipe, run_folder, saved, is_whole=check_first)
    from rlhf_megatron.loops.run import run

    return run(recipe, resume, check_first)


def commits_of_checkpoint(resume: str) -> dict[str, str]:
    """Return the commits of the hub's models that the run of a checkpoint began with; none where no checkpoint is
    named."""
    commits: dict[str, str] = {} if resume in ("auto", "none") else read_manifest(Path(resume)).state.get("hub", {})
    return commits


if __name__ == "__main__":
    sys.exit(main())
