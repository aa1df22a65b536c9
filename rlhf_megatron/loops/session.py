"""What every loop starts from: the recipe's model, data and actor on this rank, and one place that reports the run."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf_megatron.data.prompts import PromptDataset, PromptStream
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.loops.checkpoints import Checkpoints, Part, choose_checkpoint
from rlhf_megatron.loops.layouts import make_layout
from rlhf_megatron.models.architecture import read_architecture
from rlhf_megatron.models.hf_files import CheckpointFiles, RandomWeights
from rlhf_megatron.monitor.console import Console
from rlhf_megatron.monitor.environment import environment_report
from rlhf_megatron.monitor.metrics import MetricsLogger
from rlhf_megatron.monitor.plots import plot_run
from rlhf_megatron.monitor.run_folder import RunFolder
from rlhf_megatron.recipe import OptimizerSection, Recipe, RoleSection, resolved_yaml
from rlhf_megatron.regather.export import export_weights
from rlhf_megatron.roles.role import Role


class Session:
    """One rank's view of a run. Making it is collective; ``close`` ends the reporting."""

    def __init__(self, recipe: Recipe, resume: str = "auto") -> None:
        """Builds what all loops need; ``resume`` as in ``choose_checkpoint``.

        Raises UserError for input that the recipe names and that is not right.
        """
        self.recipe = recipe
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.run = RunFolder(recipe.run_root, recipe.name)
        self.architecture = read_architecture(recipe.model.path)
        self.tokenizer = load_tokenizer(
            recipe.model.tokenizer or recipe.model.path, recipe.model.trust_remote_code, recipe.data.chat_template
        )
        self.training = self._open(recipe.data.train_files)
        self.train = PromptStream(self.training, recipe.seed, recipe.data.shuffle)
        self.validation = self._open(recipe.data.validation_files) if recipe.data.validation_files else None
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        updates = recipe.steps * recipe.batch.epochs_per_step * recipe.batch.minibatches_per_step
        self.actor = self.make_role("actor", recipe.actor, recipe.actor.optimizer, updates)
        found_out: list[str] = []
        self._resume_from = choose_checkpoint(self.run.checkpoints, resume, found_out.append)
        self.report = Report(self.run, recipe, self._resume_from is not None) if self.rank == 0 else None
        for line in found_out:
            self.say(line)
        if self.report:
            self._tell_about_data()
        self.first_step = 1
        self._seconds: dict[str, float] = {}
        self._endings: list[Callable[[], None]] = []
        self._step_started = time.perf_counter()

    def checkpoints(self, roles: Mapping[str, Role], parts: Mapping[str, Part]) -> Checkpoints:
        """What saves the run; where it resumes, roles and parts are as they were when this returns. Collective."""
        checkpoints = Checkpoints(self.run.checkpoints, self.recipe.checkpoint, roles, parts, self.say)
        if self._resume_from is not None:
            self.first_step = checkpoints.restore(self._resume_from) + 1
            self.say(f"going on from {self._resume_from}, after step {self.first_step - 1}")
        return checkpoints

    def _open(self, files: list[str]) -> PromptDataset:
        return PromptDataset(files, self.tokenizer, self.recipe.data, with_response=self.recipe.loop == "sft")

    def _tell_about_data(self) -> None:
        """Says what is left out of the data, and whether held-out prompts are trained on."""
        limit = self.recipe.data.max_prompt_length
        for name, dataset in (("training", self.training), ("validation", self.validation)):
            if dataset is not None and dataset.dropped:
                total = len(dataset) + dataset.dropped
                self.say(
                    f"{dataset.dropped} of {total} {name} rows are left out: "
                    f"longer than data.max_prompt_length={limit} tokens"
                )
        shared = self.validation.prompts_shared_with(self.training) if self.validation else 0
        if self.validation and shared:
            self.say(
                f"warning: {shared} of {len(self.validation)} validation prompts are also in data.train_files; "
                "take them out there, or the evaluation says nothing about new prompts"
            )

    def make_role(
        self, name: str, section: RoleSection, optimizer: OptimizerSection | None = None, updates: int = 1
    ) -> Role:
        """A role on all ranks, with the recipe's weights; frozen without ``optimizer``."""
        recipe = self.recipe
        role = Role(
            name,
            self.architecture,
            make_layout(section.layout or recipe.actor.layout, self.world),
            range(self.world),
            section,
            dtype=recipe.model.dtype,
            seed=recipe.seed,
            temperature=recipe.rollout.temperature if recipe.rollout else 1.0,
            optimizer=optimizer,
            training_steps=updates,
        )
        if recipe.model.random_weights:
            role.load(RandomWeights(self.architecture, recipe.seed, torch.device(self.device)))
        else:
            with CheckpointFiles(getattr(section, "path", None) or recipe.model.path, self.architecture) as files:
                role.load(files)
        return role

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a part of the step as ``time/NAME`` and shows it; times of the same name add up."""
        started = time.perf_counter()
        self.progress(name)
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def progress(self, name: str, done: int = 0, total: int = 0) -> None:
        """Shows how far a phase has come, on the rank that reports."""
        if self.report:
            self.report.console.phase(name, done, total)

    def begin_step(self) -> None:
        """Starts the clocks of a step."""
        self._seconds.clear()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._step_started = time.perf_counter()

    def seconds(self, phase: str) -> float:
        """How long a phase of this step has taken so far."""
        return self._seconds.get(phase, 0.0)

    def end_step(self, step: int, metrics: Mapping[str, float], tokens: int) -> None:
        """Logs a step with its phase times, ``tokens`` (of all ranks, prompt and response) and memory."""
        elapsed = time.perf_counter() - self._step_started
        timed = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        speed = {
            "train/step_time_ms": elapsed * 1000.0,
            "perf/tokens_per_gpu_per_sec": tokens / elapsed / self.world,
        }
        if torch.cuda.is_available():
            timed["memory/actor_gpu_mem_mb"] = torch.cuda.max_memory_allocated() / 2**20
        self.log(step, {**metrics, **timed, **speed})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds numbers to a step's record."""
        if self.report:
            self.report.step(step, metrics)

    def say(self, text: str) -> None:
        """One line for the person who watches."""
        if self.report:
            self.report.console.message(text)

    def export(self, step: int) -> Path:
        """Writes the actor as a Hugging Face folder; collective."""
        folder = self.run.export(step)
        sources = {rank: self.actor.blocks(position) for position, rank in enumerate(self.actor.ranks)}
        dtype: torch.dtype = getattr(torch, self.recipe.model.dtype)
        companions = Path(self.recipe.model.path)
        export_weights(folder, companions, self.architecture, sources, self.actor.parameters(), dtype, self.device)
        return folder

    def at_end(self, action: Callable[[], None]) -> None:
        """Has ``action`` done when the session closes, the latest first."""
        self._endings.append(action)

    def abandon(self) -> None:
        """Gives the terminal back as the run fails on this rank; the process is to end now."""
        if self.report:
            self.report.console.close()

    def close(self) -> None:
        """Draws the run and ends what the session holds; collective. Ranks can exchange nothing after it."""
        if self.report:
            self.report.close()
        dist.barrier()  # an engine that ends may take torch.distributed with it
        for action in reversed(self._endings):
            action()


class Report:
    """What rank 0 leaves behind and shows: recipe, environment, metrics, the live table and the plot."""

    def __init__(self, run: RunFolder, recipe: Recipe, resume: bool) -> None:
        self._run, self._recipe = run, recipe
        run.prepare(resume)
        run.recipe.write_text(resolved_yaml(recipe))
        run.environment.write_text(json.dumps(environment_report(), indent=2))
        self._logger = MetricsLogger(run, recipe.monitor, recipe.model_dump(mode="json"))
        stream = None if recipe.monitor.console else open(os.devnull, "w")  # noqa: SIM115  (open as long as the run)
        self.console = Console(recipe.loop, total_steps=recipe.steps, title=recipe.name, stream=stream)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes and shows one step."""
        self._logger.log(step, metrics)
        self.console.row(step, metrics)

    def close(self) -> None:
        """Draws the plot and gives the terminal back."""
        self.console.close()
        self._logger.close()
        if self._recipe.monitor.plots and self._run.metrics.stat().st_size:
            plot_run(self._run.metrics, self._run.plot_file("run"))
