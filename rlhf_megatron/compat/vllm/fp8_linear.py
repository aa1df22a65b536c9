"""Linear layers of vLLM in 8-bit floating point (e4m3), requantized after each weight sync.

A layer keeps its full-precision ``weight``, which a weight sync fills or which is the actor's own memory, and gets a
quantized copy with one scale for each row. Activations get one scale for each token as they come. So y = x W^T becomes
(s_x q_x) (q_W s_W)^T, where q = round(v / s) in e4m3 and s = max |v| / 448, as in arXiv 2209.05433, section 3, by rows.
Routers, experts, embeddings and the output layer stay as they are.

Import after ``process_environment.prepare_environment``: it imports vLLM.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

METHOD = "rlhf_megatron_fp8"
TYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(TYPE).max
_SMALLEST_SCALE = 1 / (LARGEST * 512)  # vLLM's kernel has the same
_QUANTIZED, _SCALE = "quantized_weight", "weight_scale"


def quantized_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize [n, m] -> (e4m3 [n, m], scales [n, 1] float32), of which the product is nearly ``values``."""
    if values.is_cuda:
        from vllm import _custom_ops

        quantized, scale = _custom_ops.scaled_fp8_quant(values, use_per_token_if_dynamic=True)
        return quantized, scale
    scale = (values.abs().amax(1, keepdim=True).float() / LARGEST).clamp(min=_SMALLEST_SCALE)
    return (values.float() / scale).clamp(-LARGEST, LARGEST).to(TYPE), scale


def add_room(layer: Any) -> None:
    """Give a layer with a ``weight`` the parameters of its quantized copy, which hold nothing yet."""
    quantized = torch.empty_like(layer.weight, dtype=TYPE)
    scale = torch.empty(len(quantized), 1, dtype=torch.float32, device=quantized.device)
    for name, tensor in ((_QUANTIZED, quantized), (_SCALE, scale)):
        layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))


class Fp8LinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    """Weights and product of a linear layer in 8 bits."""

    def create_weights(self, layer: Any, *arguments: Any, **named: Any) -> None:
        """Create the full-precision weight, and room for the quantized one."""
        super().create_weights(layer, *arguments, **named)
        add_room(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantize the weight as it is now, in place."""
        quantized, scale = quantized_rows(layer.weight.data)
        layer.quantized_weight.data.copy_(quantized)
        layer.weight_scale.data.copy_(scale)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply [..., columns] -> [..., rows], in the type of ``x``."""
        tokens = x.reshape(-1, x.shape[-1])
        quantized, scale = quantized_rows(tokens)
        if x.is_cuda:
            from vllm import _custom_ops

            weight = layer.quantized_weight.t()
            output = _custom_ops.cutlass_scaled_mm(quantized, weight, scale, layer.weight_scale, x.dtype, bias)
        else:
            product = (quantized.float() * scale) @ (layer.quantized_weight.float() * layer.weight_scale).t()
            output = product.to(x.dtype) if bias is None else (product + bias).to(x.dtype)
        return output.view(*x.shape[:-1], -1)


class Fp8Config(QuantizationConfig):  # type: ignore[misc]
    """Choice of the layers that are quantized; nothing about it is in a checkpoint."""

    def get_name(self) -> str:
        """See vLLM."""
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """See vLLM."""
        return [torch.bfloat16, torch.float16, *([] if torch.cuda.is_available() else [torch.float32])]

    @classmethod
    def get_min_capability(cls) -> int:
        """See vLLM: Ada and later multiply in e4m3."""
        return 89

    @staticmethod
    def get_config_filenames() -> list[str]:
        """See vLLM."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Fp8Config:
        """See vLLM."""
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> UnquantizedLinearMethod | None:
        """Return the method of a layer; None leaves vLLM its own."""
        if not isinstance(layer, LinearBase):
            return None
        return UnquantizedLinearMethod() if isinstance(layer, ReplicatedLinear) else Fp8LinearMethod()


@functools.cache
def install() -> None:
    """Make the method known to vLLM in this process."""
    register_quantization_config(METHOD)(Fp8Config)


def is_full_precision(name: str) -> bool:
    """Return whether a parameter of this name is one of the model's, and not made from another."""
    return name.rpartition(".")[2] not in (_QUANTIZED, _SCALE)


def quantize(model: torch.nn.Module) -> None:
    """Quantize all weights as they are now."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, Fp8LinearMethod):
            method.process_weights_after_loading(layer)
