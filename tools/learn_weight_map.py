"""Learns where vLLM's ranks hold a model's weights: python tools/learn_weight_map.py RECIPE [key.path=value ...]"""

from __future__ import annotations

import sys

from rich.progress import Progress

from rlhf_megatron.errors import UserError
from rlhf_megatron.models.weight_map import has_rollout_table
from rlhf_megatron.planning.model_folders import planned_architectures, planning_folder
from rlhf_megatron.recipe import load_rl
from rlhf_megatron.recipe.arguments import add_recipe_arguments
from rlhf_megatron.recipe.hub_names import planned
from rlhf_megatron.regather.learned_rollout import learn_without_ranks
from rlhf_megatron.rollout.vllm.process_environment import prepare_environment
from rlhf_megatron.runtime.command import ArgumentParser, command


@command
def main() -> int:
    """Return the exit status: 0 done, 2 for input that is not right."""
    parser = ArgumentParser(
        description="Learn where vLLM's ranks hold the weights of a recipe's model, as the first run does, so that a "
        "dry run knows the bytes of a weight sync before. Needs vLLM, no GPU and no weights.",
        epilog="For example: recipes/glm45_air_grpo.yaml",
    )
    add_recipe_arguments(parser)
    arguments = parser.parse_intermixed_args()
    recipe = planned(load_rl(arguments.recipe, arguments.overrides))
    architecture = planned_architectures(recipe)["actor"]
    if has_rollout_table(architecture):
        raise UserError(f"{architecture.family}: has a table of vLLM's weights; there is nothing to learn")
    prepare_environment()
    layout, dtype = recipe.rollout.layout, recipe.rollout.dtype or recipe.model.dtype
    learning = learn_without_ranks(
        architecture, planning_folder(recipe), layout.tensor, layout.expert_parallel, dtype, recipe.run_root
    )
    with Progress(transient=True) as progress:
        for _ in progress.track(learning, total=layout.tensor, description="vLLM's ranks"):
            pass
    print(f"learned the weights of {layout.tensor} of vLLM's ranks; kept under {recipe.run_root}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
