"""YaRN's factor of turned queries and keys (https://arxiv.org/abs/2309.00071), for the trainer and for the rollout."""

from __future__ import annotations

import math


def magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return what queries and keys are multiplied by where positions are stretched by ``factor``; 1.0 below that."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def attention_factor(
    factor: float,
    given: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
) -> float:
    """Return the factor as transformers has it: ``given`` in the config, else of both mscales, else of ``factor``."""
    if given is not None:
        return given
    if mscale and mscale_all_dim:
        return magnitude(factor, mscale) / magnitude(factor, mscale_all_dim)
    return magnitude(factor)
