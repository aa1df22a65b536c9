"""Rotary position embeddings of a model as a table: inverse frequencies and an attention factor for each layer.

A pure function of the architecture. Attention takes its own layer's row (``rotary``), so a kind of scaling is a formula
here and nothing elsewhere. The kinds ``default`` and ``llama3`` are known; ``families.config_reading`` refuses others.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from rlhf_megatron.models.description import Architecture

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# The settings of Llama 3.1's scaling that are supported; its factor alone differs between models.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclasses.dataclass(frozen=True, eq=False)
class RotaryTable:
    """The rotation of one layer's heads: pair i of token n by n * ``inverse_frequencies[i]``, float32 [head_dim / 2].

    Turned queries and keys are multiplied with ``attention_factor``.
    """

    inverse_frequencies: Tensor
    attention_factor: float = 1.0


def rotary_tables(architecture: Architecture, device: torch.device | str) -> tuple[RotaryTable, ...]:
    """Return the table of each decoder layer; layers with the same numbers share one."""
    a = architecture
    frequencies = inverse_frequencies(a.rope_theta, a.head_dim, device)
    if a.rope_scaling_factor is not None:
        frequencies = scaled_as_llama3(frequencies, a.rope_scaling_factor)
    return (RotaryTable(frequencies),) * a.layers


def inverse_frequencies(theta: float, dimensions: int, device: torch.device | str) -> Tensor:
    """Return theta^(-2i / dimensions) for each pair i, float32 [dimensions / 2] (arXiv 2104.09864)."""
    import torch

    exponents = torch.arange(0, dimensions, 2, dtype=torch.float32, device=device) / dimensions
    frequencies: Tensor = 1.0 / (theta**exponents)
    return frequencies


def scaled_as_llama3(frequencies: Tensor, factor: float) -> Tensor:
    """Return frequencies as Llama 3.1 has them: long waves slowed by ``factor``, short ones as they are."""
    import torch

    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    original = LLAMA3["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * scaled / factor + smooth * scaled
    is_between = ~(wavelengths < original / high) * ~(wavelengths > original / low)
    return torch.where(is_between, between, scaled)
