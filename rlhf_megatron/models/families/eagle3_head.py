"""Heads in EAGLE-3's form (https://arxiv.org/abs/2503.01840): one layer that drafts by hidden states of another model.

``draft_heads`` reads and makes their descriptions. Names of tensors are those of the files that EAGLE-3's authors and
SpecForge publish, which vLLM reads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import FamilyFields, brief, check_class, check_fields, size, unsupported
from rlhf_megatron.models.description import Architecture, LayerKind
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS, Decoder
from rlhf_megatron.models.families.decoder_tensors import layer_slots, megatron_names, rollout_names
from rlhf_megatron.models.rectangles import Block, Implementation, Shapes, Slot, slot_blocks
from rlhf_megatron.topology.layout import Layout
from rlhf_megatron.untrusted import shown

if TYPE_CHECKING:
    from rlhf_megatron.models.rotary import Rotary

NAME = "eagle3_head"
CLASS, MODEL_TYPE = "LlamaForCausalLMEagle3", "llama"
_LAYER, _MEGATRON_LAYER, _ROLLOUT_LAYER = "midlayer.", "decoder.layers.0.", "model.layers.0."
_STATES = 3  # hidden states that a head reads where its config does not say which
_AUXILIARY = "eagle_aux_hidden_state_layer_ids"


@dataclasses.dataclass(frozen=True)
class Eagle3Head(Decoder):
    """A Family; see there for its methods."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family; checks the fields too, and leaves ``auxiliary_layers`` out where the config does."""
        if config.get("architectures") != [CLASS]:
            raise unsupported(path, "architectures", config.get("architectures"), f'["{CLASS}"]')
        if config.get("model_type") != MODEL_TYPE:
            raise unsupported(path, "model_type", config.get("model_type"), MODEL_TYPE)
        check_fields(path, config, self.fields)
        check_class(path, config, "Llama", CLASS)
        if config.get("num_hidden_layers") != 1:
            raise unsupported(path, "num_hidden_layers", config.get("num_hidden_layers"), "1")
        if config.get("quantization_config") is not None:
            raise unsupported(path, "quantization_config", config["quantization_config"], "none")
        plain = super().read(path, dict(config) | {"tie_word_embeddings": False})  # it has an output layer in any case
        drafted = size(path, "draft_vocab_size", config, plain.vocabulary)
        if drafted > plain.vocabulary:
            raise unsupported(path, "draft_vocab_size", drafted, f"at most vocab_size, {plain.vocabulary}")
        if size(path, "target_hidden_size", config, plain.hidden) != plain.hidden:
            raise unsupported(path, "target_hidden_size", config["target_hidden_size"], f"hidden_size, {plain.hidden}")
        auxiliary = _auxiliary_layers(path, config)
        if size(path, "num_aux_hidden_states", config, len(auxiliary) or _STATES) != (len(auxiliary) or _STATES):
            number = config["num_aux_hidden_states"]
            raise unsupported(path, "num_aux_hidden_states", number, f"as many as {_AUXILIARY}, or {_STATES}")
        return dataclasses.replace(
            plain,
            family=NAME,
            head="draft",
            vocabulary=drafted,
            target_vocabulary=plain.vocabulary,
            auxiliary_layers=auxiliary,
        )

    def _separate_shapes(self, architecture: Architecture) -> Shapes:
        """See Decoder."""
        return _head_shapes(architecture)

    # ---- trainer

    def layer_spec(
        self, architecture: Architecture, kind: LayerKind, implementation: Implementation, rotary: Rotary
    ) -> Any:
        """See Family."""
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear
        from megatron.core.transformer.identity_op import IdentityOp

        from rlhf_megatron.models.eagle3_layer import Eagle3Layer
        from rlhf_megatron.models.self_attention import with_columns

        spec = super().layer_spec(architecture, kind, implementation, rotary)
        spec.module, spec.submodules.input_layernorm = Eagle3Layer, IdentityOp
        attention = spec.submodules.self_attention.submodules
        # Transformer Engine's usual one has a norm before it, which here is of two parts.
        linear = TEColumnParallelLinear if implementation == "transformer_engine" else attention.linear_qkv
        attention.linear_qkv = with_columns(linear, 2 * architecture.hidden)
        return spec

    def megatron_blocks(
        self, architecture: Architecture, layout: Layout, position: int, implementation: Implementation
    ) -> list[Block]:
        """See Family; of one pipeline stage."""
        kind, coordinates = architecture.layer_kinds[0], layout.coordinates(position)
        names = megatron_names(architecture, _MEGATRON_LAYER, kind, implementation)
        names |= {"input_norm": _MEGATRON_LAYER + "embedding_norm.weight"}
        slots = [
            Slot("fc.weight", "whole", "embedding.fc.weight"),
            Slot(_LAYER + "hidden_norm.weight", "whole", _MEGATRON_LAYER + "feature_norm.weight"),
            *layer_slots(architecture, kind, _LAYER, names, self.norms, self.expert_names),
            Slot("norm.weight", "whole", "decoder.final_layernorm.weight"),
            Slot("lm_head.weight", "vocabulary", "output_layer.weight"),
        ]
        return list(_blocks(architecture, slots, layout.tensor, coordinates.tensor, repeats=False))

    # ---- rollout

    def rollout_blocks(
        self, architecture: Architecture, tensor: int, tensor_rank: int, expert_parallel: bool, layers: Iterable[int]
    ) -> list[Block]:
        """See Family; parameters of vLLM's model of the head, without ``draft_id_to_target_id`` (``DraftVocabulary``).

        ``layers`` is of one layer, which is always there.
        """
        kind, names = architecture.layer_kinds[0], rollout_names(_ROLLOUT_LAYER, self.expert_names)
        slots = [
            Slot("fc.weight", "whole", "model.fc.weight"),
            Slot(_LAYER + "hidden_norm.weight", "whole", _ROLLOUT_LAYER + "hidden_norm.weight"),
            *layer_slots(architecture, kind, _LAYER, names, self.norms, self.expert_names),
            Slot("norm.weight", "whole", "model.norm.weight"),
            Slot("lm_head.weight", "vocabulary", "lm_head.weight"),
        ]
        return list(_blocks(architecture, slots, tensor, tensor_rank, repeats=True))

    # ---- cost

    def multiplied_weights(self, architecture: Architecture, kind: LayerKind) -> int:
        """See Family: with those that make a feature of hidden states."""
        a = architecture
        of_embeddings = a.hidden * (a.heads + 2 * a.key_value_heads) * a.head_dim
        return super().multiplied_weights(a, kind) + of_embeddings + len(a.auxiliary_layers) * a.hidden**2


