"""The `rollout` section: how vLLM generates."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlhf_megatron.recipe.section import Section


class RolloutLayoutSection(Section):
    """Degrees of parallelism of the rollout."""

    tensor: int = Field(default=1, gt=0)
    """GPUs of one vLLM replica."""
    expert_parallel: bool = False
    """With experts: each GPU of a replica holds some of them whole; else a part of each."""
    data: int | None = Field(default=None, gt=0)
    """Replicas; default: as many as the GPUs hold."""


class RolloutSection(Section):
    """vLLM's settings, under vLLM's names where it has them."""

    ranks: str = "all"
    """GPUs that generate: all, or as for roles."""
    layout: RolloutLayoutSection = RolloutLayoutSection()
    """Degrees of parallelism."""
    max_response_length: int = Field(gt=0)
    """Most tokens of a response."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the trainer computes its logprobs at the same, so it cannot be 0."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling."""
    top_k: int = Field(default=-1, ge=-1)
    """Sample from the k likeliest only; -1 is off."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the rollout's weights; default: model.dtype."""
    gpu_memory_utilization: float = Field(default=0.5, gt=0, le=1)
    """vLLM's share of each GPU's memory."""
    kv_cache_gb: float | None = Field(default=None, gt=0)
    """Size of the KV cache on each GPU, in GB of 2^30 bytes; default: what the share leaves (on CPUs 0.0625)."""
    max_num_seqs: int = Field(default=256, gt=0)
    """Sequences generated at a time by one replica."""
    max_num_batched_tokens: int | None = Field(default=None, gt=0)
    """Tokens in one engine step."""
    enable_chunked_prefill: bool = True
    """Cut long prompts so that they do not stall the others."""
    enable_prefix_caching: bool = True
    """Compute the prompt of a group once."""
    enforce_eager: bool = False
    """No CUDA graphs and no compilation: starts faster, generates slower."""
    sleep: bool = True
    """Give weights and cache back to the GPU during the update."""
    async_scheduling: bool = False
    """vLLM's overlap of scheduling and computing."""

    @model_validator(mode="after")
    def _top_k_is_a_number(self) -> RolloutSection:
        if self.top_k == 0:
            raise ValueError("top_k=0 would leave no token to sample; -1 is off")
        return self
