"""Rotary position embeddings of a model as tables: inverse frequencies and an attention factor for each layer.

A pure function of the architecture. Attention takes its own layer's table (``rotary``), so a kind of scaling is a
class in ``rope``, a formula here, and nothing elsewhere. Formulas are transformers' (modeling_rope_utils), bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.rope import (
    AlphaScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    Rope,
    YarnScaling,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class RotaryTable:
    """The rotation of one layer's heads: pair i of token n by n * ``inverse_frequencies[i]``, float32.

    There are as many frequencies as pairs that turn; the rest of a head stays. Turned numbers are multiplied with
    ``attention_factor``. ``interleaved`` as in ``Rope``.
    """

    inverse_frequencies: Tensor
    attention_factor: float = 1.0
    interleaved: bool = False


def rotary_tables(architecture: Architecture, device: torch.device | str) -> tuple[RotaryTable | None, ...]:
    """Return the table of each decoder layer, None for one without positions; layers of the same kind share one."""

    @functools.cache
    def table(rope: Rope | None, head_dim: int) -> RotaryTable | None:
        return None if rope is None else rotary_table(rope, head_dim, device)

    layers = zip(architecture.layer_ropes, architecture.layer_kinds, strict=True)
    return tuple(table(rope, architecture.of_kind(kind).head_dim) for rope, kind in layers)


def rotary_table(rope: Rope, head_dim: int, device: torch.device | str) -> RotaryTable:
    """Return the table of ``rope`` for heads of this size."""
    dimensions = rope.rotated(head_dim)
    frequencies = inverse_frequencies(rope.theta, dimensions, device)
    match rope.scaling:
        case LinearScaling(factor):
            frequencies = frequencies / factor
        case Llama3Scaling():
            frequencies = scaled_as_llama3(frequencies, rope.scaling)
        case YarnScaling():
            frequencies = scaled_as_yarn(frequencies, rope.theta, rope.scaling)
        case ProportionalScaling(fraction, factor):
            frequencies = frequencies / factor
            frequencies[int(fraction * head_dim // 2) :] = 0.0
        case AlphaScaling(alpha):
            theta = rope.theta * alpha ** (dimensions / (dimensions - 2))
            frequencies = inverse_frequencies(theta, dimensions, device)
        case LongScaling():
            frequencies = scaled_as_longrope(rope.theta, dimensions, rope.scaling, device)
    return RotaryTable(frequencies, rope.attention_factor, rope.interleaved)


def inverse_frequencies(theta: float, dimensions: int, device: torch.device | str) -> Tensor:
    """Return theta^(-2i / dimensions) for each pair i, float32 [dimensions / 2] (arXiv 2104.09864)."""
    return 1.0 / _powers(theta, dimensions, device)


def scaled_as_llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Return frequencies as Llama 3.1 has them: long waves slowed by ``factor``, short ones as they are."""
    import torch

    factor, low, high = scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor
    original = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * scaled / factor + smooth * scaled
    is_between = ~(wavelengths < original / high) * ~(wavelengths > original / low)
    return torch.where(is_between, between, scaled)


def scaled_as_yarn(frequencies: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    """Return frequencies as YaRN has them: a ramp from those as they are to those divided by ``factor``."""
    import torch

    dimensions = 2 * len(frequencies)

    def pair_with(turns: float) -> float:
        waves = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return dimensions * math.log(waves) / (2 * math.log(theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dimensions - 1)
    high += 0.001 if low == high else 0.0
    pairs = torch.arange(dimensions // 2, dtype=torch.float32, device=frequencies.device)
    kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    slowed = 1.0 / (scaling.factor * _powers(theta, dimensions, frequencies.device))
    return slowed * (1 - kept) + frequencies * kept


def scaled_as_longrope(theta: float, dimensions: int, scaling: LongScaling, device: torch.device | str) -> Tensor:
    """Return frequencies divided by the factors that were chosen; see ``Rope.for_rows``."""
    import torch

    if scaling.is_long is None:
        raise ValueError("LongRoPE has short and long factors; choose with Architecture.for_rows")
    factors = scaling.long_factor if scaling.is_long else scaling.short_factor
    divided = torch.tensor(factors, dtype=torch.float32, device=device) * _powers(theta, dimensions, device)
    return 1.0 / divided


def _powers(theta: float, dimensions: int, device: torch.device | str) -> Tensor:
    import torch

    exponents = torch.arange(0, dimensions, 2, dtype=torch.float32, device=device) / dimensions
    powers: Tensor = theta**exponents
    return powers
