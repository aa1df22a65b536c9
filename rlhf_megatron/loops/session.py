"""What every loop starts from: the recipe's model, data and actor on this rank, and one place that reports the run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from rlhf_megatron.checkpoint.exports import Exports
from rlhf_megatron.checkpoint.manager import Checkpoints, Part, TeamOwnedState, sound_checkpoints
from rlhf_megatron.checkpoint.storage import forget_best, step_of
from rlhf_megatron.data.opening import open_data
from rlhf_megatron.data.prompts import Responses
from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.data.tokenizer import load_tokenizer, recipe_tokenizer
from rlhf_megatron.errors import UserError
from rlhf_megatron.models.architecture import Head, read_architecture
from rlhf_megatron.models.flops import peak_flops, training_flops
from rlhf_megatron.models.hf_files import CheckpointFiles, RandomWeights, WeightSource
from rlhf_megatron.models.lora import Adaptation, PeftAdapter
from rlhf_megatron.monitor.profiler import Profiler
from rlhf_megatron.monitor.run_folder import RunFolder
from rlhf_megatron.monitor.run_report import Report
from rlhf_megatron.planning.feasibility import check_tokens
from rlhf_megatron.recipe import (
    OptimizerSection,
    Recipe,
    RewardModelSection,
    RoleSection,
    role_ranks,
)
from rlhf_megatron.recipe.world_checks import learners_of
from rlhf_megatron.roles.placed import PlacedRole
from rlhf_megatron.roles.reward_model import RewardModel
from rlhf_megatron.runtime import faults
from rlhf_megatron.runtime.clocks import host_identity, measure_clocks
from rlhf_megatron.runtime.gpu_use import GpuUses
from rlhf_megatron.runtime.health_rules import Health, memory_metrics
from rlhf_megatron.runtime.phases import Phases
from rlhf_megatron.runtime.skipped_steps import SkippedSteps
from rlhf_megatron.runtime.watchdog import watchdog
from rlhf_megatron.topology.exchange import from_rank
from rlhf_megatron.topology.role_layout import make_layout
from rlhf_megatron.topology.team import make_team, whole_world
from rlhf_megatron.topology.world import waiting_minutes


class Session:
    """One rank's view of a run. Making it is collective; ``close`` ends the reporting."""

    def __init__(
        self, recipe: Recipe, resume: str = "auto", skips: Mapping[int, Mapping[str, Any]] | None = None
    ) -> None:
        """Builds what all loops need; ``resume`` as in ``sound_checkpoints``, ``skips`` as in ``Adaptation``.

        Raises UserError for input that the recipe names and that is not right.
        """
        self.recipe = recipe
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.run = RunFolder(recipe.run_root, recipe.name)
        self.report: Report | None = None
        self.learners = self.generators = whole_world()
        if recipe.rollout_is_ahead:
            minutes = waiting_minutes(recipe.retry.hang_seconds)
            self.learners = make_team(learners_of(recipe, self.world), minutes)
            self.generators = make_team(role_ranks(recipe, "rollout", self.world), minutes)
        self._roles: list[PlacedRole] = []
        self._phases = Phases()
        self._gpus = GpuUses()
        self._profiler = Profiler(recipe.monitor.profile, self.run, self.rank, self.world)
        self._clocks = measure_clocks(host_identity()) if recipe.monitor.timeline.is_on else []
        self.architecture = read_architecture(recipe.model.path)
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        with self.phase("data"):
            self.tokenizer = recipe_tokenizer(recipe)
            check_tokens(self.tokenizer, self.architecture, recipe.model.path)
            responses: dict[str, Responses] = {"rl": "none", "sft": "one", "reward_modeling": "pair"}
            data = open_data(
                recipe.data, self.tokenizer, recipe.seed, responses[recipe.loop], recipe.evaluation.max_prompts
            )
        self.train, self.validation = data.train, data.validation
        updates = recipe.learning_steps * recipe.batch.updates_per_step
        head: Head = "scalar" if recipe.loop == "reward_modeling" else "language"
        self.actor = self.make_role("actor", recipe.actor, recipe.actor.optimizer, updates, head)
        self._exports = Exports(recipe, self.run, self.actor, self.device)
        self._found_out: list[str] = []  # said as soon as there is a report
        self._to_resume_from = sound_checkpoints(self.run.checkpoints, resume, self._tell)
        self._resume_from = next(self._to_resume_from, None)
        self.first_step = 1 if self._resume_from is None else step_of(self._resume_from) + 1
        if self.first_step > recipe.steps + 1:
            raise UserError(
                f"steps={recipe.steps}: {self._resume_from} has done {self.first_step - 1} already; raise steps, give "
                "the run another name, or start from --resume none or an older checkpoint"
            )
        self.report = Report(self.run, recipe, self.first_step) if self.rank == 0 else None
        for line in (*self._found_out, *data.notes):
            self.say(line)
        if self._gpus.problem:
            self.say(f"warning: the use of GPUs is not logged: {self._gpus.problem}")
        self.health = Health(recipe.health, recipe.name, self.say)
        self._start: dict[str, float] = {}  # seconds before the first step, for its record
        self._endings: list[Callable[[], None]] = []
        self._skips, self._skipped = skips or {}, SkippedSteps(recipe.retry.max_skipped_steps)
        self.passes_over_data = False
        """Whether this step's data are not those that follow on the last step's."""
        self._worth: dict[int, float] = {}  # on rank 0: what keep_best compares, by step
        self._saved: Callable[[], int | None] = lambda: None  # the step of the newest checkpoint

    def checkpoints(self, roles: Mapping[str, PlacedRole], parts: Mapping[str, Part]) -> Checkpoints:
        """What saves the run; where it resumes, roles and parts are as they were when this returns. Collective."""
        checkpoints = Checkpoints(self.run.checkpoints, self.recipe.checkpoint, roles, parts, self.say)
        if self._resume_from is not None:
            with self.phase("resume"):
                restored = checkpoints.restore_one_of(self._to_resume_from, self._resume_from)
            self.first_step = step_of(restored) + 1
            self.say(f"going on from {restored}, after step {self.first_step - 1}")
        elif self.rank == 0:
            forget_best(self.run.checkpoints)
        self._saved = lambda: checkpoints.saved
        return checkpoints

    def make_role(
        self,
        name: str,
        section: RoleSection,
        optimizer: OptimizerSection | None = None,
        updates: int = 1,
        head: Head = "language",
    ) -> PlacedRole:
        """A role on its ranks in its own layout, with the weights of its path or the recipe's.

        It is frozen without ``optimizer``. A scalar ``head`` is drawn from the recipe's seed where a role that learns
        starts from a language model.
        """
        recipe = self.recipe
        path = section.weights_folder or recipe.model.path
        architecture = (self.architecture if path == recipe.model.path else read_architecture(path)).with_head(head)
        ranks = role_ranks(recipe, name, self.world)
        lora = section.adapters
        with self.phase(name), contextlib.ExitStack() as opened:
            start = PeftAdapter(lora.path, architecture, Adaptation.of(lora)) if lora and lora.path else None
            weights: WeightSource = RandomWeights(architecture, recipe.seed, torch.device(self.device))
            if not recipe.model.random_weights:  # found out before memory is taken
                files = CheckpointFiles(path, architecture, recipe.seed if optimizer else None)
                weights = opened.enter_context(files)
            role = PlacedRole(
                name,
                architecture,
                make_layout(section.layout or recipe.actor.layout, len(ranks)),
                ranks,
                section,
                dtype=recipe.model.dtype,
                seed=recipe.seed,
                temperature=recipe.temperature,
                optimizer=optimizer,
                training_steps=updates,
                deterministic=recipe.deterministic,
                span=self.span,
                team=self.generators if name == "reward_model" else self.learners,
            )
            self._roles.append(role)
            with self.span("weights"):
                role.load(weights, start)
        return role

    def make_reward_model(self, section: RewardModelSection) -> RewardModel:
        """The recipe's reward model, which scores what the actor's tokenizer wrote."""
        tokenizer = load_tokenizer(
            section.tokenizer or section.path, self.recipe.model.trust_remote_code, section.chat_template
        )
        role = self.make_role("reward_model", section, head="scalar")
        check_tokens(tokenizer, role.architecture, section.path)
        return RewardModel(role, tokenizer, self.tokenizer, role.team.group)

    def steps(self, checkpoints: Checkpoints, evaluate: Callable[[int], None]) -> Iterator[int]:
        """The steps that are left, with what stands around each: evaluations, checkpoints and exports where due."""
        recipe = self.recipe
        if recipe.evaluation.at_start and self.first_step == 1:
            with self.phase("evaluate"):
                evaluate(0)
        self._end_start()
        for step in range(self.first_step, recipe.steps + 1):
            self.begin_step(step)
            yield step
            last, interval = step == recipe.steps, recipe.evaluation.interval
            if (interval and step % interval == 0) or (last and recipe.evaluation.at_end):
                with self.phase("evaluate"):
                    evaluate(step)
                self._miss_best_metric(step)
            with self.phase("save"):
                if recipe.checkpoint.export_interval and step % recipe.checkpoint.export_interval == 0 and not last:
                    problem = self.export(step)
                    if problem:
                        self.say(f"warning: step {step} was not exported: {problem}")
                checkpoints.after(step, last, self._skipped.are_going_on, self._worth.get(step))
            self._profiler.end()
            self._write_timeline(step)

    def _end_start(self) -> None:
        """Notes how long it took from the process's start to here."""
        seconds = {"total": time.perf_counter() - self._phases.began, **self._phases.times()}
        self._start = {f"start/{name}": value for name, value in seconds.items()}
        self._write_timeline(0)

    def _write_timeline(self, step: int) -> None:
        """Writes what all ranks have done since ``begin_step``, where the recipe asks for it; collective."""
        if self.recipe.monitor.timeline.has(step):
            try:
                self._phases.write(self.run.timeline_file(step), f"step {step}" if step else "start", self._clocks)
            except OSError as error:
                self.say(f"warning: no timeline of step {step} was written: {error.strerror or error}")

    def _miss_best_metric(self, step: int) -> None:
        """Tells where checkpoint.keep_best names no metric of the evaluations; they are rank 0's."""
        best = self.recipe.checkpoint.keep_best
        if best and step not in self._worth:
            self.say(f"warning: checkpoint.keep_best: no metric {best.metric} came with the evaluation of step {step}")

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a part of the step as ``time/NAME`` and shows it; times of the same name add up.

        What roles are to offload leaves the GPU as a phase ends, and comes back when it is needed.
        """
        with self._profiler.phase(name), self._phases.phase(name):
            self.progress(name)
            faults.at(name, watchdog.step)
            yield
            for role in self._roles:
                role.offload()
            watchdog.beat()

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A part of a phase that only the timeline and the profiler show."""
        with self._profiler.span(name), self._phases.span(name):
            yield

    def progress(self, name: str, done: int = 0, total: int = 0) -> None:
        """Tells the watchdog, and shows on the rank that reports, how far a phase has come."""
        watchdog.beat(name)
        if self.report:
            self.report.console.phase(name, done, total)

    def begin_step(self, step: int) -> None:
        """Starts the clocks of a step, behind the data that an attempt before has failed on."""
        watchdog.beat("step", step)
        faults.at("step", step)
        self.passes_over_data = step in self._skips
        if self.passes_over_data:
            self.train.load({**self.train.state(), **self._skips[step]})
            self.say(f"step {step} passes over the data of steps that were skipped")
        self._profiler.begin(step)
        self._phases.begin(self.recipe.monitor.timeline.has(step))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A phase that is over when the other team's is; what it is called tells which GPUs there are too few of."""
        with self.phase("wait_for_rollout" if self.learners.here else "wait_for_update"):
            yield

    def meet(self, learnt: dict[str, float]) -> dict[str, float]:
        """``learnt``, the learners' metrics, on every rank when all ranks are done with the step's work.

        Where there are two teams, each hears how long the other's phases were; collective over the world.
        """
        if self.learners.group is None:
            return learnt
        with self.waiting():
            dist.barrier()
        for team in (self.learners, self.generators):
            self._phases.hear(from_rank(self._phases.times(), team.first))
        return from_rank(learnt, self.learners.first)

    def seconds(self, phase: str) -> float:
        """How long a phase of this step has taken so far."""
        return self._phases.seconds(phase)

    def end_step(self, step: int, metrics: Mapping[str, float], tokens: int, learnt: RolloutBatch) -> None:
        """Logs a step with its phase times, ``tokens`` (of all ranks, prompt and response) and memory; collective.

        ``learnt``: what the actor has learnt from in the phase ``update``, if there was one.
        Raises TooManySkippedSteps on all ranks where retry.max_skipped_steps is reached.
        """
        elapsed = time.perf_counter() - self._phases.began
        peaks = self._phases.peaks()
        measured = {
            **{f"time/{name}": seconds for name, seconds in self._phases.times().items()},
            **{f"memory/{name}_gb": peak for name, peak in peaks.items()},
            **memory_metrics(),
            **self._gpus.metrics(),
            "train/step_time_ms": elapsed * 1000.0,
            "perf/tokens_per_gpu_per_sec": tokens / elapsed / self.world,
            **self._training_speed(learnt),
            **{
                f"{'train' if role is self.actor else role.name}/gradient_sync_ms": role.take_gradient_sync_ms()
                for role in self._roles
                if role.learns
            },
        }
        of_actor = [peaks[phase] for phase in ("logprobs", "update") if phase in peaks]
        if of_actor and torch.cuda.is_available():
            measured["memory/actor_gpu_mem_mb"] = max(of_actor) * 2**10
        self.log(step, {**self.train.metrics(), **metrics, **measured, **self._start})
        self._start = {}
        for role in self._roles:
            bad_gradients = role.take_bad_gradients()
            if bad_gradients:
                self.say(f"step {step}: {role.name}: gradient {bad_gradients}")
        self._skipped.after(step, metrics, self._data_position)

    def _training_speed(self, learnt: RolloutBatch) -> dict[str, float]:
        """How fast the actor's GPUs went through ``learnt``, and what share of their peak that is where it is known."""
        seconds, epochs = self.seconds("update"), self.recipe.batch.passes
        if not seconds:
            return {}
        gpu_seconds = seconds * len(self.actor.ranks) / epochs
        speed = {"perf/tokens_per_gpu_per_sec_training": len(learnt.tokens) / gpu_seconds}
        peak = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
        if peak:
            outputs = int(learnt.response_mask.sum())
            frozen = self.recipe.actor.lora is not None
            done = training_flops(self.actor.architecture, learnt.lengths.tolist(), outputs, frozen=frozen)
            speed["perf/mfu_training"] = done / gpu_seconds / peak
        return speed

    def _data_position(self) -> dict[str, Any]:
        """Where the data stand, without the description of their order; collective."""
        state = TeamOwnedState(self.train, self.generators).state()
        return {name: value for name, value in state.items() if name != "order"}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds numbers to a step's record, and acts on the health rules that they break; collective.

        Raises HealthStop on all ranks where a rule stops the run.
        """
        watchdog.beat()
        if self.report:
            self.report.step(step, metrics)
        best = self.recipe.checkpoint.keep_best
        compared = [value for name, value in metrics.items() if best and fnmatchcase(name, best.metric)]
        if compared:
            self._worth[step] = fmean(compared)
        self.health.after(step, metrics)

    def say(self, text: str) -> None:
        """One line for the person who watches."""
        if self.report:
            self.report.console.message(text)

    def _tell(self, text: str) -> None:
        """Says it, or has it said as soon as there is a report."""
        self.say(text) if self.report else self._found_out.append(text)

    def export(self, step: int) -> str | None:
        """Writes the actor as a Hugging Face folder; why that failed, where it did. Collective."""
        with self.phase("export"):
            return self._exports.write(step)

    def finish(self) -> Path | None:
        """Exports the last step as ``Exports.write_last``; collective."""
        with self.phase("export"):
            return self._exports.write_last(self._saved(), self.say)

    def at_end(self, action: Callable[[], None]) -> None:
        """Has ``action`` done when the session closes, the latest first."""
        self._endings.append(action)

    def abandon(self) -> None:
        """Gives the terminal back as the run fails on this rank; the process is to end now."""
        self.health.close()
        self._gpus.close()
        if self.report:
            self.report.console.close()

    def close(self) -> None:
        """Draws the run and ends what the session holds; collective. Ranks can exchange nothing after it."""
        self.health.close()
        self._gpus.close()
        if self.report:
            self.report.close()
        dist.barrier()  # an engine that ends may take torch.distributed with it
        for action in reversed(self._endings):
            action()
