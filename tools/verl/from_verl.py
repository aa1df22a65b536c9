"""Write the recipe that a command of verl asks for.

    python tools/verl/from_verl.py --output my.yaml algorithm.adv_estimator=grpo data.train_batch_size=256 ...

takes the arguments of `python3 -m verl.trainer.main_ppo`; in a script of verl's, put this command in its place and run
the script. Keys that are not given have verl's defaults, and each key that has no counterpart is told.

Here: the command line. Not here: reading verl's (verl_command.py), and what its keys mean (verl_sections.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml
from verl_command import Command, check, parse
from verl_sections import translate

from rlhf_megatron.errors import UserError
from rlhf_megatron.recipe import Recipe
from rlhf_megatron.recipe.load import make_recipe
from rlhf_megatron.runtime.command import ArgumentParser, command, path_argument


@command
def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 done, 2 for input that is not right."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=path_argument, required=True, help="the recipe to write")
    parser.add_argument("--rows", type=int, help="rows of the training files, where they are not on this machine")
    options, words = parser.parse_known_args(arguments)
    given = Command(parse(words))
    tree = translate(given, options.rows)
    nodes = given.count("trainer.nnodes", 1)
    check(given)
    recipe = make_recipe(tree, "the recipe that this makes")
    plain = recipe.model_dump(mode="json", exclude_defaults=True)
    try:
        options.output.write_text(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output: {options.output} cannot be written ({error.strerror})") from error
    for key in given.left():
        given.remark(key, "has no counterpart, or is not known")
    report(given, recipe, options.output, nodes)
    return 0


def report(given: Command, recipe: Recipe, output: Path, nodes: int) -> None:
    """Prints what is not as it was, and how the run is started."""
    for remark in given.remarks:
        print(f"not as in verl: {remark}", file=sys.stderr)
    gpus = recipe.cluster.gpus_per_node
    if not given.is_of_megatron:
        print(
            "no layout: FSDP cuts all weights over all GPUs, here tensor and pipeline parallelism cut the model; "
            f"`python launch/plan.py {output} --world {nodes * gpus} cluster.gpu=H100` looks for one",
            file=sys.stderr,
        )
    print(f"{output}\npython launch/train.py {output} --dry-run --world {nodes * gpus}")
    if nodes == 1:
        print(f"python launch/torchrun.py --standalone --nproc-per-node {gpus} launch/train.py {output}")
    else:
        print(f"python launch/submit.py {output} --nodes {nodes}")


if __name__ == "__main__":
    sys.exit(main())
