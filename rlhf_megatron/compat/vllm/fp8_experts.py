"""Experts of vLLM in 8-bit floating point (e4m3), requantized after each weight sync.

As linear layers are (``fp8_linear``): the stacks [experts, rows, columns] stay in full precision and get quantized
copies with one scale for each row of each expert; activations get one for each token before either product. By vLLM's
Triton kernel, with scales of channels and tokens, which takes weights as they are stored; biases are added in full.

Import after ``process_environment.prepare_environment``: it imports vLLM.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym, kFp8StaticChannelSym

from rlhf_megatron.compat.vllm import cpu
from rlhf_megatron.compat.vllm.fp8_linear import add_room, product, requantize

WEIGHTS = ("w13_weight", "w2_weight")


class Fp8ExpertsMethod(UnquantizedFusedMoEMethod):  # type: ignore[misc]
    """Weights and products of a layer's experts in 8 bits; all but these is as vLLM has it without quantization."""

    def __init__(self, moe: Any) -> None:
        """Choose the kernel: vLLM's for full precision, which does both, or plain torch."""
        super().__init__(moe)
        if not torch.cuda.is_available():
            self.experts_cls = _experts_on_cpu()

    def create_weights(self, layer: Any, *arguments: Any, **named: Any) -> None:
        """Create the full-precision weights, and room for the quantized ones."""
        super().create_weights(layer, *arguments, **named)
        for name in WEIGHTS:
            add_room(layer, name)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantize the weights as they are now, in place; the first time, make the kernel that reads the copies."""
        if self.moe_kernel is None:
            super().process_weights_after_loading(layer)
        for name in WEIGHTS:
            requantize(layer, name)

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """See vLLM: the kernel's scales, biases and limits, by reference."""
        return fp8_w8a8_moe_quant_config(
            w1_scale=layer.w13_weight_scale,
            w2_scale=layer.w2_weight_scale,
            w1_bias=getattr(layer, "w13_bias", None),
            w2_bias=getattr(layer, "w2_bias", None),
            per_act_token_quant=True,
            per_out_ch_quant=True,
            gemm1_alpha=getattr(layer, "swiglu_alpha", None),
            gemm1_beta=getattr(layer, "swiglu_beta", None),
            gemm1_clamp_limit=getattr(layer, "swiglu_limit", None),
        )

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """See vLLM, whose own has the full-precision weights."""
        output: Tensor = self.moe_kernel.apply(
            hidden_states=x,
            w1=layer.quantized_w13_weight,
            w2=layer.quantized_w2_weight,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.activation,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )
        return output


def refusal(moe: Any) -> str | None:
    """Return why the experts of a layer with vLLM's config ``moe`` cannot be quantized; None if they can be."""
    if not torch.cuda.is_available():
        return None if cpu.has_unpacked_experts() else "this version of vLLM repacks experts on CPUs"
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    supported, reason = TritonExperts.is_supported_config(
        TritonExperts, moe, kFp8StaticChannelSym, kFp8DynamicTokenSym, FusedMoEActivationFormat.Standard
    )
    return None if supported else f"vLLM's {reason}"


@functools.cache
def _experts_on_cpu() -> type:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    class ExpertsOnCpu(CPUUnquantizedExperts):  # type: ignore[misc]
        """Experts whose weights are quantized rows."""

        def apply(self, *, w1: Tensor, w2: Tensor, **named: Any) -> None:
            """See vLLM."""

            def multiply(weights: Tensor, scales: Tensor, biases: Tensor | None, expert: int, x: Tensor) -> Tensor:
                return product(x, weights[expert], scales[expert], None if biases is None else biases[expert])

            first = functools.partial(multiply, w1, self.w1_scale, self.w1_bias)
            second = functools.partial(multiply, w2, self.w2_scale, self.w2_bias)
            cpu.apply_experts(first, second, **named)

    return ExpertsOnCpu
