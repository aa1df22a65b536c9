"""The trained model as Hugging Face folders of the run: in between, and at the end, however long the disk is full."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from rlhf_megatron.models.adapters import Adaptation
from rlhf_megatron.models.hf_files import companions_of
from rlhf_megatron.monitor.run_folder import RunFolder
from rlhf_megatron.recipe import Recipe, UserError
from rlhf_megatron.regather.export import export_adapters, export_weights
from rlhf_megatron.roles.placed import PlacedRole
from rlhf_megatron.runtime.finite import NotFiniteError
from rlhf_megatron.runtime.watchdog import watchdog

ADAPTER_FOLDER = "adapter"  # of an export, in PEFT's format
# Seconds between attempts to write what nothing else has: half an hour in all.
_PAUSES = (5, 10, 20, 40, 75, 150, 300, 300, 300, 600)


def beginning(saved: int | None) -> str:
    """Where a run begins that has saved such a step."""
    return "the beginning" if saved is None else f"step {saved}"


class Exports:
    """The exports of one run's actor. Every call is collective."""

    def __init__(self, recipe: Recipe, run: RunFolder, actor: PlacedRole, device: torch.device | str) -> None:
        """Finds what a folder needs beside the weights: tokenizer, chat template, the model's code."""
        self._recipe, self._run, self._actor, self._device = recipe, run, actor, device
        self._companions = companions_of(recipe.model.path, recipe.model.tokenizer, recipe.data.chat_template)

    def write(self, step: int) -> str | None:
        """Writes the actor as it is now, and in its folder the adapters that it has; why that failed, where it did.

        Raises NotFiniteError on all ranks where the actor is not finite: no later step would mend it.
        """
        lora, actor = self._recipe.actor.lora, self._actor
        try:
            export_weights(
                self._run.export(step),
                self._companions,
                actor.architecture,
                actor.side(),
                actor.parameters(),
                getattr(torch, self._recipe.model.dtype),
                self._device,
            )
            if lora:
                adaptation = Adaptation.of(lora)
                export_adapters(
                    self._run.export(step) / ADAPTER_FOLDER,
                    self._recipe.model.path,
                    actor.architecture,
                    adaptation,
                    actor.adapter_side(adaptation),
                    actor.adapter_parameters(),
                    self._device,
                )
        except OSError as error:
            return str(error)
        except NotFiniteError as error:
            raise NotFiniteError(
                f"step {step}: the actor is not finite, and not exported: {error}; lower "
                "actor.optimizer.learning_rate, and go on from an older checkpoint"
            ) from error
        return None

    def write_last(self, saved: int | None, tell: Callable[[str], None]) -> Path | None:
        """Writes the last step where the recipe asks for that, and returns the folder; ``saved`` is the step of the
        newest checkpoint.

        While that fails and no checkpoint has the step, it is tried again, for the disk may get room meanwhile.
        Raises UserError on all ranks where what was asked for could not be written.
        """
        section, last = self._recipe.checkpoint, self._recipe.steps
        goes_on = f"make room, and the same command goes on from {beginning(saved)}"
        if not section.export_at_end:
            if section.save_interval and saved != last:
                raise UserError(f"{self._run.checkpoints}: step {last} could not be saved; {goes_on}")
            return None
        for pause in (*(_PAUSES if saved != last else ()), None):
            problem = self.write(last)
            if problem is None:
                return self._run.export(last)
            if pause:
                tell(f"warning: the last step was not exported: {problem}; make room, it is tried again in {pause} s")
                for _ in range(pause):
                    time.sleep(1.0)
                    watchdog.beat()
        raise UserError(f"the last step was not exported: {problem}; {goes_on}")
