"""Weights and tokens in 8 bits (e4m3), with a scale for each block of 128 x 128 weights, or each 128 numbers of a token
(DeepSeek-V3, arXiv 2412.19437, section 3.3).

A block becomes round(v / s) with s = max |v| / 448. torch reads and writes it several times for that, and needs memory
for it in float32; the Triton kernels read it once. Here: the same in plain torch, which is the reference, and what CPUs
use.
"""

from __future__ import annotations

import torch
from torch import Tensor

TYPE = torch.float8_e4m3fn
BLOCK = 128
LARGEST = torch.finfo(TYPE).max
SMALLEST_SCALE = 1 / (LARGEST * 512)  # vLLM's kernel for rows has the same


def quantize_blocks(values: Tensor, quantized: Tensor, scales: Tensor) -> None:
    """Quantize [n, m] into ``quantized`` ([n, m], ``TYPE``) and ``scales`` ([n / 128, m / 128], float32), in place.

    n and m are multiples of 128; the memory of both results is contiguous.
    """
    if values.is_cuda:
        from rlhf_megatron.kernels.triton_block_quantization import launch

        launch(values, quantized, scales)
    else:
        quantize_blocks_reference(values, quantized, scales)


def quantize_blocks_reference(values: Tensor, quantized: Tensor, scales: Tensor) -> None:
    """Quantize as ``quantize_blocks`` does, in plain torch."""
    blocks = values.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale, into = scaled(blocks, 1, 3)
    quantized.copy_(into.flatten(2).flatten(0, 1))
    scales.copy_(scale[:, 0, :, 0])


def quantize_groups(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize [n, m] by 128 numbers of a row -> (``TYPE`` [n, m], scales [n, m / 128] in float32, by columns).

    Columns of the scales begin at multiples of 16 bytes, as DeepGEMM reads them.
    """
    rows, columns = values.shape
    quantized = torch.empty(rows, columns, dtype=TYPE, device=values.device)
    padded = torch.empty(columns // BLOCK, (rows + 3) // 4 * 4, device=values.device, dtype=torch.float32)
    scales = padded[:, :rows].t()
    if values.is_cuda:
        from rlhf_megatron.kernels.triton_block_quantization import launch_groups

        launch_groups(values, quantized, scales)
    else:
        quantize_groups_reference(values, quantized, scales)
    return quantized, scales


def quantize_groups_reference(values: Tensor, quantized: Tensor, scales: Tensor) -> None:
    """Quantize as ``quantize_groups`` does, in plain torch, in place."""
    scale, into = scaled(values.unflatten(1, (-1, BLOCK)), 2)
    quantized.copy_(into.flatten(1))
    scales.copy_(scale[..., 0])


def scaled(values: Tensor, *dimensions: int) -> tuple[Tensor, Tensor]:
    """Return one scale for what differs in these ``dimensions`` alone, of which the scales have one each, and
    ``values`` over it, rounded to ``TYPE``."""
    largest = torch.full((), LARGEST, device=values.device)  # by a number, GPUs would multiply by 1 / number
    scale = (values.abs().amax(dimensions, keepdim=True).float() / largest).clamp(min=SMALLEST_SCALE)
    return scale, (values.float() / scale).clamp(-LARGEST, LARGEST).to(TYPE)
