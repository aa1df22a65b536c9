"""The sections of a job: `retry` and `slurm`. launch/submit.py and the start of a run read them; training does not."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from rlhf_megatron.recipe.section import LONGEST_SECONDS, Section
from rlhf_megatron.untrusted import shown

# Options of sbatch that the job's script relies on, and what decides them.
_SET_BY_KEYS = {
    "nodes": "set slurm.nodes",
    "ntasks": "one task of each node starts its processes; leave it out",
    "ntasks-per-node": "one task of each node starts its processes; leave it out",
    "signal": "set slurm.signal_seconds",
    "array": "give launch/submit.py --array FILE",
    "requeue": "set slurm.requeue",
    "no-requeue": "set slurm.requeue",
    "chdir": "a job runs where it is submitted; leave it out",
    "wrap": "the job has a script; leave it out",
}


class OutOfMemorySection(Section):
    """Changes of a restart after a rank ran out of memory; a person's next start takes the recipe's values again."""

    token_factor: float = Field(default=0.75, gt=0, lt=1)
    """Factor of the token budget of the pass that failed; never below one longest sequence."""
    rollout_factor: float = Field(default=0.9, gt=0, lt=1)
    """Factor of rollout.kv_cache_gb, or else of rollout.gpu_memory_utilization, where generation failed."""
    max_reductions: int = Field(default=3, ge=0)
    """Reductions in all; 0: none."""


class RetrySection(Section):
    """Restarts after a fault."""

    max_retries: int = Field(default=3, ge=0)
    """Restarts of a job's processes by torchrun under launch/submit.py (its --max-restarts)."""
    launcher: Literal["torchrun", "ft_launcher"] = "torchrun"
    """Launcher of a job's processes under launch/submit.py. ft_launcher is nvidia-resiliency-ext's, to be installed: a
    monitor beside each rank kills one that stands still for hang_seconds."""
    max_repeats: int = Field(default=3, gt=0)
    """A run that has failed so often in a row after the same step is not started again, by torchrun or by Slurm."""
    hang_seconds: float = Field(default=1800.0, ge=0, le=LONGEST_SECONDS)
    """A rank without progress for so long ends the attempt, with the stacks of all ranks in logs/hang-STEP; longer than
    the longest phase of any rank. 0: never."""
    hang_seconds_at_start: float = Field(default=3600.0, ge=0, le=LONGEST_SECONDS)
    """The same until the first step begins, if it is longer: models are loaded and engines started then."""
    max_skipped_steps: int = Field(default=5, ge=0)
    """So many steps in a row without a finite gradient end the attempt; the next one goes on from the newest checkpoint
    and passes over the data of these steps. 0: never."""
    out_of_memory: OutOfMemorySection = OutOfMemorySection()
    """Changes of a restart after a rank ran out of memory."""

    @model_validator(mode="after")
    def _monitors_have_a_limit(self) -> RetrySection:
        if self.launcher == "ft_launcher" and not self.hang_seconds:
            raise ValueError("hang_seconds=0: ft_launcher would kill each rank at once; give a time, or use torchrun")
        return self


class SlurmSection(Section):
    """A job of launch/submit.py; cluster.gpus_per_node says how many processes a node has."""

    account: str | None = None
    """Account that the job is charged to."""
    partition: str | None = None
    """Partition that it runs in; default: the cluster's."""
    time_limit_hours: float = Field(default=24.0, ge=1 / 60, le=LONGEST_SECONDS / 3600)
    """Time limit after which Slurm ends the job."""
    nodes: int = Field(default=1, gt=0)
    """Nodes of the job."""
    request_gpus: bool = True
    """Ask Slurm for the GPUs; false where it does not manage them."""
    options: list[str] = Field(default=[])
    """More options of sbatch, such as --qos=high or --cpus-per-task=16."""
    venv: str | None = None
    """Folder of the virtual environment; default: the Python that runs launch/submit.py."""
    container: str | None = None
    """Image for srun's --container-image (pyxis), whose python3 is used; not together with venv."""
    container_mounts: list[str] = Field(default=[])
    """Mounts of the container besides the working folder and this repository: source:target."""
    setup_script: str | None = None
    """A bash script that each node reads before it starts, for modules and variables."""
    network: Literal["infiniband", "roce", "tcp"] | None = None
    """The file of launch/env/ with NCCL's variables; default: NCCL finds out by itself."""
    rendezvous_host: str | None = None
    """Address of the first node; default: its name in Slurm."""
    requeue: bool = True
    """Put the job back into the queue when it was preempted, reached its limit or lost a node."""
    signal_seconds: int = Field(default=600, ge=60)
    """Seconds before its limit at which the job is told to save: the longest step, a save, and a minute."""

    @model_validator(mode="after")
    def _options_fit(self) -> SlurmSection:
        names = [re.match(r"--([a-z][a-z-]*)(=|$)", option) for option in self.options]
        wrong = next((option for option, name in zip(self.options, names, strict=True) if name is None), None)
        if wrong is not None:
            raise ValueError(f"options: {shown(repr(wrong))} is none of sbatch's; write each as --name=value")
        taken = next((name[1] for name in names if name and name[1] in _SET_BY_KEYS), None)
        if taken is not None:
            raise ValueError(f"options: --{taken}: {_SET_BY_KEYS[taken]}")
        if self.container_mounts and not self.container:
            raise ValueError("container_mounts: there is no container that would see them; give it, or leave them out")
        if self.venv and self.container:
            raise ValueError("venv and container exclude each other; leave one out")
        if self.signal_seconds >= self.time_limit_hours * 3600:
            raise ValueError(
                f"signal_seconds={self.signal_seconds} must be below the {self.time_limit_hours * 3600:.0f} s of "
                f"time_limit_hours={self.time_limit_hours:g}: the job would be told to save before it begins"
            )
        return self
