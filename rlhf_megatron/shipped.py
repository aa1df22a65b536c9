"""The files that come with the package, beside its modules: launch/, tools/ and recipes/.

They stand at the top of a checkout, and in the package itself where that is installed (setup.py).
"""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
SHIPPED = _PACKAGE if (_PACKAGE / "launch").is_dir() else _PACKAGE.parent
RECIPES = "recipes/"


def shipped_path(text: str) -> str:
    """Return a path as it is, unless it begins with recipes/, is not in the working directory, and is shipped.

    Also of ``FILE.py:NAME``. The shipped file's path is absolute.
    """
    if not text.startswith(RECIPES) or "\0" in text:
        return text
    name = text.partition(":")[0]
    return text if os.path.exists(name) or not os.path.exists(SHIPPED / name) else str(SHIPPED / text)


def recipe_file(text: str | Path, folder: Path = Path()) -> Path:
    """Return the file of a recipe: the path, relative to ``folder``, or if there is none the shipped recipe so named.

    ``qwen7b_grpo``, ``qwen7b_grpo.yaml``, ``recipes/qwen7b_grpo.yaml`` and ``overlays/dapo`` name shipped ones.
    """
    path, name = folder / text, str(text).removeprefix(RECIPES).removesuffix(".yaml")
    shipped = f"{SHIPPED / RECIPES / name}.yaml"
    is_name = not Path(name).is_absolute() and ".." not in Path(name).parts
    return Path(shipped) if is_name and not os.path.exists(path) and os.path.isfile(shipped) else path


def shipped_recipes() -> list[Path]:
    """Return the files of the whole recipes, without overlays."""
    return sorted((SHIPPED / RECIPES).glob("*.yaml"))
