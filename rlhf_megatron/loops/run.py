"""A run from start to end on one rank: join the others, train, export, leave."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.checkpoint.finished_run import finished_line
from rlhf_megatron.errors import TransientRewardError
from rlhf_megatron.hub import HubUnreachable
from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.monitor.run_folder import RunFolder
from rlhf_megatron.monitor.trackers import check_trackers
from rlhf_megatron.recipe import Recipe, RLRecipe, UserError, check_world
from rlhf_megatron.recipe.budgets import with_budgets
from rlhf_megatron.runtime.adaptation import adapt, is_out_of_memory
from rlhf_megatron.runtime.claim import Claim
from rlhf_megatron.runtime.health_rules import HealthStop
from rlhf_megatron.runtime.recovery import NETWORK, RecoveryLog, RepeatedFault
from rlhf_megatron.runtime.signals import stop_signals, stop_status, wait_unless_stopped
from rlhf_megatron.runtime.skipped_steps import TooManySkippedSteps
from rlhf_megatron.runtime.watchdog import forget_hang, watchdog
from rlhf_megatron.topology.exchange import from_rank
from rlhf_megatron.topology.world import first_to_say, join_world, leave_world, waiting_minutes

# Each part of a preflight that runs before training has so long.
PREFLIGHT_SECONDS = 120.0
# The exit status of a run that was asked to stop and could not save: nothing is to start it again by itself.
NOT_SAVED_STATUS = 1
# The headline metric of evaluations; that of "rl" depends on the reward.
HEADLINES = {"sft": "loss", "reward_modeling": "accuracy"}


def run(recipe: Recipe, resume: str = "auto", check_first: bool = False) -> int:
    """Train by ``recipe``; every process of torchrun calls it. ``resume``: auto, none, or a checkpoint's path.

    With ``check_first`` a preflight comes before anything is made; where it fails the process ends with status 1.

    Returns the exit status: 0, ``stop_status`` for a run that was asked to stop and will resume, or
    ``NOT_SAVED_STATUS``. Raises UserError for input that is not right, and where the result could not be written.
    """
    join_world(waiting_minutes(recipe.retry.hang_seconds))
    folder = RunFolder(recipe.run_root, recipe.name)
    recovery = RecoveryLog(folder.path)
    status = _status_before(recipe, resume, recovery)
    if status is not None:
        leave_world()
        return status
    import torch.distributed as dist

    from rlhf_megatron.planning.feasibility import check_architectures
    from rlhf_megatron.planning.model_folders import model_architecture, role_architectures

    if check_first:
        from rlhf_megatron.preflight.preflight import preflight

        if not preflight(recipe, PREFLIGHT_SECONDS, attempt=from_rank(uuid.uuid4().hex)):
            os._exit(1)  # a thread may hang in a collective
    check_world(recipe, dist.get_world_size())
    architectures = role_architectures(recipe, model_architecture(recipe, Path(recipe.model.path)))
    check_architectures(recipe, architectures)
    with _claimed(recipe, folder):
        recipe, data_skips = _begin(recipe, recovery, architectures)
        try:
            status = _train(recipe, resume, recovery, data_skips)
        except HealthStop as stop:
            if dist.get_rank() == 0:
                recovery.append("health_stop", None, str(stop))
            raise
        except Exception as error:
            if first_to_say("fault"):  # other ranks' errors come of the first one
                said = f"rank {dist.get_rank()}: {type(error).__name__}: {str(error).strip()}".splitlines()[0]
                recovery.append("fault", None, said[:200], phase=watchdog.phase, **_kind(error))
            raise
    leave_world()
    return status


def _status_before(recipe: Recipe, resume: str, recovery: RecoveryLog) -> int | None:
    """Return the exit status where torchrun has started the ranks again after the run has stopped, or the run is
    finished; collective. Rank 0 decides, for another job may be writing."""
    import torch.distributed as dist

    status = None
    if dist.get_rank() == 0:
        stopped = recovery.has_stopped()
        finished = None if stopped else finished_line(recipe, resume, recovery)
        if stopped:
            status = _status_of_stop(stopped.get("saved", True))
        elif finished:
            print(finished, flush=True)
            status = 0
    return from_rank(status)


def _status_of_stop(is_saved: bool) -> int:
    return stop_status(os.environ) if is_saved else NOT_SAVED_STATUS


@contextlib.contextmanager
def _claimed(recipe: Recipe, folder: RunFolder) -> Iterator[None]:
    """Make the run's folder on rank 0, which holds it for this job meanwhile; collective as it begins.

    Raises UserError on all ranks where the folder cannot be written, another job trains there, or a tracker cannot be.
    """
    import torch.distributed as dist

    claim, refusal = None, None
    if dist.get_rank() == 0:
        try:
            check_trackers(recipe.monitor.trackers)  # minutes before they start
            folder.prepare(resume=True)
            claim = Claim(folder.path)
        except UserError as error:
            refusal = str(error)
    refusal = from_rank(refusal)
    if refusal:
        raise UserError(refusal)
    try:
        yield
    finally:
        if claim:
            claim.release()


def _begin(
    recipe: Recipe, recovery: RecoveryLog, architectures: Mapping[str, Architecture]
) -> tuple[Recipe, dict[int, dict[str, Any]]]:
    """Note the attempt on rank 0; return the recipe with the budgets to go on with, and ``Adaptation.skips``.

    Raises RepeatedFault on all ranks where the attempt should not be.
    """
    import torch.distributed as dist

    from rlhf_megatron.planning.run_budgets import budget_note, least_memory_gb, run_budgets

    rank, memory = dist.get_rank(), least_memory_gb()
    decided: Any = None
    if rank == 0:
        planned = run_budgets(recipe, architectures, recovery, *memory)
        adaptation, reduced = adapt(with_budgets(recipe, planned), recovery.of_this_launch())
        budgets = planned | adaptation.budgets
        note = budget_note(recipe, architectures, {key: int(budgets[key]) for key in planned})
        wait = recovery.seconds_to_wait(recipe.retry)
        refusal = recovery.begin(recipe.retry.max_repeats, reduced, note)
        decided = refusal, budgets, adaptation.skips, recovery.starts(), wait
        forget_hang(recovery.path.parent, recovery.starts())
        if wait and not refusal:
            print(f"waiting {wait:g} s after a fault (retry.interval_seconds, retry.network)", flush=True)
    refusal, budgets, skips, starts, wait = from_rank(decided)
    if refusal:
        raise RepeatedFault(refusal)
    wait_unless_stopped(wait)
    watchdog.watch(recovery.path.parent, starts, rank, dist.get_world_size(), recipe.retry)
    return with_budgets(recipe, budgets), skips


def _kind(error: Exception) -> dict[str, Any]:
    """Return details of a fault for the next attempt, beside its text."""
    if isinstance(error, TooManySkippedSteps):
        return error.details
    if is_out_of_memory(error):
        return {"kind": "out_of_memory"}
    return {"kind": NETWORK} if _is_of_network(error) else {}


def _is_of_network(error: BaseException | None) -> bool:
    """Return True for a service or the hub that cannot be reached, where an error or its causes say so."""
    kinds = (TransientRewardError, HubUnreachable)
    return error is not None and (isinstance(error, kinds) or _is_of_network(error.__cause__))


def _train(recipe: Recipe, resume: str, recovery: RecoveryLog, data_skips: dict[int, dict[str, Any]]) -> int:
    from rlhf_megatron.compat import megatron

    megatron.install()
    # Imported now, since Megatron must be patched for the machine before its models and optimizers are imported.
    from rlhf_megatron.checkpoint.exports import beginning
    from rlhf_megatron.checkpoint.manager import RunStopped
    from rlhf_megatron.evaluation.held_out import headline_metric
    from rlhf_megatron.loops.reward_modeling import run_reward_modeling
    from rlhf_megatron.loops.rl import run_rl
    from rlhf_megatron.loops.sft import run_sft
    from rlhf_megatron.loops.training_run import LoopResult, TrainingRun, set_up

    loops: dict[str, Callable[[TrainingRun[Any]], LoopResult]] = {
        "rl": run_rl,
        "sft": run_sft,
        "reward_modeling": run_reward_modeling,
    }
    run = set_up(recipe, resume, data_skips)
    try:
        result = loops[recipe.loop](run)
    except RunStopped as stop:
        stop_signals.ignore()
        is_saved = stop.saved == stop.step
        if is_saved and run.context.rank == 0:
            recovery.ask_for_requeue(stop.step, stop.why)
        start = "there" if is_saved else beginning(stop.saved)
        run.context.say(f"{stop}; the same command resumes from {start}")
        run.close()
        return _status_of_stop(is_saved)
    except BaseException:
        run.recorder.abandon()
        raise
    folder = run.exports.write_last(result.saved_step)
    run.recorder.log_model(recipe.steps, folder)
    run.close()
    if run.context.rank == 0:
        recovery.append("done", run.recipe.steps, "all steps are done")
        if result.evaluations:
            headline = headline_metric(recipe) if isinstance(recipe, RLRecipe) else HEADLINES[recipe.loop]
            print(f"held-out {headline} {result.evaluations['first']:.2f} -> {result.evaluations['last']:.2f}")
        if folder:
            print(f"model: {folder}\nrun:   {run.context.folder.path}")
    return 0
