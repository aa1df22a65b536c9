"""A rollout in 8 bits: which of vLLM's layers multiply in e4m3, and their quantized copies after each weight sync.

Linear layers (``fp8_linear``) and experts (``fp8_experts``) do. Routers, embeddings and the output layer stay as they
are, and so do experts that vLLM's kernel cannot multiply.

Import after ``process_environment.prepare_environment``: it imports vLLM.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from rlhf_megatron.compat.vllm import fp8_experts, fp8_linear
from rlhf_megatron.compat.vllm.fp8_experts import Fp8ExpertsMethod
from rlhf_megatron.compat.vllm.fp8_linear import Fp8BlockwiseLinearMethod, Fp8LinearMethod
from rlhf_megatron.recipe.rollout import Quantization

_COPIES = {own for name in ("weight", *fp8_experts.WEIGHTS) for own in fp8_linear.copy_names(name)}


class Fp8Config(QuantizationConfig):  # type: ignore[misc]
    """Choice of the layers that are quantized; nothing about it is in a checkpoint."""

    kind: Quantization = "fp8"
    of_linear_layers: type[Fp8LinearMethod] = Fp8LinearMethod

    def get_name(self) -> str:
        """See vLLM."""
        return method_name(self.kind)

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

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return the method of a layer; None leaves vLLM its own."""
        if isinstance(layer, RoutedExperts):
            return None if fp8_experts.refusal(layer.moe_config) else Fp8ExpertsMethod(layer.moe_config)
        if not isinstance(layer, LinearBase):
            return None
        return UnquantizedLinearMethod() if isinstance(layer, ReplicatedLinear) else self.of_linear_layers()


class Fp8BlockwiseConfig(Fp8Config):
    """The same with linear layers by blocks; experts as ever."""

    kind = "fp8_blockwise"
    of_linear_layers = Fp8BlockwiseLinearMethod

    @classmethod
    def get_min_capability(cls) -> int:
        """See vLLM: Hopper and later have a kernel for blocks."""
        return 90


def method_name(kind: Quantization) -> str:
    """Return the name that vLLM knows a recipe's ``rollout.quantization`` by."""
    return f"rlhf_megatron_{kind}"


@functools.cache
def install() -> None:
    """Make the methods known to vLLM in this process."""
    for config in (Fp8Config, Fp8BlockwiseConfig):
        register_quantization_config(method_name(config.kind))(config)


def is_full_precision(name: str) -> bool:
    """Return whether a parameter of this name is one of the model's, and not made from another."""
    return name.rpartition(".")[2] not in _COPIES


def quantize(model: torch.nn.Module) -> None:
    """Quantize all weights as they are now."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, Fp8LinearMethod | Fp8ExpertsMethod):
            method.process_weights_after_loading(layer)


def left_in_full(model: torch.nn.Module) -> list[str]:
    """Return of each layer's experts that are not quantized why that is."""
    layers = [layer for layer in model.modules() if isinstance(layer, RoutedExperts)]
    return [
        fp8_experts.refusal(layer.moe_config) or "vLLM's model does not have them quantized"
        for layer in layers
        if not isinstance(layer.quant_method, Fp8ExpertsMethod)
    ]
