"""Gemma 4's language model: a Gemma 3 whose layers without a window have heads of their own.

A value is normed, and in layers without a window it is its key before norm and positions. Experts are beside a dense
feed-forward layer. The models with embeddings per layer or with keys and values of other layers are not read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import FamilyFields, brief, flag, size, unsupported
from rlhf_megatron.models.description import Architecture, Experts, FullHeads, LayerKind, Routing, SharedExpert
from rlhf_megatron.models.families.config_reading import optional_number
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS, Decoder
from rlhf_megatron.models.families.gemma import GELU, GEMMA_TYPES, Gemma
from rlhf_megatron.models.families.mixture import ExpertNames
from rlhf_megatron.models.families.norm_names import NORMS_AROUND
from rlhf_megatron.models.families.ropes_by_type import FULL, WINDOW, RopesByType
from rlhf_megatron.models.families.windows import WindowFields, declared_windows, mixed_layers
from rlhf_megatron.models.rectangles import Implementation
from rlhf_megatron.models.rope import ProportionalScaling
from rlhf_megatron.models.stacked import Stacked, joint_experts
from rlhf_megatron.untrusted import shown

if TYPE_CHECKING:
    from rlhf_megatron.models.rotary import Rotary

_ROPES: dict[str, Any] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    WINDOW: {"rope_type": "default", "rope_theta": 10_000.0},
}
_PER_LAYER = "per_layer_config"
_OF_FULL = ("head_dim", "num_key_value_heads")
_OF_EXPERTS = ("num_experts", "top_k_experts", "moe_intermediate_size")


@dataclasses.dataclass(frozen=True)
class Gemma4(RopesByType, Gemma):
    """A Gemma with heads by the type of a layer, and in some models experts beside every dense layer."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        per_layer = "hidden_size_per_layer_input"
        if config.get(per_layer, 256) != 0:
            raise unsupported(path, per_layer, config.get(per_layer, 256), "0, no embeddings per layer")
        for field in ("rope_theta", "rope_scaling"):  # not read by transformers, and by vLLM not always
            if config.get(field) is not None:
                raise unsupported(path, field, config[field], "none; rope_parameters says it by the type of a layer")
        if config.get("use_bidirectional_attention") not in (None, "vision"):
            raise unsupported(
                path, "use_bidirectional_attention", config["use_bidirectional_attention"], "null, vision"
            )
        plain = super().read(path, config)
        _, within = declared_windows(path, config, self.windows, plain.layers)
        if within[-1]:
            raise unsupported(path, "layer_types", WINDOW, f"{FULL} in the last layer")
        if any(within) and plain.window is None:
            window = config.get("sliding_window", self.windows and self.windows.absent)
            raise unsupported(path, "sliding_window", window, "less than max_position_embeddings")
        experts = _experts(path, config, plain.feed_forward)
        has_window = tuple(kind.attention == "window" for kind in plain.layer_kinds)
        return dataclasses.replace(
            plain,
            experts=experts,
            mixed_layers=mixed_layers(has_window, "experts" if experts else "dense"),
            scales=dataclasses.replace(
                plain.scales, attention=1.0, logit_cap=optional_number(path, "final_logit_softcapping", config, None)
            ),
            full_heads=_full_heads(path, config, plain, within),
            value_norm=True,
            layer_scalars=True,
        )

    def stacked_tensors(self, architecture: Architecture) -> Mapping[str, Stacked]:
        """See Family: all experts of a layer."""
        return joint_experts(self.tensor_shapes(architecture))

    def layer_spec(
        self, architecture: Architecture, kind: LayerKind, implementation: Implementation, rotary: Rotary
    ) -> Any:
        """See Family."""
        spec = super().layer_spec(architecture, kind, implementation, rotary)
        if architecture.experts is None:
            return spec
        from megatron.core.extensions.transformer_engine import TENorm
        from megatron.core.transformer.identity_op import IdentityOp
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        from rlhf_megatron.models.dense_and_experts import DenseAndExperts, NormedRouter

        parts = spec.submodules.mlp.keywords["submodules"]
        parts.router = functools.partial(NormedRouter, experts=architecture.experts)
        norm = TENorm if implementation == "transformer_engine" else WrappedTorchNorm
        spec.submodules.mlp = functools.partial(DenseAndExperts, submodules=parts, norm=norm)
        spec.submodules.pre_mlp_layernorm = IdentityOp
        return spec

    def rollout_problem(self, architecture: Architecture) -> str | None:
        """See Family; vLLM reads whether embeddings are tied."""
        return Decoder.rollout_problem(self, architecture)

    def _rope_parameters(self, path: Path, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        given = _ROPES if config.get("rope_parameters") is None else config["rope_parameters"]
        of_types = [given.get(kind) if isinstance(given, dict) else None for kind in self.thetas]
        if any(not isinstance(one, dict) or not {"rope_type", "rope_theta"} <= one.keys() for one in of_types):
            form = f"an object of {FULL} and {WINDOW}, each with rope_type and rope_theta"
            raise unsupported(path, "rope_parameters", brief(given), form)
        return super()._rope_parameters(path, {**config, "rope_parameters": given})


def _full_heads(path: Path, config: Mapping[str, Any], plain: Architecture, within: tuple[bool, ...]) -> FullHeads:
    """Return the heads of layers without a window, in the spelling of the first folders or transformers' later one."""
    keys_are_values = flag(path, "attention_k_eq_v", config)
    own: dict[str, Any] = {"head_dim": config.get("global_head_dim", 512)}
    if keys_are_values and config.get("num_global_key_value_heads") is not None:
        own["num_key_value_heads"] = config["num_global_key_value_heads"]
    if _PER_LAYER in config:
        given = config[_PER_LAYER]
        layers = [layer for layer, one in enumerate(within) if not one]
        are_numbers = isinstance(given, dict) and all(key.isdecimal() and len(key) < 9 for key in given)
        named = given if are_numbers else {}
        own = next(iter(named.values()), {})
        # transformers writes the numbers of layers with zeros in front.
        is_of_full = sorted(map(int, named)) == layers and all(each == own for each in named.values())
        if not is_of_full or not isinstance(own, dict) or own.keys() - set(_OF_FULL):
            raise unsupported(
                path, _PER_LAYER, brief(given), f"{' and '.join(_OF_FULL)} of all layers without a window"
            )
    full = FullHeads(
        size(path, "num_key_value_heads", own, plain.key_value_heads),
        size(path, "head_dim", own, plain.head_dim),
        keys_are_values,
    )
    if plain.heads % full.key_value_heads:
        raise unsupported(path, "num_global_key_value_heads", full.key_value_heads, f"a divisor of {plain.heads}")
    if full.head_dim % 2:
        raise unsupported(path, "global_head_dim", full.head_dim, "an even number")
    return full


def _experts(path: Path, config: Mapping[str, Any], feed_forward: int) -> Experts | None:
    """Return the mixture beside each dense layer of so many columns, None in a model without."""
    if not flag(path, "enable_moe_block", config):
        for field in _OF_EXPERTS:  # transformers does not read them, and vLLM goes by num_experts
            if config.get(field) is not None:
                raise unsupported(path, field, config[field], "null without enable_moe_block")
        return None
    count, chosen, width = (size(path, field, config) for field in _OF_EXPERTS)
    if chosen > count:
        raise ModelError(f"{shown(path)}: top_k_experts is {chosen}, of {count} experts")
    return Experts(
        count,
        chosen,
        width,
        normalized=True,
        shared=SharedExpert(feed_forward, gated=False),
        routing=Routing("softmax"),
        beside_dense=True,
    )


FAMILY = Gemma4(
    "Gemma4Text",
    FamilyFields(
        read=frozenset(
            {
                "attention_k_eq_v", "enable_moe_block", "final_logit_softcapping", "global_head_dim",
                "hidden_size_per_layer_input", "num_global_key_value_heads", "per_layer_config",
                "use_bidirectional_attention", *_OF_EXPERTS,
            }
        ),
        types=GEMMA_TYPES | {"vocab_size_per_layer_input": (int,), "use_double_wide_mlp": (bool,)},
        only=NO_ATTENTION_BIAS | {"hidden_activation": GELU, "num_kv_shared_layers": 0},
        never_null=(
            "hidden_activation", "num_key_value_heads", "head_dim", "global_head_dim", "hidden_size_per_layer_input",
            "num_kv_shared_layers", "sliding_window", "use_double_wide_mlp", "vocab_size_per_layer_input",
            "attention_k_eq_v", "enable_moe_block", "per_layer_config",
        ),
        may_be_null=("num_experts",),
        absent={"num_key_value_heads": 4, "head_dim": 256},
    ),
    language_class="Gemma4ForCausalLM",
    query_key_norm=True,
    max_positions=131072,
    windows=WindowFields(absent=512, layers="pattern", full_every=6, by_type=True),
    norms=NORMS_AROUND,
    expert_names=ExpertNames(module="", router="router.proj", shared="mlp"),
    activation="gelu_tanh",
    scalings={"proportional": ProportionalScaling},
    vllm_mixes_windows=True,
    has_rollout_table=False,
    initial_values=dict.fromkeys(
        ("layer_scalar", "layernorm_1.weight", "layernorm_2.weight", "router.scale", "router.per_expert_scale"), 1.0
    ),
    thetas={FULL: ("rope_theta", 1_000_000.0), WINDOW: ("rope_theta", 10_000.0)},
)  # fmt: skip
