"""The versions of a run's recipe: recipe.yaml is the newest, and each earlier one says how far it was used.

    RUN/recipe.until-step-40.yaml    of the steps up to 40
    RUN/recipe.yaml                  of those since

Where a run resumes from before a change, the versions of the steps that are repeated are moved aside as
NAME.previous-K.yaml.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rlhf_megatron.durable import write_text
from rlhf_megatron.monitor.run_files import FilesOfRun
from rlhf_megatron.monitor.run_folder import RunFolder
from rlhf_megatron.recipe.differences import differing_values

_EARLIER = re.compile(r"recipe\.until-step-([0-9]{1,15})\.yaml")
NEWEST = "recipe.yaml"


class Version(NamedTuple):
    """A recipe file of a run and the last step that it holds for; infinity for the newest."""

    last_step: float
    name: str


def versions_of(folder: Path) -> list[Version]:
    """Return the versions in a run's folder, the oldest first."""
    names = os.listdir(folder) if folder.is_dir() else []
    earlier = [Version(int(match[1]), name) for name in names if (match := _EARLIER.fullmatch(name))]
    newest = [Version(math.inf, NEWEST)] if NEWEST in names else []
    return sorted(earlier) + newest


def version_at(folder: Path, step: int) -> str | None:
    """Return the name of the recipe file that ``step`` was made with; None where there is none."""
    return next((version.name for version in versions_of(folder) if version.last_step >= step), None)


class Written(NamedTuple):
    """The outcome of ``write_recipe``.

    ``changes``: (key, [value before, value now]) from the recipe of the checkpoint to that of the run;
    ``earlier``: the file of the former, where there are any; ``moved``: files of repeated steps, moved aside.
    """

    changes: list[tuple[str, list[Any]]]
    earlier: Path | None
    moved: list[Path]


def write_recipe(run: RunFolder, text: str, step: int, source: Path) -> Written:
    """Write recipe.yaml of a run that resumes after ``step``, and keep the recipe of the steps until then.

    Args:
        run: the run's folder.
        text: its resolved recipe.
        step: the last one that is kept; 0 where the run begins.
        source: the folder of the run whose checkpoint it resumes from, mostly its own.

    Raises OSError where a file cannot be written.
    """
    earlier = version_at(source, step) if step else None
    of_source = FilesOfRun(source)
    before, earlier_text = (of_source.recipe(earlier), of_source.text(earlier)) if earlier else ({}, "")
    now = yaml.safe_load(text)
    changes = differing_values([before, now]) if before else []
    repeated = [version.name for version in versions_of(run.path) if version.last_step >= step]
    foreign = [name for name in repeated if not _is_one_of(FilesOfRun(run.path).recipe(name), before, now)]
    moved = [run.move_aside(run.path / name) for name in foreign]
    kept = run.path / f"recipe.until-step-{step}.yaml"
    if changes:
        write_text(kept, earlier_text)
    write_text(run.recipe, text)
    for name in set(repeated) - {*foreign, NEWEST, *([kept.name] if changes else [])}:
        (run.path / name).unlink()  # one of the two that were just written has its content
    return Written(changes, kept if changes else None, moved)


def _is_one_of(recipe: dict[str, Any], *others: dict[str, Any]) -> bool:
    return any(recipe and other and not differing_values([recipe, other]) for other in others)
