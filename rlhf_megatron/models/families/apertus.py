"""Apertus: a Llama with norms of queries and keys, and feed-forward layers without a gate whose activation learns."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import FamilyFields
from rlhf_megatron.models.description import Architecture, LayerKind
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS, Decoder
from rlhf_megatron.models.families.norm_names import NormNames
from rlhf_megatron.models.rectangles import Block, Implementation, Shapes, held_layers
from rlhf_megatron.topology.layout import Layout
from rlhf_megatron.untrusted import shown

if TYPE_CHECKING:
    from rlhf_megatron.models.rotary import Rotary

_NUMBERS: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}  # of the activation
_LAST_MATRIX, _IN_CHECKPOINT, _IN_MEGATRON = "mlp.down_proj.weight", "mlp.act_fn.", "mlp.activation_func."


@dataclasses.dataclass(frozen=True)
class Apertus(Decoder):
    """The usual decoder without gates, whose layers have the numbers of their activation on every rank."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        if not config.get("rope_scaling") and config.get("rope_parameters") is None:
            raise ModelError(f"{shown(path)}: rope_parameters is missing; add it (transformers would scale by llama3)")
        return super().read(path, config)

    def _separate_shapes(self, architecture: Architecture) -> Shapes:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in super()._separate_shapes(architecture).items():
            shapes[name] = shape
            if name.endswith(_LAST_MATRIX):
                layer = name.removesuffix(_LAST_MATRIX)
                shapes |= {f"{layer}{_IN_CHECKPOINT}{number}": size for number, size in _NUMBERS.items()}
        return shapes

    def _has_fused_activation(self, architecture: Architecture) -> bool:
        return False

    def layer_spec(
        self, architecture: Architecture, kind: LayerKind, implementation: Implementation, rotary: Rotary
    ) -> Any:
        """See Family."""
        from rlhf_megatron.models.xielu import XieluFeedForward

        spec = super().layer_spec(architecture, kind, implementation, rotary)
        matrices = spec.submodules.mlp.keywords["submodules"]
        spec.submodules.mlp = functools.partial(XieluFeedForward.as_mlp_submodule, submodules=matrices)
        return spec

    def megatron_blocks(
        self, architecture: Architecture, layout: Layout, position: int, implementation: Implementation
    ) -> list[Block]:
        """See Family."""
        blocks = super().megatron_blocks(architecture, layout, position, implementation)
        for prefix, index in held_layers(architecture, layout, layout.coordinates(position).pipeline):
            tensors = f"model.layers.{index}.{_IN_CHECKPOINT}"
            for number, shape in _NUMBERS.items():
                region = tuple((0, size) for size in shape)
                blocks.append(Block(tensors + number, region, f"{prefix}{_IN_MEGATRON}{number}", (0,) * len(shape)))
        return blocks


FAMILY = Apertus(
    "Apertus",
    FamilyFields(
        only=NO_ATTENTION_BIAS | {"hidden_act": "xielu", "post_norm": False, "qk_norm": True, "sliding_window": None},
    ),
    norms=NormNames(before_attention="attention_layernorm", before_feed_forward="feedforward_layernorm"),
    query_key_norm=True,
    plain_mlp=True,
    max_positions=65536,
    norm_epsilon=1e-5,
    rope_theta=12_000_000.0,
    has_rollout_table=False,
    initial_values={".act_fn.beta": 0.5, ".act_fn.eps": -1e-6},  # which are not trained
)
