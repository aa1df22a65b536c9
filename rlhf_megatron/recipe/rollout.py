"""The `rollout` section: how vLLM generates."""

from __future__ import annotations

import math
import random
from typing import Literal

from pydantic import Field, model_validator

from rlhf_megatron.recipe.placement import Ranks
from rlhf_megatron.recipe.section import LARGEST_INTEGER, LARGEST_MEMORY_GB, LONGEST_SECONDS, MOST_WORKERS, Section

# vLLM would sample at this one instead of a lower one, and the trainer not.
LOWEST_TEMPERATURE = 0.01


class RolloutLayoutSection(Section):
    """Degrees of parallelism of the rollout."""

    tensor: int = Field(default=1, gt=0)
    """GPUs of one vLLM replica."""
    expert_parallel: bool = False
    """With experts: each GPU of a replica holds some of them whole; else a part of each."""
    data: int | None = Field(default=None, gt=0)
    """Replicas; default: as many as the GPUs hold."""


class DrawnLengthsSection(Section):
    """Lengths of responses, drawn from a lognormal distribution."""

    mean: float = Field(gt=0, le=LARGEST_INTEGER)
    """Mean length in tokens, of what rollout.max_response_length does not cut."""
    sigma: float = Field(default=0.0, ge=0, le=100)
    """Standard deviation of the length's logarithm; 0: all have the mean length."""

    def of_row(self, row: int) -> int:
        """The length of a step's row, 1 or more; the same in every step."""
        location = math.log(self.mean) - self.sigma**2 / 2
        return max(1, round(random.Random(row).lognormvariate(location, self.sigma)))


class MultiTurnSection(Section):
    """Responses of several turns: behind a turn of the model's a function of yours speaks, as a tool or a user does."""

    function: str
    """path/to/file.py:function (default name: respond). It is given the conversation and returns the next message, or
    None where the response ends (docs/multi_turn.md)."""
    max_assistant_turns: int = Field(default=4, gt=1)
    """Most turns of the model in a response; nobody answers the last one."""
    max_answer_tokens: int = Field(default=1024, gt=0)
    """An answer's content is cut to so many tokens. They count among max_response_length, and are not trained on."""
    timeout_seconds: float = Field(default=60.0, gt=0, le=LONGEST_SECONDS)
    """For one answer; a response that has none by then ends, and so does one whose function fails."""
    workers: int = Field(default=4, gt=0, le=MOST_WORKERS)
    """Processes of each replica that call the function."""
    memory_limit_gb: float = Field(default=16.0, gt=0, le=LARGEST_MEMORY_GB)
    """Most memory of one of them together with what it starts, in GB of 2^30 bytes; one that uses more is killed."""


