"""A run's folder without a run, and what a restart does with it, in this process: no ranks, no model.

``make_run`` writes what two steps, an evaluation and a fault leave behind; ``restart`` reads, notes, saves and logs as
``loops/run.py`` does, in its order. The world of torch.distributed must be this process alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch
import torch.distributed as dist

from rlhf_megatron.checkpoint.manager import Checkpoints, sound_checkpoints
from rlhf_megatron.checkpoint.storage import MetricValue, forget_best, publish, random_state, step_of, write_tensors
from rlhf_megatron.errors import UserError
from rlhf_megatron.evaluation.history import History
from rlhf_megatron.monitor.metrics import MetricsLogger
from rlhf_megatron.monitor.run_folder import RunFolder
from rlhf_megatron.recipe import Recipe, load_recipe, resolved_yaml
from rlhf_megatron.runtime.adaptation import adapt, with_budgets
from rlhf_megatron.runtime.claim import Claim
from rlhf_megatron.runtime.recovery import Origin, RecoveryLog
from rlhf_megatron.runtime.watchdog import forget_hang

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "tiny_sft.yaml"
ORIGIN = Origin("node 11 100")
STEPS = (1, 2)


@dataclasses.dataclass
class Restarted:
    """What came of a restart."""

    step: int  # that it went on from; 0: from the beginning
    told: str  # all that was shown


@contextlib.contextmanager
def world_of_one() -> Iterator[None]:
    """Make a world of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def recipe_of(run: Path) -> Recipe:
    """Return the recipe of the run in that folder."""
    values = [f"run_root={run.parent}", f"name={run.name}", "monitor.trackers=[jsonl,csv]", "steps=9"]
    return load_recipe(str(RECIPE), values)


def save(run: Path, step: int, keep: int = 9) -> None:
    """Write the checkpoint of a step, whose one part remembers the step too."""
    folder = run / "checkpoints" / f"step-{step}"
    random = {f"random/{name}": value for name, value in random_state().items()}
    tensors = {**random, "x": torch.ones(2)}
    file = write_tensors(folder, "rank-00000.safetensors", tensors, {"pieces": {}, "random": ["cpu"]})
    parts = {"history": {"values": {str(step): 0.5}}}
    state = {"step": step, "launch": ORIGIN.torchrun, "roles": {}, "parts": parts}
    publish(folder, [file], state, keep, MetricValue("eval/loss", "min", 1.0 / step))


def make_run(run: Path) -> Path:
    """Return the folder of a run that a fault has ended after its second step."""
    recipe = recipe_of(run)
    log = RecoveryLog(run, ORIGIN)
    folder = RunFolder(recipe.run_root, recipe.name)
    folder.prepare(resume=True)
    log.begin(9)
    with MetricsLogger(folder, recipe.monitor) as logger:
        for step in STEPS:
            logger.log(step, {"train/loss": 1.0 / step, "train/step_time_ms": 9.0, "time/update": 0.5})
            save(run, step)
    folder.recipe.write_text(resolved_yaml(recipe), encoding="utf-8")
    folder.environment.write_text(json.dumps({"variables": {"WORLD_SIZE": "1"}}), encoding="utf-8")
    row = {"prompt": "2 + 2?", "response": "4", "ground_truth": "4", "score": 1.0, "truncated": False}
    table = pyarrow.Table.from_pylist([{**row, "unscored": False}])
    pyarrow.parquet.write_table(table, folder.sample_file(2))
    folder.trackers.write_text(json.dumps({"wandb": "abc"}))
    log.append("fault", None, "ValueError: bad row", phase="update")
    return run


def restart(run: Path, resume: str = "auto", origin: Origin = ORIGIN) -> Restarted:
    """Start the run again for one step; raises UserError where it is refused, and nothing else."""
    recipe, out = recipe_of(run), io.StringIO()
    folder, log = RunFolder(recipe.run_root, recipe.name), RecoveryLog(run, origin)
    with contextlib.redirect_stderr(out), contextlib.redirect_stdout(out):
        log.has_stopped()
        folder.prepare(resume=True)
        claim = Claim(run, 0.2)
        try:
            adaptation, reduced = adapt(recipe, log.of_this_launch())
            refusal = log.begin(recipe.retry.max_repeats, reduced)
            if refusal:
                raise UserError(refusal)
            forget_hang(run, log.starts())
            step = _go_on(with_budgets(recipe, adaptation.budgets), folder, resume, out)
            log.append("done", step + 1, "all steps are done")
        finally:
            claim.release()
    return Restarted(step, out.getvalue())


def _go_on(recipe: Recipe, folder: RunFolder, resume: str, out: io.StringIO) -> int:
    def tell(text: str) -> None:
        out.write(text + "\n")

    candidates = sound_checkpoints(folder.checkpoints, resume, tell)
    found, step = next(candidates, None), 0
    folder.prepare(resume=found is not None)
    history = History()
    checkpoints = Checkpoints(folder.checkpoints, recipe.checkpoint, {}, {"history": history}, tell)
    if found:
        step = step_of(checkpoints.restore_one_of(candidates, found))
        assert history.summary() == {"first": 0.5, "last": 0.5}
    else:
        forget_best(folder.checkpoints)
    with MetricsLogger(folder, recipe.monitor, {}, step + 1) as logger:
        logger.log(step + 1, {"train/loss": 0.25, "train/new": 1.0})
    save(folder.path, step + 1, keep=2)
    return step
