"""Command R: attention and feed-forward layer side by side behind one LayerNorm, and pairs of neighbours that turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_megatron.models.config_fields import FamilyFields, flag, number, unsupported
from rlhf_megatron.models.description import Architecture, LayerKind, Scales
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS, Decoder
from rlhf_megatron.models.families.norm_names import NormNames
from rlhf_megatron.models.rectangles import Block, Implementation
from rlhf_megatron.topology.layout import Layout

if TYPE_CHECKING:
    from rlhf_megatron.models.rotary import Rotary

COHERE_READ = frozenset({"layer_norm_eps", "logit_scale"})
COHERE_ONLY = NO_ATTENTION_BIAS | {
    "use_parallel_block": True,
    "use_gated_activation": True,
    "use_embedding_sharing": True,
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
}
COHERE_TYPES: dict[str, tuple[type, ...]] = {"cache_implementation": (str,), "use_parallel_embedding": (bool,)}
COHERE_NEVER_NULL = ("layer_norm_eps", "logit_scale")
ONE_NORM = NormNames(before_feed_forward=None)


@dataclasses.dataclass(frozen=True)
class Cohere(Decoder):
    """The usual decoder with other layers; embeddings are tied unless the config says otherwise."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        if config.get("rms_norm_eps") is not None:
            raise unsupported(path, "rms_norm_eps", config["rms_norm_eps"], "layer_norm_eps, of LayerNorm")
        epsilon = number(path, "layer_norm_eps", config, 1e-5)
        plain = super().read(path, {"tie_word_embeddings": True} | dict(config) | {"rms_norm_eps": epsilon})
        rope = dataclasses.replace(plain.rope, interleaved=True)
        return dataclasses.replace(
            plain,
            rope=rope,
            scales=Scales(logits=number(path, "logit_scale", config, 0.0625)),
            head_norms=flag(path, "use_qk_norm", config),
        )

    def layer_spec(
        self, architecture: Architecture, kind: LayerKind, implementation: Implementation, rotary: Rotary
    ) -> Any:
        """See Family; Transformer Engine's LayerNorm would have a bias, so that the norm is Megatron's own."""
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear
        from megatron.core.transformer.identity_op import IdentityOp
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        from rlhf_megatron.models.sublayers import ParallelLayer

        spec = super().layer_spec(architecture, kind, implementation, rotary)
        spec.module = ParallelLayer
        spec.submodules.input_layernorm, spec.submodules.pre_mlp_layernorm = WrappedTorchNorm, IdentityOp
        if implementation == "transformer_engine":
            spec.submodules.self_attention.submodules.linear_qkv = TEColumnParallelLinear
            spec.submodules.mlp.keywords["submodules"].linear_fc1 = TEColumnParallelLinear
        return spec

    def transformer_settings(
        self, architecture: Architecture, layout: Layout, *, float32: bool, fused: bool
    ) -> dict[str, Any]:
        """See Family."""
        usual = super().transformer_settings(architecture, layout, float32=float32, fused=fused)
        return usual | {"normalization": "LayerNorm"}

    def megatron_blocks(
        self, architecture: Architecture, layout: Layout, position: int, implementation: Implementation
    ) -> list[Block]:
        """See Family; names are those of Megatron's own layers with Transformer Engine too."""
        return super().megatron_blocks(architecture, layout, position, "local")

    def rollout_problem(self, architecture: Architecture) -> str | None:
        """See Family."""
        if not architecture.tied_embeddings:
            return f"tie_word_embeddings is false, and vLLM ties them in {architecture.family}"
        return super().rollout_problem(architecture)


FAMILY = Cohere(
    "Cohere",
    FamilyFields(
        read=COHERE_READ | {"use_qk_norm"},
        types=COHERE_TYPES,
        only=COHERE_ONLY | {"sliding_window": None},
        never_null=COHERE_NEVER_NULL,
    ),
    max_positions=8192,
    rope_theta=500_000.0,
    norms=ONE_NORM,
    has_rollout_table=False,
)
