"""Linear layers of vLLM in 8-bit floating point (e4m3), requantized after each weight sync.

A layer keeps its full-precision ``weight``, which a weight sync fills or which is the actor's own memory, and gets a
quantized copy with one scale for each row. Activations get one scale for each token as they come. So y = x W^T becomes
(s_x q_x) (q_W s_W)^T, where q = round(v / s) in e4m3 and s = max |v| / 448, as in arXiv 2209.05433, section 3, by rows.

Import after ``process_environment.prepare_environment``: it imports vLLM.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

TYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(TYPE).max
_SMALLEST_SCALE = 1 / (LARGEST * 512)  # vLLM's kernel has the same


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
    scale = (values.abs().amax(1, keepdim=True).float() / LARGEST).clamp(min=_SMALLEST_SCALE)
    quantized = (values.float() / scale).clamp(-LARGEST, LARGEST).to(TYPE)
    return quantized if into is None else into.copy_(quantized), scale


def copy_names(name: str) -> tuple[str, str]:
    """Return the names of the quantized copy of a layer's parameter, and of its scales."""
    return f"quantized_{name}", f"{name}_scale"


def add_room(layer: Any, name: str = "weight") -> None:
    """Give a layer the parameters of the quantized copy of one of [..., rows, columns], which hold nothing yet."""
    quantized = torch.empty_like(getattr(layer, name), dtype=TYPE)
    scale = torch.empty(*quantized.shape[:-1], 1, dtype=torch.float32, device=quantized.device)
    for own, tensor in zip(copy_names(name), (quantized, scale), strict=True):
        layer.register_parameter(own, torch.nn.Parameter(tensor, requires_grad=False))


def requantize(layer: Any, name: str = "weight") -> None:
    """Quantize a parameter as it is now, into the memory of its copy."""
    quantized, scale = (getattr(layer, own).data for own in copy_names(name))
    columns = quantized.shape[-1]
    scale.view(-1, 1).copy_(quantized_rows(getattr(layer, name).data.view(-1, columns), quantized.view(-1, columns))[1])


def product(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply [n, columns] in full precision by quantized rows -> [n, rows] in the type of ``x``, in plain torch."""
    quantized, scale_of_tokens = quantized_rows(x)
    output = (quantized.float() * scale_of_tokens) @ (weight.float() * scale).t()
    return output.to(x.dtype) if bias is None else (output + bias).to(x.dtype)


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
        tokens = x.reshape(-1, x.shape[-1])
        if x.is_cuda:
            from vllm import _custom_ops

            quantized, scale = quantized_rows(tokens)
            weight = layer.quantized_weight.t()
            output = _custom_ops.cutlass_scaled_mm(quantized, weight, scale, layer.weight_scale, x.dtype, bias)
        else:
            output = product(tokens, layer.quantized_weight, layer.weight_scale, bias)
        return output.view(*x.shape[:-1], -1)
