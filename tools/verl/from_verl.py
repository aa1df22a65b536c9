"""Write the recipe that a command of verl asks for.

    python tools/verl/from_verl.py --output my.yaml algorithm.adv_estimator=grpo data.train_batch_size=256 ...

takes the arguments of ``python3 -m verl.trainer.main_ppo``, and its ``-m MODULE``; in a script of verl's, put this
command in the place of python3. Keys that are not given have verl's defaults. The exit status is 1 where keys were
refused: the recipe, then, is that of the others, and each refused key is named on stderr and in the recipe's first
lines.

Here: the command line. Not here: reading verl's (verl_command.py, verl_compose.py), and what its keys mean
(verl_sections.py, verl_algorithm.py, verl_roles.py, verl_keys.tsv).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from verl_command import ROLES, Command, judge
from verl_compose import read_command
from verl_sections import translate

from rlhf_megatron.errors import UserError
from rlhf_megatron.planning.layout_search import find_layouts, nearest_layout
from rlhf_megatron.recipe import Recipe, RLRecipe
from rlhf_megatron.recipe.hub_names import planned, with_names
from rlhf_megatron.recipe.load import apply_override, make_recipe, require_rl
from rlhf_megatron.runtime.command import ArgumentParser, command, path_argument

OURS = ("cluster.", "model.config=")


@command
def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 0 done, 1 where keys were refused, 2 for input that is not right."""
    parser = ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="cluster.KEY=VALUE and model.config=FOLDER (or OWNER/NAME) are keys of the recipe, and not verl's.",
        allow_abbrev=False,
    )
    parser.add_argument("--output", type=path_argument, required=True, help="the recipe to write")
    parser.add_argument("--rows", type=int, help="rows of the training files, where they are not on this machine")
    parser.add_argument("--plan", action="store_true", help="write the layout that launch/plan.py finds")
    parser.add_argument("-m", dest="module", default="verl.trainer.main_ppo", help="verl's trainer; default: main_ppo")
    parser.add_argument("-u", action="store_true", help="Python's, without effect here")
    parser.add_argument("-X", metavar="OPTION", help="Python's, without effect here")
    parser.add_argument("--config-path", help="Hydra's; other files than verl's own need hydra-core")
    parser.add_argument("--config-name", help="Hydra's")
    options, words = parser.parse_known_args(arguments)
    ours = [word for word in words if word.startswith(OURS)]
    verls = [word for word in words if word not in ours]
    given = read_command(options.module, options.config_path, options.config_name, verls)
    tree, world = translate(given, options.rows)
    judge(given)
    for word in ours:
        apply_override(tree, word)
    tell(given)
    recipe: Recipe = make_recipe(tree, "the recipe that this makes")
    if options.plan:
        recipe = with_names(with_fastest_layout(planned(recipe), world), recipe)
    write(options.output, recipe, given)
    report(given, recipe, options.output, world, is_planned=options.plan)
    return 1 if given.refusals else 0


def with_fastest_layout(recipe: Recipe, world: int) -> Recipe:
    """Return the recipe with the layout that is expected to be fastest on ``world`` GPUs, H100 where it names none.

    What a plan keeps of the command's layout, such as cuts of sequences, is left out where nothing fits with it, and
    then tokens_per_gpu is auto, where one row at a time fits.
    Raises UserError where none fits, or the model's config.json is not there.
    """
    known = require_rl(recipe).model_dump(mode="json")
    known["cluster"]["gpu"] = recipe.cluster.gpu or "H100"
    whole = RLRecipe.model_validate(known)
    for each in (whole, RLRecipe.model_validate(_without_cuts(known))):
        if candidates := find_layouts(each, world):
            return candidates[0].recipe
    short = _with_tokens(_without_cuts(known), whole.longest_sequence)
    if candidates := find_layouts(short, world):
        return _with_tokens(candidates[0].recipe.model_dump(mode="json"), "auto")
    gpus = f"{world} GPUs of {recipe.cluster.gpu_memory_gb:g} GB"
    raise UserError(f"--plan: no layout fits {gpus}; {nearest_layout(short, world)}")


def _without_cuts(values: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's plain values without what a plan keeps: cuts of sequences, and layouts of roles but the
    actor."""
    sections = {role: {**values[role], "layout": None} for role in ROLES.values() if values.get(role)}
    return values | sections | {"actor": {**values["actor"], "layout": {}}}


def _with_tokens(values: dict[str, Any], tokens: int | str) -> RLRecipe:
    """Return the recipe of plain values, with the same micro-batches in all roles."""
    sections = {role: {**values[role], "tokens_per_gpu": tokens} for role in ROLES.values() if values.get(role)}
    sections["actor"]["logprob_tokens_per_gpu"] = None
    return RLRecipe.model_validate(values | sections)


def write(output: Path, recipe: Recipe, given: Command) -> None:
    """Write the recipe, below the keys of the command that it does not have."""
    plain = recipe.model_dump(mode="json", exclude_defaults=True)
    refused = "".join(f"# refused: {line}\n" for line in given.refusals)
    try:
        output.write_text(refused + yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output: {output} cannot be written ({error.strerror})") from error


def tell(given: Command) -> None:
    """Print what is not as it was."""
    for remark in given.remarks:
        print(f"not as in verl: {remark}", file=sys.stderr)
    for refusal in given.refusals:
        print(f"refused: {refusal}", file=sys.stderr)


def report(given: Command, recipe: Recipe, output: Path, world: int, is_planned: bool) -> None:
    """Print how the run is started."""
    gpus = recipe.cluster.gpus_per_node
    if not given.is_of_megatron and not is_planned:
        print(
            "no layout: FSDP cuts all weights over all GPUs, here tensor and pipeline parallelism cut the model; "
            "--plan finds one",
            file=sys.stderr,
        )
    print(f"{output}\npython launch/train.py {output} --dry-run --world {world}")
    if world <= gpus:
        print(f"python launch/torchrun.py --standalone --nproc-per-node {world} launch/train.py {output}")
    else:
        print(f"python launch/submit.py {output} --nodes {-(-world // gpus)}")


if __name__ == "__main__":
    sys.exit(main())
