"""What is measured about logprobs. Numbers for people; nothing here has a gradient."""

from __future__ import annotations

from torch import Tensor

from rlhf_megatron.algorithms.kl import kl_estimate


def mismatch_metrics(trainer_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor) -> dict[str, float]:
    """How far trainer and rollout engine disagree about the same weights; all [T], over the sampled tokens.

    ``train/mismatch_kl`` estimates KL(rollout || trainer) by k3: the samples are the rollout's.
    """
    trainer, rollout = trainer_logprobs[response_mask].double(), rollout_logprobs[response_mask].double()
    if not len(trainer):
        return {}
    difference = (trainer - rollout).abs()
    return {
        "train/mismatch_kl": float(kl_estimate(rollout, trainer, "k3").mean()),
        "train/rollout_logprob_abs_diff": float(difference.mean()),
        "train/rollout_logprob_abs_diff_median": float(difference.median()),
        "train/rollout_logprob_abs_diff_max": float(difference.max()),
    }
