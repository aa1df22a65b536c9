"""The sections around training: ``evaluation``, ``checkpoint``, ``monitor`` and ``cluster``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhf_megatron.gpu_kinds import GPUS
from rlhf_megatron.recipe.rollout import LOWEST_TEMPERATURE
from rlhf_megatron.recipe.section import LARGEST_MEMORY_GB, LONGEST_SECONDS, Section


class EvaluationSection(Section):
    """Evaluation on the validation files (docs/evaluation.md)."""

    interval: int = Field(default=0, ge=0)
    """In steps; 0: never."""
    at_start: bool = True
    """Before the first step."""
    at_end: bool = True
    """After the last step."""
    samples_per_prompt: int = Field(default=1, gt=0, le=2**16)
    """Responses per prompt."""
    temperature: float = Field(default=0.0, ge=0)
    """0 (greedy), or 0.01 and above."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling."""
    correct_from: float = 1.0
    """Lowest right score (of the first of reward.parts)."""
    max_prompts: int | None = Field(default=None, gt=0)
    """Use the first N rows."""

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
    """Criterion of the best checkpoint."""

    metric: str = "eval/*/accuracy"
    """Metric or pattern; the mean of all matches."""
    mode: Literal["max", "min"] = "max"
    """Direction of improvement."""


class CheckpointSection(Section):
    """Checkpoints and exports (docs/checkpoints.md)."""

    save_interval: int = Field(default=0, ge=0)
    """In steps; 0: never."""
    keep_last_k: int = Field(default=2, gt=0)
    """Older ones are deleted."""
    keep_best: KeepBestSection | None = None
    """Keep the best evaluated one too, checkpoints/best."""
    save_before_seconds: float = Field(default=0.0, ge=0, le=LONGEST_SECONDS)
    """Save and stop if the next step would leave less before the job's end; 0: never."""
    export_interval: int = Field(default=0, ge=0)
    """In steps; 0: never."""
    export_at_end: bool = True
    """After the last step."""


class TimelineSection(Section):
    """Steps whose phases on all ranks go to timeline/step-N.json, a Chrome trace. Step 0 is the start."""

    steps: list[Annotated[int, Field(ge=0)]] = Field(default=[])
    """These steps."""
    every: int = Field(default=0, ge=0)
    """And every N-th step, 0 included; 0: none."""

    def has(self, step: int) -> bool:
        """Return whether a step is written."""
        return step in self.steps or bool(self.every and step % self.every == 0)

    @property
    def is_on(self) -> bool:
        """True if any step is written."""
        return bool(self.steps or self.every)


class ProfileSection(Section):
    """Recording of kernels; slower."""

    steps: list[Annotated[int, Field(gt=0)]] = Field(default=[])
    """These steps."""
    ranks: list[Annotated[int, Field(ge=0)]] = Field(default=[0])
    """On these ranks."""
    tool: Literal["torch", "nsys"] = "torch"
    """torch: Chrome trace and kernel table per phase; nsys: NVTX ranges and capture marks."""
    phases: list[
        Literal["generate", "score", "sleep", "logprobs", "update_critic", "update", "regather", "evaluate", "save"]
    ] = Field(default=["logprobs", "update_critic", "update", "regather"])
    """For torch; generate may give gigabytes."""
    duration_seconds: float | None = Field(default=None, gt=0, le=LONGEST_SECONDS)
    """Recording ends so long after a step's start."""

    @model_validator(mode="after")
    def _something_is_recorded(self) -> ProfileSection:
        if self.steps and not (self.ranks and (self.phases or self.tool == "nsys")):
            raise ValueError(f"{'phases' if self.ranks else 'ranks'}=[]: nothing of these steps is recorded; name some")
        return self


class PrometheusSection(Section):
    """Endpoint with the latest value of every metric, on rank 0's node."""

    port: int = Field(default=9400, ge=0, le=65535)
    """0: a free one, which is logged."""
    address: str = "127.0.0.1"
    """127.0.0.1: this node; 0.0.0.0: whoever reaches it."""


class RolloutsSection(Section):
    """Rows of training that are kept in rollouts/step-N.parquet, by whole groups."""

    every: int = Field(default=10, ge=0)
    """Every N-th step; 0: never."""
    rows: int = Field(default=64, gt=0)
    """At most, of a step's first groups; at least one group."""

    def has(self, step: int) -> bool:
        """Return whether rows of a step are kept."""
        return bool(self.every) and step % self.every == 0


