"""YaRN's factor of turned queries and keys (https://arxiv.org/abs/2309.00071), for the trainer and for the rollout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Names in a config.json, in the order of ``attention_factor``'s arguments.
FACTORS = ("attention_factor", "mscale", "mscale_all_dim", "attn_factor")


def magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return what queries and keys are multiplied by where positions are stretched by ``factor``; 1.0 below that."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def attention_factor(
    factor: float,
    given: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    attn_factor: float | None = None,
) -> float:
    """Return the factor of ``attn_factor``, else as transformers has it: ``given`` in the config, else of both mscales,
    else of ``factor``."""
    if attn_factor is not None:
        # vLLM before 0.30 and SGLang multiply by it; newer vLLM and transformers ignore it. The product is what a maker
        # means: DeepSeek-R1-0528-Qwen3-8B has 1 / (0.1 ln 4 + 1), by which nothing is scaled.
        return magnitude(factor) * attn_factor
    if given is not None:
        return given
    if mscale and mscale_all_dim:
        return magnitude(factor, mscale) / magnitude(factor, mscale_all_dim)
    return magnitude(factor)


def factor_in(yarn: Mapping[str, Any]) -> float:
    """Return the factor that YaRN parameters of a config say."""
    return attention_factor(yarn["factor"], *map(yarn.get, FACTORS))


def yarn_tables(rope: object) -> list[dict[str, Any]]:
    """Return the YaRN parameters among rotary parameters of a config: its own, or those of each type of layer."""
    if not isinstance(rope, dict):
        return []
    tables = [each for each in (rope, *rope.values()) if isinstance(each, dict)]
    return [table for table in tables if table.get("rope_type", table.get("type")) == "yarn"]
