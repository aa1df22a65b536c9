"""The sections around training: `evaluation`, `checkpoint`, `monitor` and `cluster`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_megatron.recipe.rollout import LOWEST_TEMPERATURE
from rlhf_megatron.recipe.section import LARGEST_MEMORY_GB, LONGEST_SECONDS, Section


class EvaluationSection(Section):
    """Evaluation on the validation files."""

    interval: int = Field(default=0, ge=0)
    """Steps between evaluations; 0: none in between."""
    at_start: bool = True
    """Evaluate before the first step."""
    at_end: bool = True
    """Evaluate after the last step."""
    samples_per_prompt: int = Field(default=1, gt=0, le=2**16)
    """Responses per prompt."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy, and others are 0.01 or more."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling."""
    correct_from: float = 1.0
    """A response is right if its score (that of the first of reward.parts) is at least this."""
    max_prompts: int | None = Field(default=None, gt=0)
    """Use only the first so many rows."""

    @model_validator(mode="after")
    def _samples_differ(self) -> EvaluationSection:
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            raise ValueError(f"temperature={self.temperature:g} must be 0, or {LOWEST_TEMPERATURE} or more")
        if self.samples_per_prompt > 1 and not self.temperature:
            raise ValueError(
                f"samples_per_prompt={self.samples_per_prompt} at temperature 0 would be the same response each time; "
                "set evaluation.temperature"
            )
        return self


class KeepBestSection(Section):
    """By what checkpoints are compared."""

    metric: str = "eval/*/accuracy"
    """Name of a metric of the evaluations, or a pattern; the mean of all that fit counts."""
    mode: Literal["max", "min"] = "max"
    """Direction of the metric: more (max) or less (min) of it is better."""


class CheckpointSection(Section):
    """Checkpoints and exports."""

    save_interval: int = Field(default=0, ge=0)
    """Steps between resumable checkpoints; 0: none."""
    keep_last_k: int = Field(default=2, gt=0)
    """Checkpoints to keep."""
    keep_best: KeepBestSection | None = None
    """Keep also the best one of those whose step was evaluated; the file checkpoints/best names it."""
    save_before_seconds: float = Field(default=0.0, ge=0, le=LONGEST_SECONDS)
    """Save and stop where the next step would end later than so many seconds before the job does, by Slurm's limit or
    the environment's RLHF_MEGATRON_DEADLINE; 0: never."""
    export_interval: int = Field(default=0, ge=0)
    """Steps between exports in Hugging Face format; 0: none in between."""
    export_at_end: bool = True
    """Export after the last step."""


class TimelineSection(Section):
    """Steps whose phases on all ranks are written to timeline/step-N.json, a Chrome trace. Step 0 is the start."""

    steps: list[Annotated[int, Field(ge=0)]] = Field(default=[])
    """These steps."""
    every: int = Field(default=0, ge=0)
    """And each step that it divides, 0 included; 0: no others."""

    def has(self, step: int) -> bool:
        """Returns whether a step is written."""
        return step in self.steps or bool(self.every and step % self.every == 0)

    @property
    def is_on(self) -> bool:
        """True if any step is written."""
        return bool(self.steps or self.every)


class ProfileSection(Section):
    """Steps whose kernels are recorded, which slows these steps down."""

    steps: list[Annotated[int, Field(gt=0)]] = Field(default=[])
    """These steps."""
    ranks: list[Annotated[int, Field(ge=0)]] = Field(default=[0])
    """On these ranks."""
    tool: Literal["torch", "nsys"] = "torch"
    """torch: torch's profiler writes a Chrome trace and a table of the kernels for each phase. nsys: nothing but the
    marks by which NVIDIA's nsys, around torchrun, records these steps with the names of the phases."""
    phases: list[
        Literal["generate", "score", "sleep", "logprobs", "update_critic", "update", "regather", "evaluate", "save"]
    ] = Field(default=["logprobs", "update_critic", "update", "regather"])
    """Phases that torch's profiler records. A rollout has so many kernels that its file may be of gigabytes."""

    @model_validator(mode="after")
    def _something_is_recorded(self) -> ProfileSection:
        if self.steps and not (self.ranks and (self.phases or self.tool == "nsys")):
            raise ValueError(f"{'phases' if self.ranks else 'ranks'}=[]: nothing of these steps is recorded; name some")
        return self


class PrometheusSection(Section):
    """Address at which the tracker prometheus serves the newest value of every metric, on the node of rank 0."""

    port: int = Field(default=9400, ge=0, le=65535)
    """Its port; 0: any that is free, which the run says."""
    address: str = "127.0.0.1"
    """Address to listen on: 127.0.0.1 serves only this node, 0.0.0.0 everybody who reaches it."""


class MonitorSection(Section):
    """Records and displays of a run."""

    trackers: list[Literal["jsonl", "csv", "tensorboard", "wandb", "mlflow", "prometheus"]] = Field(default=["jsonl"])
    """Destinations of the metrics."""
    prometheus: PrometheusSection = PrometheusSection()
    """The tracker of that name."""
    console: bool = True
    """Show the live table."""
    plots: bool = True
    """Draw plots/run.png at the end."""
    report: bool = True
    """Write report.html at the end: the run on one page."""
    sample_rows: int = Field(default=8, ge=0)
    """Answers kept from each evaluation in samples/step-N.parquet."""
    timeline: TimelineSection = TimelineSection()
    """Timeline of what each rank does."""
    profile: ProfileSection = ProfileSection()
    """Profile of kernels."""

    @model_validator(mode="after")
    def _trackers_differ(self) -> MonitorSection:
        twice = next((name for name in self.trackers if self.trackers.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"trackers: {twice} is named twice, and would get each number twice; name it once")
        return self


class RegatherSection(Section):
    """Weight sync from the actor to the rollout."""

    buffer_mb: int = Field(default=256, gt=0)
    """MB of 2^20 bytes on each GPU for what travels; a regathering that finds less memory makes do with less."""
    peer_memory: bool = True
    """GPUs of one host read each other's weights over NVLink, where they can; false: they send messages."""
    verify: int = Field(default=0, ge=0)
    """Regatherings between checks of every weight by its checksum, on both ends; a difference stops the run. 0:
    none."""


class ClusterSection(Section):
    """The machines, for planning and for choosing near sources."""

    gpus_per_node: int = Field(default=8, gt=0)
    """GPUs of one node."""
    gpu_memory_gb: float = Field(default=80.0, gt=0, le=LARGEST_MEMORY_GB)
    """Memory of one GPU in GB of 2^30 bytes; `--dry-run` compares its estimate with it."""
    gpu: Literal["A100", "B200", "H100", "H200", "H800"] | None = None
    """Model of the GPUs; with it `--dry-run` estimates the time of a step."""
    link_gb_per_sec: float | None = Field(default=None, gt=0)
    """Bandwidth of one GPU to other nodes in GB/s, for the estimated time of a regathering."""
