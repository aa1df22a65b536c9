"""When a run that is started again has nothing left to do, by the files of its folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_megatron.checkpoint.finished_run import finished_line
from rlhf_megatron.recipe import Recipe, load_recipe, resolved_yaml
from rlhf_megatron.runtime.recovery import Origin, RecoveryLog
from run_restart import ORIGIN, RECIPE, make_run, save

BY_HAND = Origin("node 12 200")
LAST = 9


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a run that has come to its end, in its second attempt."""
    run = make_run(tmp_path / "sft")
    log = RecoveryLog(run, ORIGIN)
    log.begin(9, {"actor.tokens_per_gpu": 64}, {"found": {"actor.tokens_per_gpu": 128}})
    (run / "recipe.yaml").write_text(resolved_yaml(recipe_of(run, "actor.tokens_per_gpu=64")))
    save(run, LAST)
    (run / "export" / f"step-{LAST}").mkdir(parents=True)
    log.append("done", LAST, "all steps are done")
    return run


def recipe_of(run: Path, *overrides: str) -> Recipe:
    names = (f"run_root={run.parent}", f"name={run.name}", "monitor.trackers=[jsonl,csv]", f"steps={LAST}")
    return load_recipe(str(RECIPE), [*names, "actor.tokens_per_gpu=auto", *overrides])


def says(run: Path, *overrides: str, resume: str = "auto", origin: Origin = BY_HAND) -> str | None:
    return finished_line(recipe_of(run, *overrides), resume, RecoveryLog(run, origin))


def test_the_same_recipe_has_nothing_left_to_do(run: Path) -> None:
    assert says(run) == (
        f"{run}: all 9 steps are done, and nothing is left to write: for more raise steps; for a new run use another "
        "name, or --resume none"
    )


def test_the_steps_of_epochs_are_those_that_were_counted(run: Path) -> None:
    (run / "recipe.yaml").write_text(resolved_yaml(recipe_of(run, "epochs=3")))
    line = says(run, "epochs=3", "steps=0")
    assert line and line.startswith(f"{run}: all 9 steps") and "for more raise epochs;" in line
    assert says(run, "epochs=4", "steps=0") is None


@pytest.mark.parametrize(
    "override",
    ["steps=10", "steps=8", "model.dtype=bfloat16", "monitor.plots=false", "actor.optimizer.learning_rate=9e-4"],
)
def test_with_another_recipe_there_may_be_something_to_do(run: Path, override: str) -> None:
    assert says(run, override) is None


def test_another_beginning_holds_for_the_first_attempt_of_a_launch(run: Path) -> None:
    elsewhere = str(run / "checkpoints" / f"step-{LAST}")
    for resume in ("none", elsewhere):
        assert says(run, resume=resume) is None
        assert says(run, resume=resume, origin=ORIGIN) == says(run)


def _last_file(run: Path) -> Path:
    return run / "checkpoints" / f"step-{LAST}" / "rank-00000.safetensors"


@pytest.mark.parametrize(
    "lose",
    [
        lambda run: shutil.rmtree(run / "export"),
        lambda run: shutil.rmtree(run / "checkpoints"),
        lambda run: shutil.rmtree(_last_file(run).parent),
        lambda run: _last_file(run).unlink(),
        lambda run: _last_file(run).write_bytes(_last_file(run).read_bytes()[:-1]),
        lambda run: (_last_file(run).parent / "manifest.json").write_text("{}"),
        lambda run: (run / "recipe.yaml").unlink(),
        lambda run: (run / "recovery.jsonl").unlink(),
        lambda run: RecoveryLog(run, BY_HAND).begin(9),  # and then it was killed
    ],
    ids=["export", "checkpoints", "last one", "file", "byte", "manifest", "recipe", "recovery.jsonl", "attempt"],
)
def test_what_is_missing_is_not_taken_for_finished(run: Path, lose: Callable[[Path], object]) -> None:
    assert says(run)
    lose(run)
    assert says(run) is None


def test_what_the_recipe_does_not_ask_for_is_not_missed(run: Path) -> None:
    without = ("checkpoint.export_at_end=false", "actor.tokens_per_gpu=64")
    (run / "recipe.yaml").write_text(resolved_yaml(recipe_of(run, *without)))
    shutil.rmtree(run / "export")
    assert says(run, *without)
