"""Checks a recipe on the machines that are to run it, before a GPU-hour is spent.

    python launch/torchrun.py --nproc-per-node N tools/preflight.py RECIPE [key.path=value] [--json FILE] [--seconds S]

Shows one table; the exit status is 0 where no check failed, 1 where one did, 2 for a recipe that is not right. Start it
exactly as the run itself: the same launcher, nodes, environment and overrides. What it checks: docs/preflight.md.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rlhf_megatron.errors import UserError
from rlhf_megatron.recipe import load_recipe
from rlhf_megatron.recipe.arguments import add_recipe_arguments
from rlhf_megatron.recipe.hub_names import with_folders
from rlhf_megatron.recipe.section import LONGEST_SECONDS
from rlhf_megatron.rollout.vllm.process_environment import prepare_environment
from rlhf_megatron.runtime.command import INPUT_STATUS, ArgumentParser, check_environment, command, was_refused


@command
def main() -> int:
    """Return the exit status; after a failed check the process ends at once, as a thread of it may hang for ever."""
    check_environment(os.environ)
    if was_refused():
        return INPUT_STATUS
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_recipe_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the checks as JSON")
    parser.add_argument("--seconds", type=float, default=120.0, help="time of each of the two parts (default: 120)")
    arguments = parser.parse_intermixed_args()
    prepare_environment()  # before torch is imported
    from rlhf_megatron.preflight.preflight import preflight
    from rlhf_megatron.topology.world import leave_world

    if not 0 < arguments.seconds <= LONGEST_SECONDS:
        raise UserError(f"--seconds {arguments.seconds:g}: must be a time above 0")
    recipe = with_folders(load_recipe(arguments.recipe, arguments.overrides), weights=True)
    verdict = preflight(recipe, arguments.seconds, arguments.json)
    sys.stdout.flush()
    if not verdict:
        os._exit(1)
    leave_world()
    return 0


if __name__ == "__main__":
    sys.exit(main())
