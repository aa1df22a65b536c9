"""Draws of tokens by noise that depends on a request's seed and a position alone, for all positions of a step at once.

On a GPU they are those of vLLM's newer model runner, by its kernel. On CPUs, where there is no Triton, the noise is
SplitMix64 (Steele, Lea and Flood 2014) of seed, position and token.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as int64, whose products wrap around
_MIX = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def draw(logits: Tensor, temperature: Tensor, seeds: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """Return [positions] int64: a token of each distribution softmax(logits), the likeliest where the temperature is 0.

    Args:
        logits: [positions, vocabulary] float32, over the temperature, -inf where a token is not to be drawn.
        temperature: [rows], of each row of the batch.
        seeds: [rows] int64.
        rows: [positions] int64, the row of each position.
        positions: [positions] int64, of the last token before the drawn one.
    """
    if logits.is_cuda:
        return draw_as_newer_runner(logits, temperature, seeds, rows, positions)
    noise = _exponential(seeds[rows], positions, logits.shape[-1])
    scores = torch.where(temperature[rows, None] == 0, logits.double(), logits.double() - noise.log())
    return scores.argmax(-1)


def draw_as_newer_runner(logits: Tensor, temperature: Tensor, seeds: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """Return what ``draw`` does, by the kernel of vLLM's newer model runner."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    # Later versions ask whether a draft is drawn, which has other noise.
    more = {"is_drafting": False} if "is_drafting" in inspect.signature(gumbel_sample).parameters else {}
    tokens: Tensor = gumbel_sample(logits, rows, temperature, seeds, positions, apply_temperature=False, **more)
    return tokens


def _exponential(seeds: Tensor, positions: Tensor, count: int) -> Tensor:
    """Return [n, count] float64, each exponentially distributed, of ``seeds`` [n] and ``positions`` [n]."""
    start = _mixed(_mixed(seeds) + positions * _GOLDEN)
    bits = _mixed(start[:, None] + torch.arange(1, count + 1) * _GOLDEN)
    uniform = (_shifted(bits, 11).double() + 0.5) * 2.0**-53  # never 0 or 1
    return -uniform.log()


def _mixed(values: Tensor) -> Tensor:
    values = (values ^ _shifted(values, 30)) * _MIX[0]
    values = (values ^ _shifted(values, 27)) * _MIX[1]
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Return values as unsigned ones, shifted to the right."""
    return (values >> bits) & (2 ** (64 - bits) - 1)
