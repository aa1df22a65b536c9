"""Looks for layouts: python launch/plan.py RECIPE --world N [key.path=value ...]"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from rlhf_megatron.data.epochs import planned_in_steps
from rlhf_megatron.errors import UserError
from rlhf_megatron.planning.layout_search import Candidate, find_layouts, nearest_layout
from rlhf_megatron.planning.levers import Lever, find_levers
from rlhf_megatron.planning.model_folders import planned_architectures
from rlhf_megatron.planning.report import sent_between_hosts
from rlhf_megatron.planning.start_time import expected_start
from rlhf_megatron.planning.step_terms import step_terms
from rlhf_megatron.recipe import load_rl, role_ranks
from rlhf_megatron.recipe.arguments import add_recipe_arguments
from rlhf_megatron.recipe.hub_names import planned
from rlhf_megatron.runtime.command import ArgumentParser, command, number_of_gpus


@command
def main() -> int:
    """Return the exit status: 0 done, 1 where nothing fits, 2 for input that is not right."""
    parser = ArgumentParser(
        description="List layouts of a recipe that fit so many GPUs: the one whose steps are expected to be fastest, "
        "and below it the fastest of those that need less memory. Needs no GPU and no weights.",
        epilog="For example: recipes/qwen32b_dapo.yaml --world 64 cluster.gpu=H200",
    )
    add_recipe_arguments(parser)
    parser.add_argument("--world", required=True, help="the number of GPUs")
    parser.add_argument("--price", type=float, help="of a GPU for an hour, to reckon what the recipe's steps cost")
    parser.add_argument("--levers", action="store_true", help="list what else would make the steps faster, too")
    arguments = parser.parse_intermixed_args()
    world = number_of_gpus("--world", arguments.world)
    if arguments.price is not None and not 0 <= arguments.price < math.inf:
        raise UserError(f"--price={arguments.price}: must be 0 or more")
    recipe = planned_in_steps(planned(load_rl(arguments.recipe, arguments.overrides)))
    if not recipe.steps:
        raise UserError("epochs: the training files are not on this machine to count them; give steps too")
    candidates = find_layouts(recipe, world)
    if not candidates:
        nearest = nearest_layout(recipe, world)
        gpus = f"{world} GPUs of {recipe.cluster.gpu_memory_gb:g} GB"
        print(f"error: no layout fits {gpus}; {nearest}", file=sys.stderr)
        return 1
    show(table(candidates, world, recipe.steps, arguments.price))
    print(terms_line(candidates[0], world))
    print("the first:", " ".join(candidates[0].overrides) or "the recipe as it is")
    if arguments.levers:
        with Console(stderr=True).status("searching with each lever"):
            levers = find_levers(recipe, world)
        show_levers(candidates[0], levers, world, recipe.steps, arguments.price)
    return 0


def show(shown: Table) -> None:
    """Print a table as wide as it is: rich would cut what is wider than a file's 80 columns."""
    needed = Console(width=1000).measure(shown).maximum
    Console(width=max(needed, Console().width)).print(shown)


def show_levers(without: Candidate, levers: Sequence[Lever], world: int, steps: int, price: float | None) -> None:
    """Print the best layout ``without`` levers and with each, then what to change for each, or why it cannot be."""
    usable = [(lever.name, lever.candidate) for lever in levers if lever.candidate]
    print()
    rows = [("none", without), *usable]
    show(table([each for _, each in rows], world, steps, price, [name for name, _ in rows]))
    for lever in levers:
        changes = (*lever.overrides, *(lever.candidate.overrides if lever.candidate else ()))
        print(f"{lever.name}: {' '.join(changes) if lever.candidate else lever.refusal}")


def terms_line(candidate: Candidate, world: int) -> str:
    """Return seconds of a step, and of the start, that grow with the number of GPUs."""
    architectures = planned_architectures(candidate.recipe)
    terms = step_terms(candidate.recipe, architectures, world, candidate.time)
    start = sum(expected_start(candidate.recipe, architectures, world).values())
    return f"of a step: {', '.join(f'{name} {value:.2g}' for name, value in terms.items())} s; start {start:.0f} s"


def table(
    candidates: Sequence[Candidate], world: int, steps: int, price: float | None, levers: Sequence[str] = ()
) -> Table:
    """Return a row for each: time and speed of a step, what ``steps`` steps take and cost, the fullest phase's memory,
    GB of weights between hosts where there are several, and the layout; before them the name of each one's lever."""
    several = world > candidates[0].recipe.cluster.gpus_per_node
    layouts = Table(box=None, header_style="bold")
    if levers:
        layouts.add_column("lever", no_wrap=True)
    for name in (
        "s/step",
        "tok/s/GPU",
        "GPU-h",
        *(["cost"] if price is not None else []),
        "GB",
        *(["GB sent"] if several else []),
    ):
        layouts.add_column(name, justify="right", no_wrap=True)
    for name in ("actor", "recompute", "stream", "masters", "rollout"):
        layouts.add_column(name, no_wrap=True)
    for index, each in enumerate(candidates):
        hours, actor = each.time.seconds * steps * world / 3600, each.recipe.actor
        gpus = len(role_ranks(each.recipe, "actor", world))
        cost = [f"{hours * price:,.0f}"] if price is not None else []
        layouts.add_row(
            *levers[index : index + 1],
            f"{each.time.seconds:,.1f}",
            f"{each.time.speed(world):,.0f}",
            f"{hours:,.0f}",
            *cost,
            f"{each.memory:.0f}",
            *([sent_between_hosts(each.recipe, world)] if several else []),
            f"TP{actor.layout.tensor} PP{actor.layout.pipeline} DP{gpus // actor.layout.model_gpus}",
            actor.recompute.granularity,
            f"{actor.offload.streamed_optimizer:.0%}",
            "16-bit" if actor.optimizer and actor.optimizer.master_remainders else "32-bit",
            f"TP{each.recipe.rollout.layout.tensor}",
        )
    return layouts


if __name__ == "__main__":
    sys.exit(main())
