"""List the recipes that come along, or print one to begin one's own with: python tools/recipes.py [NAME]"""

from __future__ import annotations

import sys

from rlhf_megatron.errors import RecipeError
from rlhf_megatron.recipe.arguments import complete_recipe
from rlhf_megatron.runtime.command import ArgumentParser, command
from rlhf_megatron.shipped import RECIPES, SHIPPED, recipe_file, shipped_recipes
from rlhf_megatron.untrusted import read_text, shown


@command
def main() -> int:
    """Return the exit status: 0 done, 2 for a name that no recipe has."""
    parser = ArgumentParser(description="List the recipes that come along, or print one to begin one's own with.")
    named = parser.add_argument("name", nargs="?", help="such as qwen7b_grpo, or overlays/dapo")
    named.completer = complete_recipe  # type: ignore[attr-defined]
    name = parser.parse_args().name
    print(listing() if name is None else text_of(name), end="")
    return 0


def listing() -> str:
    """Return a line for each recipe, and where the schema for editors is."""
    files = shipped_recipes()
    width = max(len(file.stem) for file in files)
    lines = [f"{file.stem:<{width}}  {first_remark(file.read_text(encoding='utf-8'))}" for file in files]
    return "\n".join([*lines, "", f"# yaml-language-server: $schema={SHIPPED / RECIPES / 'schema.json'}", ""])


def first_remark(text: str) -> str:
    """Return the first sentence of a recipe's first lines, which are comments."""
    remark = ""
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        remark += " " + line.removeprefix("#").strip()
    return remark.strip().partition(". ")[0].partition(": python ")[0].rstrip(".:")


def text_of(name: str) -> str:
    """Return the text of a shipped recipe or overlay; raises RecipeError where there is none of that name."""
    file = recipe_file(name, SHIPPED / RECIPES)
    if not file.is_file():
        raise RecipeError(f"{shown(name)}: no recipe that comes along; without a name all are listed")
    return read_text(str(file), RecipeError, 2**20)


if __name__ == "__main__":
    sys.exit(main())
