"""Names of the Hugging Face hub in a recipe in the place of folders: at which commits, and the folders for them.

    RUN/hub.json    {"Qwen/Qwen2.5-7B-Instruct@main": COMMIT, ...}

The first process to start a run writes that file; all others and all later attempts take the commits from there. Not
here: the hub (hub.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rlhf_megatron.errors import RecipeError
from rlhf_megatron.hub import (
    CODE,
    DEFAULT_REVISION,
    DESCRIPTION,
    WEIGHTS,
    Repository,
    commit_of,
    folder_of,
    is_hub_name,
    lacks,
    local_folder,
    patiently,
)
from rlhf_megatron.hub_arrival import arriving_folder
from rlhf_megatron.recipe.recipe import Recipe
from rlhf_megatron.untrusted import parse_json, read_text, reason_of, shown

FILE = "hub.json"
Commits = dict[str, str]
# Sections, and the keys in them that take a folder; ``revision`` beside them is that of ``path``.
_FOLDERS = (
    ("model", "path"),
    ("model", "tokenizer"),
    ("reference", "path"),
    ("critic", "path"),
    ("reward_model", "path"),
    ("reward_model", "tokenizer"),
    ("rollout.speculative", "path"),
    ("judge", "path"),
    ("judge", "tokenizer"),
)
_Recipe = TypeVar("_Recipe", bound=Recipe)


class _Place(NamedTuple):
    """A key of a recipe with a name in it."""

    section: str
    key: str
    repository: Repository


def with_folders(
    recipe: _Recipe, weights: bool, commits: Mapping[str, str] | None = None, waits: Sequence[float] | None = None
) -> _Recipe:
    """Return the recipe with folders of the cache in the place of names; what is missing there is downloaded.

    Args:
        recipe: of any command.
        weights: download weights too, not configurations and tokenizers alone.
        commits: of repositories, by name@revision; others are looked up.
        waits: None: all is there then. Else weights that the roles read may still come, see ``arriving_folder``.

    Raises:
        RecipeError: a revision is given for a folder; or, before weights are asked for, a repository has none.
        HubError: see ``folder_of``.
    """
    patterns = [*DESCRIPTION, *(CODE if recipe.model.trust_remote_code else ())]
    values: dict[str, dict[str, Any]] = {}
    places = list(_places(recipe))
    judges = {each.repository.text for each in places if each.section == "judge"}  # vLLM looks for all of it at once
    for section, key, repository in places:
        commit = (commits or {}).get(repository.text) or commit_of(repository)
        needs_weights = key == "path" and not recipe.model.random_weights
        with_weights = weights and needs_weights
        if with_weights and waits is not None and repository.text not in judges:
            folder = arriving_folder(repository, commit, patterns, WEIGHTS, waits)
        else:
            folder = folder_of(repository, commit, [*patterns, *(WEIGHTS if with_weights else ())])
        if needs_weights and not weights and lacks(repository, commit, WEIGHTS):
            raise RecipeError(
                f"{section}.{key}: {shown(repository.text)} has no {WEIGHTS[0]}, and no other weights are read; choose "
                "another repository or revision"
            )
        values.setdefault(section, {})[key] = str(folder)
    return _with_values(recipe, values)


def _section(recipe: Recipe, name: str) -> Any:
    """Return a section, perhaps one within another; None where the recipe has none."""
    found: Any = recipe
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _with_values(recipe: _Recipe, values: Mapping[str, Mapping[str, Any]]) -> _Recipe:
    """Return the recipe with other values of keys, by section."""
    for name, given in values.items():
        outer, _, inner = name.partition(".")
        section = _section(recipe, outer)
        update = {inner: _section(recipe, name).model_copy(update=given)} if inner else given
        recipe = recipe.model_copy(update={outer: section.model_copy(update=update)})
    return recipe


def planned(recipe: _Recipe) -> _Recipe:
    """Return the recipe for a plan, which needs configurations alone, and model.config's alone where it is given.

    Raises HubError: see ``folder_of``; RecipeError: see ``with_folders``.
    """
    if recipe.model.config is None:
        return with_folders(recipe, weights=False)
    folder = local_folder(recipe.model.config, "model.config", patterns=["config.json"])
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"config": folder})})


def with_names(recipe: _Recipe, named: Recipe) -> _Recipe:
    """Return a recipe whose keys that take a folder are those of ``named``: of ``planned`` before it was planned."""
    values: dict[str, dict[str, Any]] = {}
    for name, key in (*_FOLDERS, ("model", "config")):
        given = dict(_section(named, name) or ())
        if _section(recipe, name) is not None and key in given:
            values.setdefault(name, {})[key] = given[key]
    return _with_values(recipe, values)


def with_run_folders(recipe: _Recipe, run: Path, saved: Callable[[], Commits], is_whole: bool = False) -> _Recipe:
    """Return ``with_folders`` of a run, at the commits that it began with; weights may still come.

    Args:
        recipe: the run's.
        run: its folder, where the commits are written.
        saved: gives those of the checkpoint to resume from, where another run's is named.
        is_whole: wait for the weights.

    Raises:
        RecipeError: see ``with_folders``; or the commits cannot be written.
        HubError: see ``folder_of``.
    """
    places = list(_places(recipe))
    if not places:
        return recipe
    known = recorded(run) or saved()
    network = recipe.retry.network
    waits = [network.seconds_before(retry) for retry in range(network.max_retries)]

    def fetch() -> _Recipe:
        repositories = [each.repository for each in places]
        wanted = {each.text: known.get(each.text) or commit_of(each) for each in repositories}
        return with_folders(recipe, True, _record(run, wanted), None if is_whole else waits)

    return patiently(fetch, waits)


def recorded(run: Path) -> Commits:
    """Return the commits that a run began with, by name@revision; nothing where it has none.

    Raises RecipeError where the file is damaged.
    """
    path = run / FILE
    if not path.is_file():
        return {}
    content = parse_json(read_text(path, RecipeError), str(path), RecipeError)
    if not isinstance(content, dict) or not all(isinstance(commit, str) for commit in content.values()):
        raise RecipeError(f"{shown(path)}: has no commits of repositories; remove it to look them up again")
    return content


def _record(run: Path, commits: Commits) -> Commits:
    """Write the commits, unless another process has done so; return those that hold."""
    path, own = run / FILE, run / f".{FILE}.{os.getpid()}"
    try:
        run.mkdir(parents=True, exist_ok=True)
        own.write_text(json.dumps(commits, indent=1) + "\n", encoding="utf-8")
        try:
            os.link(own, path)  # which fails where the file is there
        except FileExistsError:
            before = recorded(run)
            if commits.keys() <= before.keys():
                return before
            commits = commits | before
            own.write_text(json.dumps(commits, indent=1) + "\n", encoding="utf-8")
            os.replace(own, path)
        return commits
    except OSError as error:
        raise RecipeError(f"run_root: {shown(path)} cannot be written ({reason_of(error)}); choose another") from error
    finally:
        own.unlink(missing_ok=True)


def _places(recipe: Recipe) -> Iterator[_Place]:
    """Yield the keys of a recipe that have names; raises RecipeError for a revision of what is none."""
    for name, key in _FOLDERS:
        values = dict(_section(recipe, name) or ())
        value, revision = values.get(key), values.get("revision") if key == "path" else None
        if value is not None and is_hub_name(value):
            yield _Place(name, key, Repository(value, revision or DEFAULT_REVISION, f"{name}.{key}"))
        elif revision is not None:
            raise RecipeError(
                f"{name}.revision={shown(revision)}: {shown(value)} is no name on the hub (OWNER/NAME), or there is a "
                "folder of that name; leave it out"
            )
