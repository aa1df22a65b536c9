"""The learning rate of a step: warm-up, then one of three ways down. Pure arithmetic."""

from __future__ import annotations

import math

from rlhf_megatron.recipe import OptimizerSection


def learning_rate(step: int, section: OptimizerSection, training_steps: int) -> float:
    """Return the rate of optimizer step ``step`` (from 0).

    It rises linearly over ``warmup_steps``, reaching ``learning_rate`` with the step after them, then falls to
    ``min_learning_rate`` at ``decay_steps`` (default: ``training_steps``) and stays there.
    """
    peak, floor, warmup = section.learning_rate, section.min_learning_rate, section.warmup_steps
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    last = section.decay_steps if section.decay_steps is not None else training_steps
    progress = min(1.0, (step - warmup) / max(1, last - warmup))
    match section.schedule:
        case "linear":
            return floor + (peak - floor) * (1.0 - progress)
        case "cosine":
            return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
        case _:
            return peak
