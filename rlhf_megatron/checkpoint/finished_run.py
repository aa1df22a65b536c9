"""Finished runs, with nothing left to do, as a folder tells before anything is built: Slurm may start one again."""

from __future__ import annotations

from rlhf_megatron.checkpoint.manifest import read_manifest
from rlhf_megatron.checkpoint.storage import damage, list_checkpoints, step_of
from rlhf_megatron.errors import CheckpointError
from rlhf_megatron.monitor.run_files import FilesOfRun
from rlhf_megatron.monitor.run_folder import RunFolder
from rlhf_megatron.recipe import Recipe
from rlhf_megatron.recipe.differences import differing_values
from rlhf_megatron.redaction import redact
from rlhf_megatron.runtime.recovery import RecoveryLog, since_last_beginning


def how_to_go_on(recipe: Recipe) -> str:
    """Say what to change in a run without anything left to do; its length is in steps or in epochs."""
    length = "steps" if recipe.epochs is None else "epochs"
    return f"for more raise {length}; for a new run use another name, or --resume none"


def finished_line(recipe: Recipe, resume: str, recovery: RecoveryLog) -> str | None:
    """Say that the run is finished, in one line; None where something is left to do, or cannot be ruled out.

    It is finished where its last attempt has come to its very end (after export, trackers and report), with this
    recipe, and what it has made is still there: the last step's checkpoint, and the export that the recipe asks for.
    Reads files of the run's folder alone, and no weights.
    """
    if resume != "auto" and not recovery.of_this_launch():  # another beginning, of a launch's first attempt
        return None
    lines = recovery.lines()
    done = next((line for line in since_last_beginning(lines) if line["what"] == "done"), None)
    if done is None:
        return None
    folder, step = RunFolder(recipe.run_root, recipe.name), int(done["step"])
    own_budgets = {key for line in lines for kind in ("found", "reduced") for key in line.get(kind, ())}
    if _has_changed(recipe, folder, own_budgets) or not _is_saved(folder, step):
        return None
    if recipe.checkpoint.export_at_end and not folder.export(step).is_dir():
        return None
    return f"{folder.path}: all {step} steps are done, and nothing is left to write: {how_to_go_on(recipe)}"


def _has_changed(recipe: Recipe, folder: RunFolder, own_budgets: set[str]) -> bool:
    """Return whether another recipe has made the last step; ``own_budgets`` are keys that runs set themselves."""
    before, now = FilesOfRun(folder.path).recipe(), redact(recipe.model_dump(mode="json"))
    counted = {"steps"} if recipe.epochs is not None else set()  # from data that nobody has opened yet
    return any(key not in own_budgets | counted for key, _ in differing_values([before, now]))


def _is_saved(folder: RunFolder, step: int) -> bool:
    """Return whether the newest checkpoint is of that step, with all of its files."""
    try:
        newest = next(iter(list_checkpoints(folder.checkpoints)), None)
        if newest is None or step_of(newest) != step:
            return False
        return damage(newest, read_manifest(newest).files, reads=False) is None
    except (CheckpointError, OSError):  # a resume says what is wrong, and what becomes of it
        return False
