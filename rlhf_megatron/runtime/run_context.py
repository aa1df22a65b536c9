"""The run as all rooms see it: its recipe, this rank, and how its work is timed, shown and kept alive."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from rlhf_megatron.monitor.console import Console
from rlhf_megatron.monitor.profiler import Profiler
from rlhf_megatron.monitor.run_folder import RunFolder
from rlhf_megatron.recipe import Recipe
from rlhf_megatron.runtime import faults
from rlhf_megatron.runtime.host_network import HostNetwork
from rlhf_megatron.runtime.phases import Phases
from rlhf_megatron.runtime.watchdog import watchdog
from rlhf_megatron.topology.team import Team

RecipeT = TypeVar("RecipeT", bound=Recipe, covariant=True)


class RunContext(Generic[RecipeT]):
    """One rank's view of a run. It knows neither models nor data: what works on those is given them beside it.

    Attributes:
        recipe: of the run; once the data is open its length is counted (``epochs``), and nothing changes any more.
        rank, world_size: of this process in the world.
        device: that this rank's tensors live on.
        folder: where the run's files lie.
        learners, generators: the teams that update the models and that answer prompts; both are the world unless
            rollout.steps_ahead gives them ranks of their own.
        phases: the clock of the step.
        network: what hosts send each other meanwhile.
        profiler: records the kernels of chosen steps.
        console: what this rank shows the run on; rank 0 has one from the time on when the run reports.
    """

    def __init__(self, recipe: RecipeT, learners: Team, generators: Team) -> None:
        """Start the clock, at the process's own start. Raises MonitorError where monitor.profile cannot be done."""
        self.recipe = recipe
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        self.folder = RunFolder(recipe.run_root, recipe.name)
        self.learners, self.generators = learners, generators
        self.phases = Phases()
        self.network = HostNetwork()
        self.profiler = Profiler(recipe.monitor.profile, self.folder, self.rank, self.world_size)
        self.console: Console | None = None
        self._after_phase: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the step as ``time/NAME`` and show it; times of the same name add up.

        What ``after_phase`` was given is done as a phase ends.
        """
        with self.profiler.phase(name), self.network.phase(name), self.phases.phase(name):
            self.progress(name)
            faults.at(name, watchdog.step)
            yield
            for action in self._after_phase:
                action()
            watchdog.beat()

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Mark a part of a phase, for the timeline and the profiler alone."""
        with self.profiler.span(name), self.phases.span(name):
            yield

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Time the wait for the other team; the phase's name says which of the two has too few GPUs."""
        with self.phase("wait_for_rollout" if self.learners.here else "wait_for_update"):
            yield

    def after_phase(self, action: Callable[[], None]) -> None:
        """Have ``action`` done at the end of every phase from now on."""
        self._after_phase.append(action)

    def seconds(self, phase: str) -> float:
        """Return how long a phase of this step has taken so far."""
        return self.phases.seconds(phase)

    def progress(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Tell the watchdog, and show on the rank that reports, how far a phase has come."""
        watchdog.beat(phase)
        if self.console:
            self.console.phase(phase, done, total)

    def say(self, text: str) -> None:
        """Show one line to the person who watches."""
        if self.console:
            self.console.message(text)
