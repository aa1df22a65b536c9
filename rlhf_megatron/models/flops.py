"""Floating-point operations of training, for model FLOPs utilisation (MFU); bytes of the rollout's cache.

What the model needs, not what was done: recomputed activations and padding do not count (arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.families import FAMILIES


def forward_flops(
    architecture: Architecture,
    lengths: Iterable[float],
    outputs: float,
    causal: bool = True,
    spared: Sequence[float] = (),
) -> float:
    """Return operations of one forward pass over rows of ``lengths`` tokens, whose head reads ``outputs`` tokens in
    all.

    A product of [m, k] and [k, n] counts 2 m k n; norms, activations and rotary embeddings count nothing. Attention of
    a row of n tokens is counted for the n (n + 1) / 2 pairs that may be seen, or those within a window, or for all n^2
    without ``causal``. ``spared``: lengths of prompts that are part of rows, and not computed again for them.
    """
    a, family = architecture, FAMILIES[architecture.family]
    weights = sum(count * family.multiplied_weights(a, kind) for kind, count in a.kind_counts.items())
    rows = list(lengths)
    head = 1 if a.head == "scalar" else a.vocabulary
    products = weights * (sum(rows) - sum(spared)) + a.hidden * head * outputs
    return 2.0 * products + _attention_flops(a, rows, causal, spared)


def training_flops(
    architecture: Architecture,
    lengths: Iterable[float],
    outputs: float,
    causal: bool = True,
    frozen: bool = False,
    spared: Sequence[float] = (),
) -> float:
    """Return operations of a forward and a backward pass, which has two products for each of the forward's.

    With ``frozen`` weights it has one for each product with a weight. What adapters add, less than a tenth of that at
    the usual ranks, does not count, as it is not the model's.
    """
    rows = list(lengths)
    forward = forward_flops(architecture, rows, outputs, causal, spared)
    return 2.0 * forward + _attention_flops(architecture, rows, causal, spared) if frozen else 3.0 * forward


def _attention_flops(architecture: Architecture, rows: Sequence[float], causal: bool, spared: Sequence[float]) -> float:
    """Return the operations of a forward pass that are no products with weights."""
    a, family = architecture, FAMILIES[architecture.family]
    kinds = a.kind_counts
    whole = sum(count * family.attention_flops(a, kind, rows, causal) for kind, count in kinds.items())
    if not spared:
        return whole
    return whole - sum(count * family.attention_flops(a, kind, spared, causal) for kind, count in kinds.items())


def attention_cost(architecture: Architecture) -> float:
    """Return the a for which n tokens of one row cost as much as n + a n^2, in operations; of rows no longer than a
    window."""
    one, two = (forward_flops(architecture, [length], length) for length in (1, 2))
    half_a_pair = (two - 2 * one) / 2
    return half_a_pair / (one - half_a_pair)


def kv_cache_bytes_per_token(architecture: Architecture, tensor: int, element_bytes: int) -> int:
    """Return bytes that vLLM's cache takes for one token more on each of ``tensor`` ranks; states of a row do not
    grow."""
    two, one = (kv_cache_bytes(architecture, tensor, element_bytes, tokens) for tokens in (2, 1))
    return max(int(two - one), 1)


def kv_cache_bytes(architecture: Architecture, tensor: int, element_bytes: int, tokens: float) -> float:
    """Return bytes that vLLM's cache takes for a row of ``tokens`` on each of ``tensor`` ranks; windows let go of the
    rest."""
    a, family = architecture, FAMILIES[architecture.family]
    return element_bytes * sum(
        count * family.cached_elements(a, kind, tensor) * family.cached_tokens(a, kind, tokens)
        for kind, count in a.kind_counts.items()
    )
