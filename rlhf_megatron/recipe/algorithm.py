"""The `algorithm` section: what is optimised. Terms are the field's."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_megatron.recipe.section import Section


class FilterGroupsSection(Section):
    """DAPO's dynamic sampling: groups whose rewards are all equal teach nothing and are replaced."""

    enable: bool = False
    """Whether to replace them."""
    metric: Literal["accuracy", "reward"] = "accuracy"
    """What must differ inside a group: the score itself, or the reward with its penalties."""
    max_num_gen_batches: int = Field(default=10, ge=0)
    """Most rounds of generation for one step; 0: no limit."""
    prompts_per_round: int | None = Field(default=None, gt=0)
    """Prompts of one round; default: batch.prompts_per_step."""
    when_exhausted: Literal["train", "stop"] = "train"
    """After the last round: train on the groups that there are, or stop the run."""
    keep_surplus: bool = False
    """Keep groups beyond the step's for the next step; they are of weights that are one step old."""


class OverlongBufferSection(Section):
    """DAPO's soft penalty for responses that come near the length limit."""

    enable: bool = False
    """Whether to punish them."""
    len: int = Field(default=0, ge=0)
    """Tokens before rollout.max_response_length from which the penalty grows."""
    penalty_factor: float = Field(default=1.0, ge=0)
    """The penalty at the limit."""


class RolloutCorrectionSection(Section):
    """Importance weights against the difference between the rollout's logprobs and the trainer's."""

    type: Literal["none", "tis", "mis"] = "none"
    """none; tis: truncated weights; mis: tokens beyond the threshold are masked."""
    threshold: float = Field(default=2.0, gt=0)
    """Largest weight."""


class AlgorithmSection(Section):
    """The objective of reinforcement learning, and the aggregation of token losses."""

    advantage: str = "grpo"
    """Estimator of advantages: grpo (also Dr.GRPO), or rloo."""
    normalize_by_std: bool = True
    """Divide a group's advantages by the standard deviation of its rewards (GRPO); false: Dr.GRPO."""
    clip_ratio_low: float = Field(default=0.2, gt=0)
    """The policy ratio is clipped below 1 - this."""
    clip_ratio_high: float = Field(default=0.2, gt=0)
    """The policy ratio is clipped above 1 + this."""
    clip_ratio_dual: float | None = Field(default=None, gt=1)
    """Dual clip: bound on the ratio where the advantage is negative."""
    loss_aggregation: Literal[
        "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_sum_constant"
    ] = "token_mean"
    """How token losses become one number, always over the whole minibatch: token_mean (DAPO), or the mean over
    responses of each one's mean (GRPO), sum, or sum over a constant (Dr.GRPO)."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the reference in the loss; 0: no reference model is made."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that divergence."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """Logprobs that the ratio is taken against: the trainer's own, or the rollout's as reported."""
    filter_groups: FilterGroupsSection = FilterGroupsSection()
    """Dynamic sampling."""
    overlong_buffer: OverlongBufferSection = OverlongBufferSection()
    """Length penalty."""
    rollout_correction: RolloutCorrectionSection = RolloutCorrectionSection()
    """Correction of train-rollout mismatch."""
