"""The schedule of a run: which steps it evaluates, exports and saves, by its recipe. Pure functions."""

from __future__ import annotations

from rlhf_megatron.recipe import Recipe


def is_last(recipe: Recipe, step: int) -> bool:
    """Return whether the run ends with this step."""
    return step == recipe.steps


def evaluation_is_due(recipe: Recipe, step: int) -> bool:
    """Return whether an evaluation follows this step; step 0 is the start of a run that does not resume."""
    if step == 0:
        return recipe.evaluation.at_start
    interval = recipe.evaluation.interval
    return bool(interval and step % interval == 0) or (is_last(recipe, step) and recipe.evaluation.at_end)


def export_is_due(recipe: Recipe, step: int) -> bool:
    """Return whether this step is exported; the export at the end of the run is separate."""
    interval = recipe.checkpoint.export_interval
    return bool(interval and step % interval == 0) and not is_last(recipe, step)


def save_is_due(recipe: Recipe, step: int, is_skipped: bool) -> bool:
    """Return whether a checkpoint follows this step, unless the run is asked to stop, which always saves.

    A step that ``is_skipped`` is not saved while others follow: a rollback goes to where steps still succeeded.
    """
    interval = recipe.checkpoint.save_interval
    return bool(interval) and (is_last(recipe, step) or (step % interval == 0 and not is_skipped))
