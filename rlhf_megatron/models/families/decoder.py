"""The usual decoder, as Llama's: RMSNorm, grouped queries, a gated feed-forward layer or a mixture of experts.

A family of this form is a ``Decoder`` with what it has of its own; one with parts of another kind overrides methods.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlhf_megatron.models.config_fields import FamilyFields, flag, number, size, token_ids
from rlhf_megatron.models.description import WIDEST_HEAD, Architecture, LayerKind
from rlhf_megatron.models.families import delta_net_tensors, latent, mixture
from rlhf_megatron.models.families.bias_fields import NO_BIASES, BiasFields
from rlhf_megatron.models.families.config_reading import read_heads
from rlhf_megatron.models.families.decoder_tensors import (
    decoder_shapes,
    head_slots,
    input_slots,
    layer_slots,
    megatron_names,
    rollout_names,
)
from rlhf_megatron.models.families.fused_tensors import fused_shapes, fused_slots
from rlhf_megatron.models.families.norm_names import NORMS_BEFORE, NormNames
from rlhf_megatron.models.families.rope_reading import read_rope
from rlhf_megatron.models.families.windows import (
    WindowFields,
    causal_pairs,
    mixed_layers,
    read_windows,
    window_settings,
)
from rlhf_megatron.models.rectangles import (
    Block,
    Implementation,
    Shapes,
    Slot,
    held_layers,
    slot_blocks,
)
from rlhf_megatron.models.rope import SCALINGS, Scaling
from rlhf_megatron.models.stacked import Stacked
from rlhf_megatron.topology.layout import Layout

if TYPE_CHECKING:
    from rlhf_megatron.models.rotary import Rotary

NO_ATTENTION_BIAS: dict[str, Any] = {"attention_bias": False, "qkv_bias": False}
Activation = Literal["silu", "gelu_tanh", "squared_relu"]


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A Family; see there for its methods.

    ``max_positions``, ``norm_epsilon``, ``rope_theta``: what transformers takes for absent fields.
    ``partial_rotary``: positions turn a part of a head where the config says so. ``scalings``: kinds, by rope_type.
    ``qkv_bias``: always there; ``bias_fields`` have those that the config decides on.
    ``fused``: modules of checkpoints that are one tensor where others have several (``fused_tensors``).
    ``plain_mlp``: feed-forward layers have no gate.
    ``windows``: which layers have a sliding window; None: no layer of the family.
    ``vllm_divides_heads``: vLLM takes hidden_size / num_attention_heads for the size of a head, whatever head_dim is.
    ``vllm_mixes_windows``: in vLLM too some layers may have a window and others not.
    ``vllm_has_output_bias``: attention's output has a bias in vLLM where it has one in transformers.
    ``predicts``: checkpoints have a layer for multi-token prediction in DeepSeek-V3's form.
    """

    classes: str
    fields: FamilyFields
    language_class: str = ""
    query_key_norm: bool = False
    wide_query_key_norm: bool = False
    qkv_bias: bool = False
    bias_fields: BiasFields = NO_BIASES
    experts: bool = False
    expert_names: mixture.ExpertNames = mixture.USUAL_NAMES
    max_positions: int = 32768
    norm_epsilon: float = 1e-6
    rope_theta: float = 10_000.0
    partial_rotary: bool = False
    scalings: Mapping[str, type[Scaling]] = dataclasses.field(default_factory=lambda: SCALINGS)
    windows: WindowFields | None = None
    norms: NormNames = NORMS_BEFORE
    fused: tuple[str, ...] = ()
    zero_centred_norms: bool = False
    activation: Activation = "silu"
    plain_mlp: bool = False
    vllm_divides_heads: bool = False
    vllm_mixes_windows: bool = False
    vllm_has_output_bias: bool = True
    has_rollout_table: bool = True
    predicts: bool = False
    joint_adapters: bool = False
    initial_values: Mapping[str, float] = dataclasses.field(default_factory=dict)

    # ---- description

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        layers, vocabulary = size(path, "num_hidden_layers", config), size(path, "vocab_size", config)
        max_positions = size(path, "max_position_embeddings", config, self.max_positions)
        window, within = read_windows(path, config, self.windows, layers, max_positions)
        heads, key_value_heads, head_dim = read_heads(path, config, self.fields.absent)
        token_ids(path, "bos_token_id", config, vocabulary)
        pad = token_ids(path, "pad_token_id", config, vocabulary)
        qkv_bias, output_bias, mlp_bias = self.bias_fields.read(path, config)
        return Architecture(
            family=config["model_type"],
            layers=layers,
            hidden=size(path, "hidden_size", config),
            feed_forward=size(path, "intermediate_size", config),
            heads=heads,
            key_value_heads=key_value_heads,
            head_dim=head_dim,
            vocabulary=vocabulary,
            max_positions=max_positions,
            norm_epsilon=number(path, "rms_norm_eps", config, self.norm_epsilon),
            rope=read_rope(
                path,
                config,
                head_dim,
                max_positions,
                self.rope_theta,
                partial=self.partial_rotary,
                scalings=self.scalings,
            ),
            tied_embeddings=flag(path, "tie_word_embeddings", config),
            query_key_norm=self.query_key_norm,
            qkv_bias=self.qkv_bias or qkv_bias,
            pad_token_id=pad[0] if pad else None,
            end_token_ids=token_ids(path, "eos_token_id", config, vocabulary),
            experts=mixture.read_experts(path, config) if self.experts else None,
            mixed_layers=mixed_layers(within, "experts" if self.experts else "dense"),
            window=window,
            zero_centred_norms=self.zero_centred_norms,
            output_bias=output_bias,
            mlp_bias=mlp_bias,
            wide_query_key_norm=self.wide_query_key_norm,
            plain_mlp=self.plain_mlp,
        )

    def tensor_shapes(self, architecture: Architecture) -> Shapes:
        """See Family."""
        return fused_shapes(self._separate_shapes(architecture), self.fused)

    def _separate_shapes(self, architecture: Architecture) -> Shapes:
        """Return what ``tensor_shapes`` were if no tensor was ``fused``."""
        return decoder_shapes(architecture, self.norms, self.expert_names)

    def stacked_tensors(self, architecture: Architecture) -> Mapping[str, Stacked]:
        """See Family: none."""
        return {}

    # ---- trainer

    def layer_spec(
        self, architecture: Architecture, kind: LayerKind, implementation: Implementation, rotary: Rotary
    ) -> Any:
        """See Family."""
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_layer_local_spec,
            get_gpt_layer_with_transformer_engine_spec,
        )
        from megatron.core.transformer.moe.experts import TEGroupedMLP

        from rlhf_megatron.models.attention import packed_attention
        from rlhf_megatron.models.biases import add_biases
        from rlhf_megatron.models.delta_net import use_delta_net
        from rlhf_megatron.models.router import ScoreRouter
        from rlhf_megatron.models.self_attention import StackedSelfAttention, with_fewer_rows
        from rlhf_megatron.models.wide_norm import HeadNorm, WideNorm

        count = architecture.experts.count if architecture.experts and kind.feed_forward == "experts" else None
        spec: Any
        if implementation == "transformer_engine":
            spec = get_gpt_layer_with_transformer_engine_spec(
                multi_latent_attention=architecture.latent is not None,
                num_experts=count,
                qk_layernorm=architecture.query_key_norm,
                use_te_activation_func=self._has_fused_activation(architecture),
            )
        else:
            spec = get_gpt_layer_local_spec(
                num_experts=count,
                qk_layernorm=architecture.query_key_norm,
                multi_latent_attention=architecture.latent is not None,
                normalization="RMSNorm",
            )
        is_wide = architecture.of_kind(kind).head_dim > WIDEST_HEAD and architecture.latent is None
        is_unusual = is_wide or architecture.scales.attention_cap is not None or architecture.attention_sinks
        if implementation == "local" or is_unusual:
            # Transformer Engine's attention knows no soft cap, sinks with few of its kernels, and no larger heads.
            attention = packed_attention(architecture.scales.attention_cap)
            spec.submodules.self_attention.submodules.core_attention = attention
        self._finish_sublayers(architecture, spec, implementation)
        add_biases(architecture, kind, spec)
        own = architecture.of_kind(kind)
        if own.keys_are_values:
            attention_parts = spec.submodules.self_attention.submodules
            attention_parts.linear_qkv = with_fewer_rows(attention_parts.linear_qkv, own.key_value_heads * own.head_dim)
        if count is not None and architecture.experts:
            mixture_of_layer = spec.submodules.mlp.keywords["submodules"]
            mixture_of_layer.experts = functools.partial(TEGroupedMLP, submodules=self._expert_layers())
            if architecture.experts.routing:
                mixture_of_layer.router = functools.partial(ScoreRouter, experts=architecture.experts)
        if kind.attention == "delta":
            assert architecture.delta_net is not None
            use_delta_net(architecture.delta_net, spec, implementation)
            return spec
        if architecture.latent:
            latent.attention_spec(spec, implementation, rotary)
            return spec
        spec.submodules.self_attention.module = StackedSelfAttention
        spec.submodules.self_attention.params |= {
            "rotary": rotary,
            "norm": WideNorm if architecture.wide_query_key_norm else HeadNorm if architecture.head_norms else None,
            "norms_of_turned": architecture.norms_of_turned,
            "value_norm": architecture.value_norm,
            "keys_are_values": own.keys_are_values,
            "key_value_heads": own.key_value_heads,
            "head_dim": own.head_dim,
        }
        return spec

    def _finish_sublayers(self, architecture: Architecture, spec: Any, implementation: Implementation) -> None:
        """Have layers norm and scale what attention and feed-forward layer add, where the model does."""
        scale, normed = architecture.scales.residual, self.norms.after_attention is not None
        if scale is None and not normed and not architecture.layer_scalars:
            return
        from megatron.core.extensions.transformer_engine import TENorm
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        from rlhf_megatron.models.sublayers import DecoderLayer, remove_norms_before

        if self.norms.before_attention is None:
            remove_norms_before(spec, implementation)
        spec.module = DecoderLayer
        norm = TENorm if implementation == "transformer_engine" else WrappedTorchNorm
        spec.params |= {"output_norm": norm if normed else None, "residual_scale": scale or 1.0}
        spec.params["has_scalar"] = architecture.layer_scalars

    def _expert_layers(self) -> Any:
        """Return the linear layers of the experts, for Megatron's ``TEGroupedMLP``, which asks for no more of them."""
        from megatron.core.transformer.moe.experts import GroupedMLPSubmodules

        from rlhf_megatron.models.experts import ExpertColumns, ExpertRows

        return GroupedMLPSubmodules(linear_fc1=ExpertRows, linear_fc2=ExpertColumns)

    def _has_fused_activation(self, architecture: Architecture) -> bool:
        """Return whether Transformer Engine has the activation; its SwiGLU has no grouped form."""
        return architecture.experts is None and self.activation == "silu"

    def transformer_settings(
        self, architecture: Architecture, layout: Layout, *, float32: bool, fused: bool
    ) -> dict[str, Any]:
        """See Family."""
        from rlhf_megatron.models.activations import ACTIVATIONS

        a = architecture
        return {
            "num_layers": a.layers,
            "hidden_size": a.hidden,
            "ffn_hidden_size": a.feed_forward,
            "num_attention_heads": a.heads,
            "num_query_groups": a.key_value_heads,
            "kv_channels": a.head_dim,
            "normalization": "RMSNorm",
            "layernorm_epsilon": a.norm_epsilon,
            "qk_layernorm": a.query_key_norm,
            "gated_linear_unit": not a.plain_mlp,
            "activation_func": ACTIVATIONS[self.activation],
            "layernorm_zero_centered_gamma": a.zero_centred_norms,
            "softmax_scale": a.scales.attention,
            "add_bias_linear": False,
            "add_qkv_bias": a.qkv_bias,
            "attention_output_gate": a.gated_attention,
            "use_te_activation_func": fused and self._has_fused_activation(a),
            "bias_activation_fusion": fused and a.experts is not None and self.activation == "silu",
            **window_settings(a),
            **latent.latent_settings(a),
            **mixture.mixture_settings(a.experts, layout, float32, fused),
        }

    def megatron_blocks(
        self, architecture: Architecture, layout: Layout, position: int, implementation: Implementation
    ) -> list[Block]:
        """See Family."""
        a, shapes = architecture, self.tensor_shapes(architecture)
        coordinates = layout.coordinates(position)
        kinds = a.layer_kinds
        slots: list[Slot] = []
        if coordinates.pipeline == 0:
            slots.extend(input_slots(a, layout))
        for prefix, index in held_layers(a, layout, coordinates.pipeline):
            names, layer = megatron_names(a, prefix, kinds[index], implementation), a.layer_tensors(index)
            slots.extend(layer_slots(a, kinds[index], layer, names, self.norms, self.expert_names))
            if a.experts and kinds[index].feed_forward == "experts":
                slots.extend(mixture.common_slots(a.experts, self.expert_names, layer, prefix))
        if coordinates.pipeline == layout.pipeline - 1:
            slots.extend(head_slots(a, layout))
        blocks = [
            block
            for slot in fused_slots(slots, self._separate_shapes(a), self.fused)
            for block in slot_blocks(a, shapes, slot, layout.tensor, coordinates.tensor, repeats=False)
        ]
        for prefix, index in held_layers(a, layout, coordinates.pipeline):
            if kinds[index].attention == "delta":
                layer = a.layer_tensors(index)
                blocks.extend(delta_net_tensors.delta_blocks(a, layer, prefix, layout.tensor, coordinates.tensor))
        return [*blocks, *mixture.megatron_experts(a, self.expert_names, layout, position)]

    # ---- rollout

    def rollout_blocks(
        self, architecture: Architecture, tensor: int, tensor_rank: int, expert_parallel: bool, layers: Iterable[int]
    ) -> list[Block]:
        """See Family; always with a language head. Not of layers that differ, other norms, nor of shared experts."""
        a, shapes, layers = architecture, self.tensor_shapes(architecture), list(layers)
        kinds = a.layer_kinds
        slots = [Slot("model.embed_tokens.weight", "vocabulary", "model.embed_tokens.weight")]
        for index in layers:
            prefix = f"model.layers.{index}."
            names = rollout_names(prefix, self.expert_names)
            slots.extend(layer_slots(a, kinds[index], prefix, names, self.norms, self.expert_names))
        slots.append(Slot("model.norm.weight", "whole", "model.norm.weight"))
        if not a.tied_embeddings:
            slots.append(Slot("lm_head.weight", "vocabulary", "lm_head.weight"))
        blocks = [block for slot in slots for block in slot_blocks(a, shapes, slot, tensor, tensor_rank, repeats=True)]
        return [*blocks, *mixture.rollout_experts(a, self.expert_names, tensor, tensor_rank, expert_parallel, layers)]

    def rollout_problem(self, architecture: Architecture) -> str | None:
        """See Family."""
        a = architecture
        if self.vllm_divides_heads and a.hidden != a.head_dim * a.heads:
            return f"head_dim is {a.head_dim}, and vLLM takes hidden_size / num_attention_heads for {a.family}"
        if not self.vllm_mixes_windows and len({kind.attention for kind in a.layer_kinds} - {"delta"}) > 1:
            return f"some layers have a sliding window, and vLLM has one in all layers of {a.family} or in none"
        if a.output_bias and not self.vllm_has_output_bias:
            return f"attention_bias is true, and vLLM gives the output of attention in {a.family} no bias"
        for rope in a.layer_ropes:
            if rope and rope.positions_in_vllm is not None and rope.positions_in_vllm < a.max_positions:
                return (
                    f"max_position_embeddings is {a.max_positions}, and vLLM's table for rope_type yarn ends at "
                    f"factor x original_max_position_embeddings, {rope.positions_in_vllm}; lower it to that"
                )
        return None

    def derived_parameters(self, architecture: Architecture) -> Sequence[str]:
        """See Family: none."""
        return ()

    # ---- cost

    def multiplied_weights(self, architecture: Architecture, kind: LayerKind) -> int:
        """See Family."""
        a = architecture.of_kind(kind)
        query, key_value = a.heads * a.head_dim, a.key_value_heads * a.head_dim
        attention = a.hidden * ((3 if a.gated_attention else 2) * query + (1 if a.keys_are_values else 2) * key_value)
        if kind.attention == "delta":
            attention = delta_net_tensors.delta_weights(a)
        elif a.latent:
            attention = latent.attention_weights(a)
        if kind.feed_forward == "experts":
            return attention + mixture.expert_weights(a)
        return attention + (2 if a.plain_mlp else 3) * a.hidden * a.feed_forward

    def attention_flops(
        self, architecture: Architecture, kind: LayerKind, rows: Sequence[float], causal: bool
    ) -> float:
        """See Family: of queries with keys, and of their softmax with values; 2 for a pair and a column of either."""
        if kind.attention == "delta":
            return delta_net_tensors.delta_flops(architecture, sum(rows))
        window = architecture.window if causal and kind.attention == "window" else None
        pairs = sum(causal_pairs(n, window) if causal else n * n for n in rows)
        a = architecture.of_kind(kind)
        columns = a.latent.query_head + a.latent.value if a.latent else 2 * a.head_dim
        return 2.0 * a.heads * columns * pairs

    def cached_elements(self, architecture: Architecture, kind: LayerKind, tensor: int) -> int:
        """See Family: keys and values, a head of each on every rank at least; all latents on every rank; or a state."""
        if kind.attention == "delta":
            return delta_net_tensors.state_elements(architecture, tensor)
        if architecture.latent:
            return architecture.latent.key_value_rank + architecture.latent.turned
        a = architecture.of_kind(kind)
        return 2 * max(1, a.key_value_heads // tensor) * a.head_dim

    def cached_tokens(self, architecture: Architecture, kind: LayerKind, tokens: float) -> float:
        """See Family: all, those within the window, or one state."""
        if kind.attention == "delta":
            return min(tokens, 1)
        return tokens if kind.attention == "full" or architecture.window is None else min(tokens, architecture.window)