class PageSection(Section):
    """The page of the run while it goes on, on rank 0's node (docs/monitoring.md#the-page)."""

    port: int | None = Field(default=None, ge=0, le=65535)
    """0: a free one; null: no page."""
    address: str = "127.0.0.1"
    """127.0.0.1: this node; 0.0.0.0: whoever reaches it and has the token."""


class MonitorSection(Section):
    """Metrics, console and plots (docs/monitoring.md)."""

    trackers: list[Literal["jsonl", "csv", "tensorboard", "wandb", "mlflow", "prometheus"]] = Field(default=["jsonl"])
    """See docs/monitoring.md."""
    prometheus: PrometheusSection = PrometheusSection()
    """Serves the latest metrics on rank 0's node."""
    console: bool = True
    """The live table."""
    plots: bool = True
    """plots/run.png at the end."""
    report: bool = True
    """report.html at the end."""
    sample_rows: int = Field(default=8, ge=0)
    """Responses per evaluation in samples/step-N.parquet."""
    page: PageSection = PageSection()
    """Serves the run's page while it goes on."""
    log_model: bool = False
    """Logs the last export with mlflow (transformers flavour)."""
    rollouts: RolloutsSection = RolloutsSection()
    """Training rows to keep, with both sides' logprobs."""
    timeline: TimelineSection = TimelineSection()
    """Writes phases to timeline/step-N.json, a Chrome trace. Step 0 is the start."""
    profile: ProfileSection = ProfileSection()
    """Recording of kernels; slower."""

    @model_validator(mode="after")
    def _trackers_differ(self) -> MonitorSection:
        twice = next((name for name in self.trackers if self.trackers.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"trackers: {twice} is named twice, and would get each number twice; name it once")
        return self

    @model_validator(mode="after")
    def _someone_takes_the_model(self) -> MonitorSection:
        if self.log_model and "mlflow" not in self.trackers:
            raise ValueError("log_model=true: mlflow alone takes a model; add it to trackers, or leave log_model out")
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> MonitorSection:
        if "prometheus" in self.trackers and self.page.port and self.page.port == self.prometheus.port:
            raise ValueError(f"page.port={self.page.port}: is prometheus.port too; choose another")
        return self


class RegatherSection(Section):
    """Weight sync from actor to rollout."""

    buffer_mb: int = Field(default=256, gt=0)
    """Per GPU; less where memory is short."""
    peer_memory: bool = True
    """NVLink reads within a host where possible; false: messages."""
    verify: int = Field(default=0, ge=0)
    """Compare checksums in every N-th weight sync; a mismatch stops the run. 0: never."""


class ClusterSection(Section):
    """The machines, for planning and for choosing near sources in a weight sync."""

    gpus_per_node: int = Field(default=8, gt=0)
    """GPUs per node."""
    gpu_memory_gb: float = Field(default=80.0, gt=0, le=LARGEST_MEMORY_GB)
    """``--dry-run`` compares its estimate; ``gpu``'s by default."""
    memory_reserve_gb: float = Field(default=0.0, ge=0, le=LARGEST_MEMORY_GB)
    """Kept free in plans beside 5%."""
    gpu: Literal["A100", "A800", "B200", "GB200", "H100", "H20", "H200", "H800", "L40S"] | None = None
    """For ``--dry-run``'s step time."""
    link_gb_per_sec: float | None = Field(default=None, gt=0)
    """Inter-node bandwidth per GPU, for estimates."""

    @model_validator(mode="before")
    @classmethod
    def _memory_of_gpu(cls, given: Any) -> Any:
        """Fill in what the named GPU has: a plan for an L40S must not fill 80 GB."""
        kind = given.get("gpu") if isinstance(given, dict) else None
        if not isinstance(kind, str) or kind not in GPUS:
            return given
        return {"gpu_memory_gb": GPUS[kind].memory_gb} | given

    @model_validator(mode="after")
    def _memory_is_left(self) -> ClusterSection:
        if self.memory_reserve_gb >= self.gpu_memory_gb:
            raise ValueError(
                f"memory_reserve_gb={self.memory_reserve_gb:g} leaves nothing of gpu_memory_gb={self.gpu_memory_gb:g}; "
                "lower it"
            )
        return self

    @property
    def planned_memory_gb(self) -> float:
        """The memory of a GPU that plans may fill, in GB of 2^30 bytes."""
        return self.gpu_memory_gb - self.memory_reserve_gb
