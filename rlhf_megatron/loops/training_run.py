"""The start that all loops share: data, actor, where the run resumes, and what records it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from rlhf_megatron.checkpoint.exports import Exports
from rlhf_megatron.checkpoint.finished_run import how_to_go_on
from rlhf_megatron.checkpoint.manager import Checkpoints, sound_checkpoints
from rlhf_megatron.checkpoint.parts import Part, SpreadPart
from rlhf_megatron.checkpoint.storage import forget_best, step_of
from rlhf_megatron.data.drawn_prompts import Readers
from rlhf_megatron.data.epochs import in_steps
from rlhf_megatron.data.opening import Data, open_data
from rlhf_megatron.data.prompt_columns import RESPONSES
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.data.tokenizer_loading import recipe_tokenizer
from rlhf_megatron.durable import remove
from rlhf_megatron.errors import UserError
from rlhf_megatron.generation.tool_turns import with_tools
from rlhf_megatron.loops.role_building import RoleBuilder
from rlhf_megatron.loops.step_recorder import StepRecorder
from rlhf_megatron.loops.team_sync import make_teams
from rlhf_megatron.models.architecture import Architecture, Head, config_notes, read_architecture, read_config
from rlhf_megatron.monitor.run_report import Report
from rlhf_megatron.planning.feasibility import check_tokens
from rlhf_megatron.planning.host_bytes import Backend
from rlhf_megatron.planning.report import planned_network
from rlhf_megatron.recipe import Recipe, RLRecipe
from rlhf_megatron.roles.placed import PlacedRole
from rlhf_megatron.runtime.clocks import host_identity, measure_clocks
from rlhf_megatron.runtime.gpu_use import GpuUses
from rlhf_megatron.runtime.recovery import RecoveryLog
from rlhf_megatron.runtime.run_context import RecipeT, RunContext
from rlhf_megatron.topology.exchange import sum_over_ranks

AnyOfRecipes = TypeVar("AnyOfRecipes", bound=Recipe)


class LoopResult(NamedTuple):
    """``evaluations``: the ``first`` and the ``last`` headline metric, if there are any; ``saved_step``: that of the
    newest checkpoint."""

    evaluations: dict[str, float]
    saved_step: int | None


@dataclasses.dataclass(frozen=True)
class TrainingRun(Generic[RecipeT]):
    """One rank's part of a run that is set up: what a loop works with.

    Attributes:
        context: of the run, for whatever works in it.
        architecture, tokenizer: of model.path.
        data: training and held-out prompts.
        roles: builds the roles that the loop needs beside the actor.
        actor: the model that learns.
        exports: writes it in Hugging Face's format.
        recorder: of the steps.
        checkpoint: what the run resumes from, if that can be used; None where it begins.
        checkpoints: the generator that gave it, of ``sound_checkpoints``; it gives older ones.
        at_end: what is to be closed when the run is over, the latest first.
    """

    context: RunContext[RecipeT]
    architecture: Architecture
    tokenizer: Tokenizer
    data: Data
    roles: RoleBuilder
    actor: PlacedRole
    exports: Exports
    recorder: StepRecorder
    checkpoint: Path | None
    checkpoints: Generator[Path, None, None]
    at_end: contextlib.ExitStack

    @property
    def recipe(self) -> RecipeT:
        """The run's."""
        return self.context.recipe

    def steps_after(self, saved: int | None) -> range:
        """Return the steps that are left when that of the checkpoint is done; all where there is none."""
        return range((saved or 0) + 1, self.recipe.steps + 1)

    def start_or_resume(
        self,
        roles: Mapping[str, PlacedRole],
        parts: Mapping[str, Part],
        spread: Mapping[str, SpreadPart] | None = None,
    ) -> Checkpoints:
        """Return what saves the run; where it resumes, roles and parts are as they were saved. Collective."""
        context, folder = self.context, self.context.folder.checkpoints
        checkpoints = Checkpoints(folder, self.recipe.checkpoint, roles, parts, context.say, spread)
        if self.checkpoint is not None:
            with context.phase("resume"):
                restored = checkpoints.restore_one_of(self.checkpoints, self.checkpoint, self.recorder.recipe_changes)
            context.say(f"resuming from {restored}, after step {step_of(restored)}")
            if not self.steps_after(checkpoints.saved):
                context.say(f"no step is left: {how_to_go_on(self.recipe)}")
        elif context.rank == 0:
            forget_best(folder)
        return checkpoints

    def close(self) -> None:
        """Draw the plots and release resources; collective. Ranks cannot communicate afterwards."""
        self.recorder.close()
        dist.barrier()  # an engine that ends may take torch.distributed with it
        self.at_end.close()


