"""The sections around training: `reward`, `evaluation`, `checkpoint`, `monitor` and `cluster`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_megatron.recipe.section import Section


class RewardSection(Section):
    """Where rewards come from."""

    function: str | None = None
    """"path/to/file.py:name" of a compute_score(data_source, solution_str, ground_truth, extra_info); default: by
    data_source."""
    timeout_seconds: float = Field(default=10.0, gt=0)
    """Most time for one sample where the reward runs in a worker process."""
    workers: int = Field(default=2, gt=0)
    """Worker processes per rollout replica."""


class EvaluationSection(Section):
    """Evaluation on the validation files."""

    interval: int = Field(default=0, ge=0)
    """Steps between evaluations; 0: none in between."""
    at_start: bool = True
    """Evaluate before the first step."""
    at_end: bool = True
    """Evaluate after the last step."""
    samples_per_prompt: int = Field(default=1, gt=0)
    """Responses per prompt."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    max_prompts: int | None = Field(default=None, gt=0)
    """Use only the first so many rows."""


class CheckpointSection(Section):
    """What is saved."""

    save_interval: int = Field(default=0, ge=0)
    """Steps between resumable checkpoints; 0: none."""
    keep_last_k: int = Field(default=2, gt=0)
    """Checkpoints to keep."""
    export_interval: int = Field(default=0, ge=0)
    """Steps between exports in Hugging Face format; 0: none in between."""
    export_at_end: bool = True
    """Export after the last step."""


class MonitorSection(Section):
    """What is recorded and shown."""

    trackers: list[Literal["jsonl", "csv", "tensorboard", "wandb", "mlflow"]] = Field(default=["jsonl"])
    """Where metrics go."""
    console: bool = True
    """Show the live table."""
    plots: bool = True
    """Draw plots/run.png at the end."""
    sample_rows: int = Field(default=8, ge=0)
    """Answers kept from each evaluation in samples/step-N.parquet."""


class ClusterSection(Section):
    """The machines, for planning and for choosing near sources."""

    gpus_per_node: int = Field(default=8, gt=0)
    """GPUs of one node."""
    gpu_memory_gb: float = Field(default=80.0, gt=0)
    """Memory of one GPU in GB of 2^30 bytes; `--dry-run` compares its estimate with it."""
    link_gb_per_sec: float | None = Field(default=None, gt=0)
    """Bandwidth of one GPU to other nodes in GB/s, for the estimated time of a regathering."""
