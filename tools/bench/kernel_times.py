"""Milliseconds of a GPU's kernels by kind, from torch's profiler."""

from __future__ import annotations

import re
from collections import defaultdict
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
_LONGEST_KEPT, _LONGEST_NAME = 25, 160


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
    kinds: dict[str, float] = defaultdict(float)
    kernels: dict[str, float] = defaultdict(float)  # some differ in what is cut off alone
    for name, taken in milliseconds.items():
        kinds[kind_of(name)] += taken / pieces
        kernels[name[:_LONGEST_NAME]] += taken / pieces
    return {
        "milliseconds": sum(milliseconds.values()) / pieces,
        "kinds": dict(_by_size(kinds)),
        "longest": dict(_by_size(kernels)[:_LONGEST_KEPT]),
    }


def _by_size(values: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return names and values, the largest first."""
    return sorted(values.items(), key=lambda item: -item[1])
