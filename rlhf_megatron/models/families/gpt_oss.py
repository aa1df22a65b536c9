"""gpt-oss: attention sinks, windows in every other layer, experts with biases and a clamped activation.

Checkpoints have a layer's experts in one tensor, transposed, and as they are published in MXFP4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import FamilyFields, number, size, unsupported
from rlhf_megatron.models.description import Architecture, Experts, LayerKind
from rlhf_megatron.models.families.decoder import Decoder
from rlhf_megatron.models.families.mixture import EXPERT_TYPES, ExpertNames
from rlhf_megatron.models.families.windows import WindowFields
from rlhf_megatron.models.rectangles import Implementation
from rlhf_megatron.models.rope import YarnScaling
from rlhf_megatron.models.stacked import Stacked
from rlhf_megatron.topology.layout import Layout
from rlhf_megatron.untrusted import shown

if TYPE_CHECKING:
    from rlhf_megatron.models.rotary import Rotary

_LIMIT = 7.0  # vLLM's, whatever the config says
# What transformers takes for absent fields, where other decoders have something else.
_ABSENT = {"num_local_experts": 128, "num_experts_per_tok": 4, "attention_bias": True}
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# A layer's tensors in a checkpoint, and an expert's.
_STACKS = {"gate_up_proj": "gate_up_proj.weight", "down_proj": "down_proj.weight"}
_STACKED_BIASES = {"gate_up_proj_bias": "gate_up_proj.bias", "down_proj_bias": "down_proj.bias"}


@dataclasses.dataclass(frozen=True)
class GptOss(Decoder):
    """The usual decoder with experts of its own, and heads that may attend to nothing."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family; ``intermediate_size`` is an expert's, and the weights of the chosen sum to 1."""
        config = _ABSENT | dict(config)
        _check_quantization(path, config.get("quantization_config"))
        if config.get("rope_scaling") is None and config.get("rope_parameters") is None:
            config["rope_parameters"] = _ROPE | {"rope_theta": config.get("rope_theta", self.rope_theta)}
        plain = super().read(path, config)
        count, chosen = (size(path, field, config) for field in ("num_local_experts", "num_experts_per_tok"))
        if chosen > count:
            raise ModelError(f"{shown(path)}: num_experts_per_tok is {chosen}, of {count} experts")
        limit = number(path, "swiglu_limit", config, _LIMIT)
        experts = Experts(count, chosen, plain.feed_forward, normalized=True, biased=True, limit=limit)
        kinds = tuple(dataclasses.replace(kind, feed_forward="experts") for kind in plain.mixed_layers)
        return dataclasses.replace(plain, experts=experts, mixed_layers=kinds, output_bias=True, attention_sinks=True)

    def stacked_tensors(self, architecture: Architecture) -> Mapping[str, Stacked]:
        """See Family."""
        assert architecture.experts is not None
        stacked = {}
        for layer in range(architecture.layers):
            module = f"model.layers.{layer}.mlp.experts."
            for name, part in (_STACKS | _STACKED_BIASES).items():
                parts = tuple(f"{module}{expert}.{part}" for expert in range(architecture.experts.count))
                stacked[module + name] = Stacked(parts, transposed=name in _STACKS, packed=name in _STACKS)
        return stacked

    def layer_spec(
        self, architecture: Architecture, kind: LayerKind, implementation: Implementation, rotary: Rotary
    ) -> Any:
        """See Family."""
        from rlhf_megatron.models.router import BiasedRouter

        spec = super().layer_spec(architecture, kind, implementation, rotary)
        spec.submodules.mlp.keywords["submodules"].router = BiasedRouter
        return spec

    def _expert_layers(self) -> Any:
        """Return the usual ones, whose gates and ups come in pairs."""
        from rlhf_megatron.models.experts import ExpertPairs

        layers = super()._expert_layers()
        layers.linear_fc1 = ExpertPairs
        return layers

    def transformer_settings(
        self, architecture: Architecture, layout: Layout, *, float32: bool, fused: bool
    ) -> dict[str, Any]:
        """See Family."""
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        assert architecture.experts is not None
        usual = super().transformer_settings(architecture, layout, float32=float32, fused=fused)
        return usual | {
            "add_bias_linear": True,
            "softmax_type": "learnable",
            "activation_func": quick_gelu,
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": architecture.experts.limit,
        }

    def rollout_problem(self, architecture: Architecture) -> str | None:
        """See Family."""
        a, scaling = architecture, architecture.rope.scaling
        assert a.experts is not None
        if a.tied_embeddings:
            return "tie_word_embeddings is true, and vLLM does not tie them in gpt_oss"
        if a.experts.limit != _LIMIT:
            return f"swiglu_limit is {a.experts.limit:g}, and vLLM's is {_LIMIT:g}"
        if a.window is not None and any(
            (kind.attention == "window") != (layer % 2 == 0) for layer, kind in enumerate(a.layer_kinds)
        ):
            return "layer_types are not window and full by turns, as vLLM has them in gpt_oss"
        if not isinstance(scaling, YarnScaling) or scaling.attention_factor or scaling.mscale:
            return "rope_type is not yarn, or has an attention factor of its own, which vLLM does not read in gpt_oss"
        return super().rollout_problem(architecture)


def _check_quantization(path: Path, given: object) -> None:
    """Raise ModelError for weights of another type than MXFP4, which is read as bfloat16."""
    if given is None:
        return
    if not isinstance(given, dict) or given.get("quant_method") != "mxfp4":
        raise unsupported(path, "quantization_config", given, "that of MXFP4, or none")
    for key in given.keys() - {"quant_method", "modules_to_not_convert", "dequantize"}:
        raise unsupported(path, f"quantization_config.{key}", given[key], "none")


FAMILY = GptOss(
    "GptOss",
    FamilyFields(
        read=frozenset({"num_local_experts", "num_experts_per_tok", "swiglu_limit", "quantization_config"}),
        types=EXPERT_TYPES | {"experts_per_token": (int,), "initial_context_length": (int,)},
        only={"attention_bias": True, "qkv_bias": True, "swiglu_alpha": 1.702},
        never_null=("num_key_value_heads", "head_dim", "num_local_experts", "swiglu_limit"),
        absent={"num_key_value_heads": 8, "head_dim": 64},
    ),
    qkv_bias=True,
    experts=False,
    expert_names=ExpertNames(router="router", gate_up="gate_up_proj"),
    max_positions=131072,
    norm_epsilon=1e-5,
    rope_theta=150_000.0,
    windows=WindowFields(absent=128, layers="pattern", full_every=2, by_type=True),
    vllm_mixes_windows=True,
    has_rollout_table=False,
)
