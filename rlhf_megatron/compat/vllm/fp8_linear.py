"""Linear layers of vLLM in 8-bit floating point (e4m3), requantized after each weight sync.

A layer keeps its full-precision ``weight``, which a weight sync fills or which is the actor's own memory, and gets a
quantized copy with one scale for each row. Activations get one scale for each token as they come. So y = x W^T becomes
(s_x q_x) (q_W s_W)^T, where q = round(v / s) in e4m3 and s = max |v| / 448, as in arXiv 2209.05433, section 3, by rows;
or as training in 8 bits does it (arXiv 2412.19437, section 3.3): by blocks of 128 x 128 weights and 128 activations.

Import after ``process_environment.prepare_environment``: it imports vLLM.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from rlhf_megatron.compat.deep_gemm import multiply
from rlhf_megatron.errors import RolloutError
from rlhf_megatron.kernels.block_quantization import BLOCK, TYPE, quantize_blocks, quantize_groups, scaled


def quantized_rows(values: Tensor, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize [n, m] -> (e4m3 [n, m], scales [n, 1] float32), of which the product is nearly ``values``.

    ``into``: contiguous memory for the former.
    """
    if values.is_cuda:
        from vllm import _custom_ops

        quantized, scale = _custom_ops.scaled_fp8_quant(values, use_per_token_if_dynamic=True, output=into)
        return quantized, scale
    return quantized_by_torch(values, into)


def quantized_by_torch(values: Tensor, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize as ``quantized_rows`` does, in plain torch."""
    scale, quantized = scaled(values, 1)
    return quantized if into is None else into.copy_(quantized), scale


def copy_names(name: str) -> tuple[str, str]:
    """Return the names of the quantized copy of a layer's parameter, and of its scales."""
    return f"quantized_{name}", f"{name}_scale"


def add_room(layer: Any, name: str = "weight", block: tuple[int, int] | None = None) -> None:
    """Give a layer the parameters of the quantized copy of one of [..., rows, columns], which hold nothing yet; with a
    scale for each row, or each ``block`` of so many rows and columns."""
    quantized = torch.empty_like(getattr(layer, name), dtype=TYPE)
    *stacked, rows, columns = quantized.shape
    rows_of_scale, columns_of_scale = block or (1, columns)
    scales = *stacked, rows // rows_of_scale, columns // columns_of_scale
    scale = torch.empty(scales, dtype=torch.float32, device=quantized.device)
    for own, tensor in zip(copy_names(name), (quantized, scale), strict=True):
        layer.register_parameter(own, torch.nn.Parameter(tensor, requires_grad=False))


def requantize(layer: Any, name: str = "weight") -> None:
    """Quantize a parameter as it is now, into the memory of its copy."""
    quantized, scale = (getattr(layer, own).data for own in copy_names(name))
    columns = quantized.shape[-1]
    scale.view(-1, 1).copy_(quantized_rows(getattr(layer, name).data.view(-1, columns), quantized.view(-1, columns))[1])


def product(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply [n, columns] in full precision by quantized rows -> [n, rows] in the type of ``x``, in plain torch."""
    values, of_tokens = quantized_rows(x)
    output = (values.float() * of_tokens) @ (weight.float() * scale).t()
    return (output if bias is None else output + bias).to(x.dtype)


# One operation for vLLM's compiler, which cannot look into DeepGEMM, and would make two passes of the quantization.
@torch.library.custom_op("rlhf_megatron::fp8_product_of_blocks", mutates_args=())
def product_of_blocks(tokens: Tensor, weight: Tensor, of_weights: Tensor) -> Tensor:
    """Multiply [n, columns] by weights of [rows, columns] in 8 bits -> [n, rows], in the type of ``tokens``.

    Tokens are quantized by 128 numbers; ``of_weights`` has scales by blocks, [rows / 128, columns / 128]. By DeepGEMM,
    the fastest with any number of tokens (tools/bench/fp8_products.py); by vLLM's own kernel where that is missing, or
    cannot compile its kernels; in plain torch on a CPU.
    """
    values, of_tokens = quantize_groups(tokens)
    if not tokens.is_cuda:
        in_full = weight.float() * of_weights.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return ((values.float() * of_tokens.repeat_interleave(BLOCK, 1)) @ in_full.t()).to(tokens.dtype)
    output = tokens.new_empty(len(tokens), len(weight))
    otherwise = "rollout.quantization=fp8_blockwise multiplies by vLLM's own kernel, slower with few tokens"
    if tokens.dtype == torch.bfloat16 and multiply((values, of_tokens), (weight, of_weights), output, otherwise):
        return output
    from vllm import _custom_ops

    unpadded = of_tokens.t().contiguous().t()
    return _custom_ops.cutlass_scaled_mm(values, weight.t(), unpadded, of_weights.t(), tokens.dtype)  # type: ignore[no-any-return]


@product_of_blocks.register_fake
def _shape_of_product(tokens: Tensor, weight: Tensor, of_weights: Tensor) -> Tensor:
    return tokens.new_empty(tokens.shape[0], weight.shape[0])  # len() would fix the number of tokens


class Fp8LinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    """Weights and product of a linear layer in 8 bits."""

    def create_weights(self, layer: Any, *arguments: Any, **named: Any) -> None:
        """Create the full-precision weight, and room for the quantized one."""
        super().create_weights(layer, *arguments, **named)
        add_room(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantize the weight as it is now, in place."""
        requantize(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply [..., columns] -> [..., rows], in the type of ``x``."""
        output = self.multiply(layer, x.reshape(-1, x.shape[-1]), bias)
        return output.view(*x.shape[:-1], -1)

    def multiply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply [n, columns] -> [n, rows], in the type of ``x``."""
        if not x.is_cuda:
            return product(x, layer.quantized_weight, layer.weight_scale, bias)
        from vllm import _custom_ops

        quantized, scale = quantized_rows(x)
        weight = layer.quantized_weight.t()
        output: Tensor = _custom_ops.cutlass_scaled_mm(quantized, weight, scale, layer.weight_scale, x.dtype, bias)
        return output


class Fp8BlockwiseLinearMethod(Fp8LinearMethod):
    """The same, with a scale for each block, as where the trainer multiplies in 8 bits."""

    def create_weights(self, layer: Any, *arguments: Any, **named: Any) -> None:
        """Create the full-precision weight, and room for the quantized one.

        Raises:
            RolloutError: a rank's part of the weight is not made of whole blocks.
        """
        UnquantizedLinearMethod.create_weights(self, layer, *arguments, **named)
        rows, columns = layer.weight.shape
        if rows % BLOCK or columns % BLOCK:
            raise RolloutError(
                f"rollout.quantization=fp8_blockwise: a rank has {rows} x {columns} weights of a linear layer, which "
                f"are not whole blocks of {BLOCK} x {BLOCK}; use fp8, or a smaller rollout.layout.tensor"
            )
        add_room(layer, block=(BLOCK, BLOCK))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantize the weight as it is now, in place."""
        quantize_blocks(layer.weight.data, *(getattr(layer, own).data for own in copy_names("weight")))

    def multiply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """See Fp8LinearMethod."""
        output = product_of_blocks(x, layer.quantized_weight, layer.weight_scale)
        return output if bias is None else output + bias
