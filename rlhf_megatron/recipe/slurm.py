"""The sections of a job: ``retry`` and ``slurm``. launch/submit.py and the start of a run read them; training does
not."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from rlhf_megatron.recipe.section import LONGEST_SECONDS, Section
from rlhf_megatron.untrusted import shown

LONGEST_BACKOFF_SECONDS = 300.0  # that doubling leads to
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
    """Smaller budgets on restarts after out of memory; a manual start resets them."""

    token_factor: float = Field(default=0.75, gt=0, lt=1)
    """Times the failed pass's token budget, at least the longest sequence."""
    rollout_factor: float = Field(default=0.9, gt=0, lt=1)
    """If generation failed: times rollout.kv_cache_gb, else rollout.gpu_memory_utilization."""
    max_reductions: int = Field(default=3, ge=0)
    """0: none."""


class NetworkRetrySection(Section):
    """Retries where a hub or reward service cannot be reached."""

    max_retries: int = Field(default=4, ge=0, le=1000)
    """Further tries to reach the hub at the start; reward.service has its own."""
    backoff_seconds: float = Field(default=2.0, gt=0, le=LONGEST_SECONDS)
    """Before the first, and before an attempt after such a fault; doubles up to 300."""

    def seconds_before(self, retry: int) -> float:
        """Return how long to wait before a try, counted from 0."""
        return min(self.backoff_seconds * 2.0 ** min(retry, 32), max(self.backoff_seconds, LONGEST_BACKOFF_SECONDS))


class RetrySection(Section):
    """Restarts after a fault (docs/recovery.md)."""

    max_retries: int = Field(default=3, ge=0)
    """Within a job of launch/submit.py (torchrun's --max-restarts)."""
    interval_seconds: float = Field(default=0.0, ge=0, le=LONGEST_SECONDS)
    """Wait before an attempt that follows a fault."""
    network: NetworkRetrySection = NetworkRetrySection()
    """If a hub or reward service is away."""
    launcher: Literal["torchrun", "ft_launcher"] = "torchrun"
    """Of launch/submit.py. ft_launcher (nvidia-resiliency-ext) kills ranks silent for hang_seconds."""
    max_repeats: int = Field(default=3, gt=0)
    """Failures after the same step before torchrun and Slurm give up."""
    hang_seconds: float = Field(default=1800.0, ge=0, le=LONGEST_SECONDS)
    """A rank without progress for so long ends the attempt; above the longest phase. 0: never."""
    hang_seconds_at_start: float = Field(default=3600.0, ge=0, le=LONGEST_SECONDS)
    """The same until the first step, if longer."""
    max_skipped_steps: int = Field(default=5, ge=0)
    """Consecutive steps with non-finite gradients that end the attempt; the next skips their data. 0: never."""
    out_of_memory: OutOfMemorySection = OutOfMemorySection()
    """On restarts after out of memory; a manual start resets it."""

    @model_validator(mode="after")
    def _monitors_have_a_limit(self) -> RetrySection:
        if self.launcher == "ft_launcher" and not self.hang_seconds:
            raise ValueError("hang_seconds=0: ft_launcher would kill each rank at once; give a time, or use torchrun")
        if self.launcher == "ft_launcher" and self.interval_seconds >= self.hang_seconds:
            raise ValueError(
                f"interval_seconds={self.interval_seconds:g}: ft_launcher kills ranks that say nothing for "
                f"hang_seconds={self.hang_seconds:g}; lower it"
            )
        return self


class SlurmSection(Section):
    """The job of launch/submit.py, with cluster.gpus_per_node processes per node (docs/slurm.md)."""

    account: str | None = None
    """Account."""
    partition: str | None = None
    """Partition; default: the cluster's."""
    time_limit_hours: float = Field(default=24.0, ge=1 / 60, le=LONGEST_SECONDS / 3600)
    """Time limit."""
    nodes: int = Field(default=1, gt=0)
    """Number of nodes."""
    request_gpus: bool = True
    """false where Slurm does not manage GPUs."""
    options: list[str] = Field(default=[])
    """More sbatch options, such as --qos=high."""
    venv: str | None = None
    """Default: launch/submit.py's Python."""
    container: str | None = None
    """Image (pyxis) instead of venv; its python3 is used."""
    container_mounts: list[str] = Field(default=[])
    """source:target, besides the working folder and this repository."""
    setup_script: str | None = None
    """Bash script sourced first on each node."""
    network: Literal["infiniband", "roce", "tcp"] | None = None
    """NCCL variables of launch/env/; default: none."""
    rendezvous_host: str | None = None
    """Address of the first node; default: its Slurm name."""
    requeue: bool = True
    """Requeue after preemption, the time limit or a lost node."""
    signal_seconds: int = Field(default=600, ge=60)
    """Signal so long before the limit: the longest step, a save, and a minute."""

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
