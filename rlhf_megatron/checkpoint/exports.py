"""The trained model as Hugging Face folders of the run: in between, and at the end, however long the disk is full."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf_megatron.checkpoint.hugging_face import export_adapters, export_weights
from rlhf_megatron.durable import partial_of, take_name, tidy
from rlhf_megatron.models.hf_export import Companions, companions_of
from rlhf_megatron.models.lora import Adaptation
from rlhf_megatron.recipe import Recipe, UserError
from rlhf_megatron.recipe.drafting import DRAFT
from rlhf_megatron.roles.placed import JoinedWeights, PlacedRole
from rlhf_megatron.runtime.finite import NotFiniteError
from rlhf_megatron.runtime.run_context import RunContext
from rlhf_megatron.runtime.watchdog import watchdog
from rlhf_megatron.topology.exchange import by_rank
from rlhf_megatron.untrusted import reason_of

ADAPTER_FOLDER = "adapter"  # of an export, in PEFT's format
HEAD_FOLDER = "draft_head"  # of an export, a head that drafts, in EAGLE-3's published form
# Seconds between attempts to write what nothing else has: half an hour in all.
_PAUSES = (5, 10, 20, 40, 75, 150, 300, 300, 300, 600)


def beginning(saved: int | None) -> str:
    """Return where a run resumes whose newest checkpoint is of step ``saved``."""
    return "the beginning" if saved is None else f"step {saved}"


class NotWritten(UserError):
    """The result of a run that nothing could be written to; the next attempt only writes it."""

    is_transient = True


class Exports:
    """The exports of one run's actor. Every call is collective."""

    def __init__(self, context: RunContext[Recipe], actor: PlacedRole) -> None:
        """Find what a folder needs beside the weights: tokenizer, chat template, the model's code.

        What an attempt that was killed has left half-written is cleared up. Raises UserError where that fails.
        """
        self._context, self._recipe, self._actor = context, context.recipe, actor
        self._layer: PlacedRole | None = None
        self._head: PlacedRole | None = None
        self._companions_of_head: Companions | None = None
        recipe = context.recipe
        self._companions = companions_of(recipe.model.path, recipe.model.tokenizer, recipe.data.chat_template)
        self._writer = min(actor.ranks)  # of what is not weights
        folder = context.folder.export(recipe.steps).parent
        if dist.get_rank() == 0:
            try:
                tidy(folder)
            except OSError as error:
                raise UserError(f"{folder}: cannot be cleared up ({reason_of(error)}); move it away") from error

    def add_draft(self, draft: PlacedRole, folder: Path | None) -> None:
        """Have exports of the actor hold what drafts for it: its layer for multi-token prediction, or in a folder of
        its own a head, whose config.json is in ``folder`` and whose files, if it has some, in its recipe's."""
        if folder is None:
            self._layer = draft
            return
        own = self._recipe.roles[DRAFT].weights_folder
        self._head, self._companions_of_head = draft, Companions(Path(own) if own else folder)

    def write_between(self, step: int) -> None:
        """Write the actor after a step that others follow; where that fails there is a warning, and the run goes on.

        Raises NotFiniteError on all ranks where the actor is not finite: no later step would make it so again.
        """
        with self._context.phase("export"):
            problem = self._write(step)
        if problem:
            self._context.say(f"warning: step {step} was not exported: {problem}")

    def _write(self, step: int) -> str | None:
        """Write the actor as it is now, and in its folder the adapters that it has; return why that failed, where it
        did.

        The folder gets its name when all of it is on disk.
        """
        folder, lora = self._context.folder.export(step), self._recipe.actor.lora
        has_parts = lora is not None or self._head is not None
        parts = partial_of(folder) if has_parts else folder
        try:
            self._write_weights(parts)
            if lora:
                self._write_adapters(parts / ADAPTER_FOLDER, Adaptation.of(lora))
            if self._head:
                self._write_head(parts / HEAD_FOLDER, self._head)
            if has_parts:
                by_rank(self._writer, lambda: take_name(parts, folder))
        except OSError as error:
            if has_parts and dist.get_rank() == self._writer:
                shutil.rmtree(parts, ignore_errors=True)  # what a failure has left takes room
            return str(error)
        except NotFiniteError as error:
            if has_parts and dist.get_rank() == self._writer:
                shutil.rmtree(parts, ignore_errors=True)
            raise NotFiniteError(
                f"step {step}: the actor is not finite, and not exported: {error}; lower "
                "actor.optimizer.learning_rate, and resume from an older checkpoint"
            ) from error
        return None

    def _write_weights(self, folder: Path) -> None:
        actor, dtype = self._actor, getattr(torch, self._recipe.model.dtype)
        layer = self._layer
        weights = JoinedWeights([actor.weights, layer.weights]) if layer else actor.weights
        export_weights(
            folder,
            self._companions,
            actor.architecture,
            weights.shard_spec(),
            weights.parameters(),
            dtype,
            self._context.device,
            layer=layer.architecture if layer else None,
        )

    def _write_head(self, folder: Path, head: PlacedRole) -> None:
        assert self._companions_of_head is not None
        dtype, sources = getattr(torch, self._recipe.model.dtype), head.weights.shard_spec()
        parameters, companions = head.weights.parameters(), self._companions_of_head
        export_weights(folder, companions, head.architecture, sources, parameters, dtype, self._context.device)

    def _write_adapters(self, folder: Path, adaptation: Adaptation) -> None:
        actor, base = self._actor, self._recipe.model.path
        sources, parameters = actor.weights.adapter_shard_spec(adaptation), actor.weights.adapter_parameters()
        export_adapters(folder, base, actor.architecture, adaptation, sources, parameters, self._context.device)

    def write_last(self, saved: int | None) -> Path | None:
        """Write the last step where the recipe asks for that, and return the folder; ``saved`` is the step of the
        newest checkpoint.

        While that fails and no checkpoint has the step, it is tried again, for the disk may get room meanwhile.
        Raises UserError on all ranks where what was asked for could not be written.
        """
        section, last = self._recipe.checkpoint, self._recipe.steps
        goes_on = f"make room, and the same command resumes from {beginning(saved)}"
        with self._context.phase("export"):
            if section.export_at_end:
                return self._write_with_patience(last, _PAUSES if saved != last else (), goes_on)
            if section.save_interval and saved != last:
                checkpoints = self._context.folder.checkpoints
                raise NotWritten(f"{checkpoints}: step {last} could not be saved; {goes_on}")
            return None

    def _write_with_patience(self, step: int, pauses: Sequence[int], goes_on: str) -> Path:
        """Write a step, again after each of the ``pauses`` in seconds; raises NotWritten where nothing helps."""
        for pause in (*pauses, None):
            problem = self._write(step)
            if problem is None:
                return self._context.folder.export(step)
            if pause:
                self._context.say(
                    f"warning: the last step was not exported: {problem}; make room, it is tried again in {pause} s"
                )
                for _ in range(pause):
                    time.sleep(1.0)
                    watchdog.beat()
        raise NotWritten(f"the last step was not exported: {problem}; {goes_on}")