class RolloutSection(Section):
    """vLLM's settings, under vLLM's names where it has them."""

    ranks: Ranks = "all"
    """GPUs that generate: all, or as for roles. Replicas are of neighbours among them."""
    steps_ahead: Literal[0, 1] = 0
    """1, known as one-step-off: GPUs that only generate answer the next step's prompts while the others learn from this
    one's, so each batch comes from the policy of one update before. It takes algorithm.rollout_correction, or
    old_logprobs rollout."""
    layout: RolloutLayoutSection = RolloutLayoutSection()
    """Degrees of parallelism."""
    max_response_length: int = Field(gt=0)
    """Most tokens of a response."""
    multi_turn: MultiTurnSection | None = None
    """Responses of several turns; default: of one."""
    drawn_lengths: DrawnLengthsSection | None = None
    """For benchmarks: each response ends at a length that is drawn in advance, whatever its tokens are."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the trainer computes its logprobs at the same, so it cannot be 0."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling."""
    top_k: int = Field(default=-1, ge=-1)
    """Sample from the k likeliest only; -1 is off."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the rollout's weights; default: model.dtype."""
    quantization: Literal["fp8"] | None = None
    """fp8: linear layers multiply in e4m3, weights with a scale for each row and activations for each token; experts,
    embeddings and the output layer do not. The policy that answers is then not quite the actor's: it takes
    algorithm.rollout_correction, or old_logprobs rollout."""
    gpu_memory_utilization: float = Field(default=0.5, gt=0, le=1)
    """vLLM's share of each GPU's memory."""
    kv_cache_gb: float | None = Field(default=None, gt=0, le=LARGEST_MEMORY_GB)
    """Size of the KV cache on each GPU, in GB of 2^30 bytes; default: what the share leaves (on CPUs 0.0625)."""
    max_num_seqs: int = Field(default=256, gt=0, le=2**16)
    """Sequences generated at a time by one replica."""
    max_num_batched_tokens: int | None = Field(default=None, gt=0, le=2**24)
    """Tokens in one engine step."""
    enable_chunked_prefill: bool = True
    """Cut long prompts so that they do not stall the others; never on CPUs."""
    enable_prefix_caching: bool = True
    """Compute the prompt of a group once."""
    enforce_eager: bool = False
    """No CUDA graphs and no compilation: starts faster, generates slower."""
    share_weights: Literal["auto", "never"] = "auto"
    """auto: each weight whose shard is the actor's own is the actor's memory, which then stays on the GPU; nothing is
    shared where actor.offload.parameters is on. never: every weight is a copy."""
    sleep: bool = True
    """Give weights that are not shared and the cache back to the GPU during the update, where a role is on it too;
    never with steps_ahead."""
    async_scheduling: bool = True
    """vLLM schedules the next engine step while the GPU computes this one."""
    scheduling: Literal["queue", "static"] = "queue"
    """queue: replicas draw groups from one queue as they have room; static: each has its share from the start, so that
    a run can be repeated to the last bit."""
    oversample: float = Field(default=1.0, ge=1, le=100)
    """Start so many times the groups that are needed, and give up the slowest when enough are done."""
    partial: Literal["discard", "resume"] = "discard"
    """Treatment of groups that were given up; their prompts come again in the next round of generation. discard:
    from the start; resume: with the tokens and logprobs that they have."""

    @model_validator(mode="after")
    def _slow_groups_can_be_given_up(self) -> RolloutSection:
        if self.oversample > 1 and self.scheduling == "static":
            raise ValueError(
                f"oversample={self.oversample:g} needs scheduling queue: with static, replicas know nothing of each "
                "other's groups; use queue, or leave oversample out"
            )
        if self.partial == "resume" and self.oversample == 1:
            raise ValueError("partial=resume: without oversample no group is given up; set it, such as 1.25")
        if self.partial == "resume" and self.drawn_lengths:
            raise ValueError("partial=resume: drawn_lengths ends each response by its row, which changes; use discard")
        return self

    @model_validator(mode="after")
    def _turns_are_of_one_generation(self) -> RolloutSection:
        if self.multi_turn is None:
            return self
        if self.partial == "resume":
            raise ValueError("partial=resume: with multi_turn what was given up begins anew; use discard")
        if self.drawn_lengths:
            raise ValueError("drawn_lengths: with multi_turn a turn ends where the model ends it; leave one out")
        return self

    @model_validator(mode="after")
    def _temperature_is_sampled_at(self) -> RolloutSection:
        if self.temperature < LOWEST_TEMPERATURE:
            raise ValueError(f"temperature={self.temperature:g} must be {LOWEST_TEMPERATURE} or more")
        return self

    @model_validator(mode="after")
    def _sequences_have_tokens(self) -> RolloutSection:
        most = self.max_num_batched_tokens
        if most is not None and most < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={most} is below max_num_seqs={self.max_num_seqs}, each of which takes a token "
                "of an engine step; change one"
            )
        return self

    @model_validator(mode="after")
    def _top_k_is_a_number(self) -> RolloutSection:
        if self.top_k == 0:
            raise ValueError("top_k=0 would leave no token to sample; -1 is off")
        return self
