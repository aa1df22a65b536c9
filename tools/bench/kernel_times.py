"""Milliseconds of a GPU's kernels by kind, from torch's profiler."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

# The first kind whose expression a kernel's name has; FlashAttention is made of CUTLASS's parts, as products are.
_KINDS = (
    ("attention", r"flash|fmha|attention|attn|reshape_and_cache"),
    ("products", r"gemm|cutlass|nvjet|xmma|cublas|splitk"),
    ("optimizer", r"adam|multi_tensor"),
    ("to fp8", r"quant|fp8|cast_transpose|amax"),
    ("sampling", r"gumbel|sampl|logprob|logits|softmax|argmax|topk|penalt|temperature"),
    ("copies", r"memcpy|memset"),
    ("norms, activations and sums", r"."),
)
_LONGEST_KEPT = 25


def kind_of(name: str) -> str:
    """Return the kind of a kernel with this name."""
    return next(kind for kind, expression in _KINDS if re.search(expression, name, re.IGNORECASE))


def kernel_times(action: Callable[[], Any], pieces: int) -> dict[str, Any]:
    """Return milliseconds of kernels while ``action`` runs, over ``pieces`` (steps, micro-batches): by kind, and of
    those that take longest; nothing without a GPU."""
    if not torch.cuda.is_available():
        action()
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        action()
        torch.cuda.synchronize()
    events = profiler.key_averages()
    return summed({event.key: event.self_device_time_total / 1000 for event in events}, pieces)


def summed(milliseconds: Mapping[str, float], pieces: int) -> dict[str, Any]:
    """Return milliseconds of kernels, by name, as ``kernel_times`` does."""
    kinds: dict[str, float] = {}
    for name, taken in milliseconds.items():
        kinds[kind_of(name)] = kinds.get(kind_of(name), 0.0) + taken / pieces
    longest = sorted(milliseconds, key=lambda name: -milliseconds[name])[:_LONGEST_KEPT]
    return {
        "milliseconds": sum(milliseconds.values()) / pieces,
        "kinds": dict(sorted(kinds.items(), key=lambda item: -item[1])),
        "longest": {name[:160]: milliseconds[name] / pieces for name in longest},
    }