def set_up(
    recipe: AnyOfRecipes,
    resume: str = "auto",
    data_skips: Mapping[int, Mapping[str, Any]] | None = None,
    recorder_class: type[StepRecorder] = StepRecorder,
) -> TrainingRun[AnyOfRecipes]:
    """Build what all loops need; collective over the world.

    ``resume`` as in ``sound_checkpoints``, ``data_skips`` as in ``Adaptation.skips``.
    Raises UserError for input that the recipe names and that is not right.
    """
    context, gpus = RunContext(recipe, *make_teams(recipe)), GpuUses()
    if isinstance(recipe, RLRecipe) and context.network.is_on and context.rank == 0:
        backend: Backend = "nccl" if torch.cuda.is_available() else "gloo"
        context.network.planned = planned_network(recipe, context.world_size, backend)
    clocks = measure_clocks(host_identity()) if recipe.monitor.timeline.is_on else []
    architecture = read_architecture(recipe.model.path)
    with context.phase("data"):
        tokenizer = recipe_tokenizer(recipe)
        if isinstance(recipe, RLRecipe):
            tokenizer = with_tools(tokenizer, recipe)
        check_tokens(tokenizer, architecture, recipe.model.path)
        data = open_data(
            recipe.data,
            tokenizer,
            recipe.seed,
            RESPONSES[recipe.loop],
            recipe.evaluation.max_prompts,
            _readers(context) if recipe.loop == "rl" else None,
        )
    recipe = context.recipe = in_steps(recipe, data.rows)
    roles = RoleBuilder(context, architecture)
    actor = _build_actor(recipe, roles)
    exports = Exports(context, actor)
    notes = [*config_notes(read_config(recipe.model.path))]  # said as soon as there is a console

    def say(text: str) -> None:
        context.say(text) if context.console else notes.append(text)

    checkpoints = sound_checkpoints(context.folder.checkpoints, resume, say)
    checkpoint = next(checkpoints, None)
    if resume == "none" and context.rank == 0 and RecoveryLog(context.folder.path).is_first_attempt():
        remove(context.folder.journal)  # before any rank looks there, which all of them do together
    first_step = _first_step(recipe, checkpoint)
    source = checkpoint.parent.parent if checkpoint else None
    report = Report(context.folder, recipe, first_step, source) if context.rank == 0 else None
    context.console = report.console if report else None
    for line in (*notes, *architecture.notes(recipe.predicts), *data.notes, *_length_notes(recipe, data)):
        context.say(line)
    if gpus.problem:
        context.say(f"warning: the use of GPUs is not logged: {gpus.problem}")
    recorder = recorder_class(context, data.train, roles.built, report, gpus, clocks, data_skips or {})
    at_end = contextlib.ExitStack()
    return TrainingRun(
        context, architecture, tokenizer, data, roles, actor, exports, recorder, checkpoint, checkpoints, at_end
    )


def _length_notes(recipe: Recipe, data: Data) -> list[str]:
    if recipe.epochs is None:
        return []
    return [f"epochs={recipe.epochs:g}: steps={recipe.steps}, of {data.rows:,.0f} training rows"]


def _readers(context: RunContext[Any]) -> Readers | None:
    """Return the ranks that draw a step's prompts, where this is one of them."""
    team = context.generators
    if not team.here:
        return None
    total = functools.partial(sum_over_ranks, group=team.group)
    return Readers(team.ranks.index(context.rank), len(team.ranks), total)


def _build_actor(recipe: Recipe, roles: RoleBuilder) -> PlacedRole:
    updates = recipe.learning_steps * recipe.batch.updates_per_step
    head: Head = "scalar" if recipe.loop == "reward_modeling" else "language"
    return roles.build("actor", recipe.actor, recipe.actor.optimizer, updates, head)


def _first_step(recipe: Recipe, checkpoint: Path | None) -> int:
    """Return the step after the checkpoint's; raises UserError where the recipe has none left."""
    done = step_of(checkpoint) if checkpoint else 0
    if done > recipe.steps:
        raise UserError(
            f"steps={recipe.steps}: {checkpoint} has done {done} already; raise steps, give the run another name, or "
            "start from --resume none or an older checkpoint"
        )
    return done + 1
