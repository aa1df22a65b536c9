"""Looks for layouts: python launch/plan.py RECIPE --world N [key.path=value ...]"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from rlhf_megatron.errors import UserError
from rlhf_megatron.planning.layout_search import Candidate, find_layouts, nearest_layout
from rlhf_megatron.recipe import load_rl, role_ranks
from rlhf_megatron.runtime.command import ArgumentParser, command, number_of_gpus


@command
def main() -> int:
    """Returns the exit status: 0 done, 1 where nothing fits, 2 for input that is not right."""
    parser = ArgumentParser(
        description="List layouts of a recipe that fit so many GPUs: the one whose steps are expected to be fastest, "
        "and below it the fastest of those that need less memory. Needs no GPU and no weights.",
        epilog="For example: recipes/qwen32b_dapo.yaml --world 64 cluster.gpu=H200 cluster.gpu_memory_gb=140",
    )
    parser.add_argument("recipe", help="a YAML file, see recipes/")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="replace a value of the recipe")
    parser.add_argument("--world", required=True, help="the number of GPUs")
    parser.add_argument("--price", type=float, help="of a GPU for an hour, to reckon what the recipe's steps cost")
    arguments = parser.parse_intermixed_args()
    world = number_of_gpus("--world", arguments.world)
    if arguments.price is not None and not 0 <= arguments.price < math.inf:
        raise UserError(f"--price={arguments.price}: must be 0 or more")
    recipe = load_rl(arguments.recipe, arguments.overrides)
    found = find_layouts(recipe, world)
    nearest = "" if found else nearest_layout(recipe, world)
    if not found:
        gpus = f"{world} GPUs of {recipe.cluster.gpu_memory_gb:g} GB"
        print(f"error: no layout fits {gpus}; {nearest}", file=sys.stderr)
        return 1
    shown = table(found, world, recipe.steps, arguments.price)
    needed = Console(width=1000).measure(shown).maximum  # rich would cut what is wider than a file's 80 columns
    Console(width=max(needed, Console().width)).print(shown)
    print("the first:", " ".join(found[0].overrides) or "the recipe as it is")
    return 0


def table(candidates: Sequence[Candidate], world: int, steps: int, price: float | None) -> Table:
    """A row for each: time and speed of a step, what ``steps`` steps take and cost, the fullest phase's memory, and the
    layout."""
    found = Table(box=None, header_style="bold")
    for name in ("s/step", "tok/s/GPU", "GPU-h", *(["cost"] if price is not None else []), "GB"):
        found.add_column(name, justify="right", no_wrap=True)
    for name in ("actor", "recompute", "stream", "rollout"):
        found.add_column(name, no_wrap=True)
    for each in candidates:
        hours, actor = each.time.seconds * steps * world / 3600, each.recipe.actor
        gpus = len(role_ranks(each.recipe, "actor", world))
        cost = [f"{hours * price:,.0f}"] if price is not None else []
        found.add_row(
            f"{each.time.seconds:,.1f}",
            f"{each.time.speed(world):,.0f}",
            f"{hours:,.0f}",
            *cost,
            f"{each.memory:.0f}",
            f"TP{actor.layout.tensor} PP{actor.layout.pipeline} DP{gpus // actor.layout.model_gpus}",
            actor.recompute.granularity,
            f"{actor.offload.streamed_optimizer:.0%}",
            f"TP{each.recipe.rollout.layout.tensor}",
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