def _auxiliary_layers(path: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers before which hidden states are taken; () where the config does not say."""
    field = "eagle_config"
    given = config.get(field)
    if not isinstance(given, dict | None):
        raise ModelError(f"{shown(path)}: {field} must be an object; it is {brief(given)}")
    supported = {"use_aux_hidden_state": True, "norm_before_fc": False}
    for key, value in (given or {}).items():
        if key in supported and value is not supported[key]:
            raise unsupported(path, f"{field}.{key}", value, repr(supported[key]))
        if key not in (_AUXILIARY, *supported):
            raise ModelError(
                f"{shown(path)}: {field}.{shown(key, 80)} is {brief(value)}, which this version does not know"
            )
    named = [each[_AUXILIARY] for each in (given or {}, config) if each.get(_AUXILIARY) is not None]
    if not named:
        return ()
    layers = named[0]
    if layers != named[-1]:
        raise ModelError(f"{shown(path)}: {_AUXILIARY} and that of {field} differ, and are one field; remove one")
    numbers = isinstance(layers, list) and 0 < len(layers) <= 2**10 and all(type(n) is int and n >= 0 for n in layers)
    if not numbers or layers != sorted(set(layers)):  # vLLM hands hidden states on in the order of the layers
        raise unsupported(
            path, f"{field}.{_AUXILIARY}", layers, "a list of different layers, from the first to the last"
        )
    return tuple(layers)


@functools.cache
def _head_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    """Return every tensor of a head's files that is trained, and its shape."""
    query, key_value = a.heads * a.head_dim, a.key_value_heads * a.head_dim
    attention, mlp = _LAYER + "self_attn.", _LAYER + "mlp."
    return {
        "fc.weight": (a.hidden, len(a.auxiliary_layers) * a.hidden),
        _LAYER + "hidden_norm.weight": (a.hidden,),
        _LAYER + "input_layernorm.weight": (a.hidden,),
        attention + "q_proj.weight": (query, 2 * a.hidden),
        attention + "k_proj.weight": (key_value, 2 * a.hidden),
        attention + "v_proj.weight": (key_value, 2 * a.hidden),
        attention + "o_proj.weight": (a.hidden, query),
        _LAYER + "post_attention_layernorm.weight": (a.hidden,),
        mlp + "gate_proj.weight": (a.feed_forward, a.hidden),
        mlp + "up_proj.weight": (a.feed_forward, a.hidden),
        mlp + "down_proj.weight": (a.hidden, a.feed_forward),
        "norm.weight": (a.hidden,),
        "lm_head.weight": (a.vocabulary, a.hidden),
    }


def _blocks(a: Architecture, slots: Iterable[Slot], parts: int, part: int, *, repeats: bool) -> Iterator[Block]:
    for slot in slots:
        yield from slot_blocks(a, _head_shapes(a), slot, parts, part, repeats=repeats)


FAMILY = Eagle3Head(
    "Llama",
    FamilyFields(
        read=frozenset({"draft_vocab_size", "eagle_config", _AUXILIARY, "num_aux_hidden_states", "target_hidden_size"}),
        only=NO_ATTENTION_BIAS
        | {
            "fc_norm": False,
            "norm_before_fc": False,
            "norm_before_residual": False,
            "norm_output": False,
            "parallel_drafting": False,
            "sliding_window": None,
        },
    ),
    language_class=CLASS,
    max_positions=2048,
)
