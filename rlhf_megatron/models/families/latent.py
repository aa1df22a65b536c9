"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): config.json, tensors, Megatron's parameters, cost."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import size
from rlhf_megatron.models.description import Architecture, Latent
from rlhf_megatron.models.rectangles import Cut, Implementation, Slot
from rlhf_megatron.models.rope import YarnScaling
from rlhf_megatron.untrusted import shown

if TYPE_CHECKING:
    from rlhf_megatron.models.rotary import Rotary

FIELDS = frozenset({"kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"})
NEVER_NULL = ("head_dim", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "rope_interleave")

# A part of attention in checkpoints, its cut over the tensor ranks, and its name in Megatron.
_PARTS: dict[str, tuple[Cut, str]] = {
    "q_proj": ("rows", "linear_q_proj"),
    "q_a_proj": ("whole", "linear_q_down_proj"),
    "q_a_layernorm": ("whole", "q_layernorm"),
    "q_b_proj": ("rows", "linear_q_up_proj"),
    "kv_a_proj_with_mqa": ("whole", "linear_kv_down_proj"),
    "kv_a_layernorm": ("whole", "kv_layernorm"),
    "kv_b_proj": ("rows", "linear_kv_up_proj"),
    "o_proj": ("columns", "linear_proj"),
}


def read_latent(path: Path, config: Mapping[str, Any]) -> Latent:
    """Return the sizes of latent attention; a null ``q_lora_rank`` leaves queries uncompressed.

    Raises ModelError where a field that follows from others disagrees.
    """
    latent = Latent(
        query_rank=None if config.get("q_lora_rank") is None else size(path, "q_lora_rank", config),
        key_value_rank=size(path, "kv_lora_rank", config),
        unturned=size(path, "qk_nope_head_dim", config),
        turned=size(path, "qk_rope_head_dim", config),
        value=size(path, "v_head_dim", config),
    )
    wanted = {
        "qk_head_dim": latent.query_head,
        "head_dim": latent.turned,
        "num_key_value_heads": config.get("num_attention_heads"),
    }
    for field, value in wanted.items():
        if config.get(field) is not None and config[field] != value:
            raise ModelError(f"{shown(path)}: {field} is {config[field]!r}; with latent attention it must be {value!r}")
    return latent


def attention_shapes(a: Architecture, layer: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (tensor, shape) of attention in the layer whose tensors' names begin with ``layer``."""
    assert a.latent is not None
    latent, heads, hidden = a.latent, a.heads, a.hidden
    shapes: dict[str, tuple[int, ...]] = {"q_proj": (heads * latent.query_head, hidden)}
    if latent.query_rank is not None:
        shapes = {
            "q_a_proj": (latent.query_rank, hidden),
            "q_a_layernorm": (latent.query_rank,),
            "q_b_proj": (heads * latent.query_head, latent.query_rank),
        }
    shapes |= {
        "kv_a_proj_with_mqa": (latent.key_value_rank + latent.turned, hidden),
        "kv_a_layernorm": (latent.key_value_rank,),
        "kv_b_proj": (heads * (latent.unturned + latent.value), latent.key_value_rank),
        "o_proj": (hidden, heads * latent.value),
    }
    for part, shape in shapes.items():
        yield f"{layer}self_attn.{part}.weight", shape


def attention_slots(a: Architecture, layer: str, module: str) -> Iterator[Slot]:
    """Yield the slots of a layer's attention in Megatron's parameters, whose names begin with ``module``."""
    for tensor, _ in attention_shapes(a, layer):
        cut, name = _PARTS[tensor.split(".")[-2]]
        yield Slot(tensor, cut, f"{module}{name}.weight")


def attention_spec(spec: Any, implementation: Implementation, rotary: Rotary) -> None:
    """Have a layer's ``spec``, Megatron's for latent attention, attend as vLLM does."""
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from rlhf_megatron.models.latent_attention import LatentAttention

    parts = spec.submodules.self_attention.submodules
    if isinstance(parts.core_attention, functools.partial):  # which Megatron builds elsewhere alone
        parts.core_attention = ModuleSpec(module=parts.core_attention.func, params=parts.core_attention.keywords)
    spec.submodules.self_attention = ModuleSpec(
        module=LatentAttention,
        params={
            "attn_mask_type": AttnMaskType.causal,
            "rotary": rotary,
            "norm": TENorm if implementation == "transformer_engine" else WrappedTorchNorm,
        },
        submodules=parts,
    )


def latent_settings(a: Architecture) -> dict[str, Any]:
    """Return Megatron's settings of latent attention; positions are the matter of ``rotary``.

    With YaRN the product of queries and keys has another factor, which Megatron derives from these.
    """
    if a.latent is None:
        return {}
    yarn = a.rope.scaling if isinstance(a.rope.scaling, YarnScaling) else None
    return {
        "multi_latent_attention": True,
        "q_lora_rank": a.latent.query_rank,
        "kv_lora_rank": a.latent.key_value_rank,
        "qk_head_dim": a.latent.unturned,
        "qk_pos_emb_head_dim": a.latent.turned,
        "v_head_dim": a.latent.value,
        "rope_type": "rope",
        "rotary_scaling_factor": yarn.factor if yarn else 1.0,
        "mscale_all_dim": (yarn.mscale_all_dim or 0.0) if yarn else 0.0,
    }


def attention_weights(a: Architecture) -> int:
    """Return how many weights of attention one token is multiplied with in a layer."""
    return sum(shape[0] * shape[1] for _, shape in attention_shapes(a, "") if len(shape) == 2)
