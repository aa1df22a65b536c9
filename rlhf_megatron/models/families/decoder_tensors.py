"""The tensors of the usual decoder: their shapes, and the parameter of each in Megatron and in vLLM."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from rlhf_megatron.models.description import Architecture, LayerKind
from rlhf_megatron.models.families import latent, mixture
from rlhf_megatron.models.families.delta_net_tensors import delta_shapes
from rlhf_megatron.models.families.norm_names import NormNames
from rlhf_megatron.models.rectangles import SCORE, Cut, Implementation, Slot, chunk_prefix
from rlhf_megatron.topology.layout import Layout

# Megatron's names of the norms before attention and feed-forward layer: Transformer Engine fuses a norm with the linear
# layer after it.
_MEGATRON_NORMS: dict[Implementation, tuple[str, str]] = {
    "local": ("input_layernorm.weight", "pre_mlp_layernorm.weight"),
    "transformer_engine": ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"),
}
_ROUTER_NORM = "pre_mlp_layernorm.weight"  # in front of a router there is no linear layer to fuse it with
_DENSE_NORM = "mlp.before_dense.weight"  # which is not before the experts beside the dense layer
# What a layer for multi-token prediction has in front: norms of the next token's embedding and of the model's output,
# and the product of both, one behind the other. And what it has behind: a norm.
_PREDICTION_INPUT = ("enorm.weight", "hnorm.weight", "eh_proj.weight")
_PREDICTION_NORM = "shared_head.norm.weight"


@functools.cache
def decoder_shapes(a: Architecture, norms: NormNames, expert_names: mixture.ExpertNames) -> dict[str, tuple[int, ...]]:
    """Return every tensor of a checkpoint and its shape, in the model's order."""
    shapes: dict[str, tuple[int, ...]] = {}
    if a.head == "prediction":
        norm, other, product = (f"model.layers.{a.first_layer}.{tensor}" for tensor in _PREDICTION_INPUT)
        shapes |= {norm: (a.hidden,), other: (a.hidden,), product: (a.hidden, 2 * a.hidden)}
    else:
        shapes["model.embed_tokens.weight"] = (a.vocabulary, a.hidden)
    for index, kind in enumerate(a.layer_kinds, start=a.first_layer):
        layer = f"model.layers.{index}."
        shapes.update((f"{layer}{norm}.weight", (a.hidden,)) for norm in norms.names if norm)
        if kind.attention == "delta":
            shapes.update(delta_shapes(a, layer))
        else:
            shapes.update(
                latent.attention_shapes(a, layer) if a.latent else _attention_shapes(a.of_kind(kind), layer, norms)
            )
        if a.layer_scalars:
            shapes[layer + "layer_scalar"] = (1,)
        if kind.feed_forward == "experts":
            shapes.update(mixture.expert_shapes(a, layer, expert_names))
            continue
        for part, (rows, columns) in _feed_forward_shapes(a).items():
            shapes[f"{layer}mlp.{part}.weight"] = (rows, columns)
            if a.mlp_bias:
                shapes[f"{layer}mlp.{part}.bias"] = (rows,)
    shapes[_last_norm(a)] = (a.hidden,)
    if a.head == "prediction":
        return shapes
    if a.head == "scalar":
        shapes[SCORE] = (1, a.hidden)
    elif not a.tied_embeddings:
        shapes["lm_head.weight"] = (a.vocabulary, a.hidden)
    return shapes


def _last_norm(a: Architecture) -> str:
    """Return the tensor of the norm behind the last layer."""
    return f"model.layers.{a.first_layer}.{_PREDICTION_NORM}" if a.head == "prediction" else "model.norm.weight"


def _attention_shapes(a: Architecture, layer: str, norms: NormNames) -> Iterator[tuple[str, tuple[int, ...]]]:
    output, key_value = a.heads * a.head_dim, a.key_value_heads * a.head_dim
    query = 2 * output if a.gated_attention else output
    for part, rows, norm in (("q", query, norms.query), ("k", key_value, norms.key), ("v", key_value, None)):
        if part == "v" and a.keys_are_values:
            continue
        yield f"{layer}self_attn.{part}_proj.weight", (rows, a.hidden)
        if a.qkv_bias:
            yield f"{layer}self_attn.{part}_proj.bias", (rows,)
        if norm and _norm_cut(a):
            shape = (
                (rows // a.head_dim, a.head_dim) if a.head_norms else (rows if a.wide_query_key_norm else a.head_dim,)
            )
            yield f"{layer}self_attn.{norm}.weight", shape
    yield layer + "self_attn.o_proj.weight", (a.hidden, output)
    if a.output_bias:
        yield layer + "self_attn.o_proj.bias", (a.hidden,)
    if a.attention_sinks:
        yield layer + "self_attn.sinks", (a.heads,)


def _norm_cut(a: Architecture) -> Cut | None:
    """Return how the weights of the norms of queries and keys are cut; None: there are no such norms."""
    if a.wide_query_key_norm or a.head_norms:
        return "rows"
    return "whole" if a.query_key_norm else None


def _feed_forward_shapes(a: Architecture) -> dict[str, tuple[int, int]]:
    up, down = (a.feed_forward, a.hidden), (a.hidden, a.feed_forward)
    return {"up_proj": up, "down_proj": down} if a.plain_mlp else {"gate_proj": up, "up_proj": up, "down_proj": down}


def _attention_slots(
    a: Architecture, kind: LayerKind, tensor_prefix: str, names: dict[str, str], norms: NormNames
) -> Iterator[Slot]:
    cuts: tuple[tuple[str, Cut], ...] = (("q", "query"), ("k", "key"), ("v", "value"))
    for part, cut in cuts[:2] if a.keys_are_values else cuts:
        yield Slot(f"{tensor_prefix}self_attn.{part}_proj.weight", cut, names["qkv"] + ".weight", kind=kind)
        if a.qkv_bias:
            yield Slot(f"{tensor_prefix}self_attn.{part}_proj.bias", cut, names["qkv"] + ".bias", kind=kind)
    norm_cut = _norm_cut(a)
    if norm_cut:
        yield Slot(f"{tensor_prefix}self_attn.{norms.query}.weight", norm_cut, names["query_norm"])
        yield Slot(f"{tensor_prefix}self_attn.{norms.key}.weight", norm_cut, names["key_norm"])
    yield Slot(tensor_prefix + "self_attn.o_proj.weight", "columns", names["output"] + ".weight")
    if a.output_bias:
        yield Slot(tensor_prefix + "self_attn.o_proj.bias", "whole", names["output"] + ".bias")
    if a.attention_sinks:
        yield Slot(tensor_prefix + "self_attn.sinks", "rows", names["sinks"])


def layer_slots(
    a: Architecture,
    kind: LayerKind,
    tensor_prefix: str,
    names: dict[str, str],
    norms: NormNames,
    expert_names: mixture.ExpertNames,
) -> Iterator[Slot]:
    """Yield the slots of a decoder layer but for its experts; ``names``: the parameter of each part in a framework."""
    for norm, parameter in zip(norms.names, ("input_norm", "attention_norm", "mlp_norm", "output_norm"), strict=True):
        if norm:
            yield Slot(f"{tensor_prefix}{norm}.weight", "whole", names[parameter])
    if a.layer_scalars:
        yield Slot(tensor_prefix + "layer_scalar", "whole", names["layer_scalar"])
    if a.latent:
        yield from latent.attention_slots(a, tensor_prefix, names["attention"])
    elif kind.attention != "delta":  # whose rectangles are of another form (``delta_blocks``)
        yield from _attention_slots(a.of_kind(kind), kind, tensor_prefix, names, norms)
    if kind.feed_forward == "experts":
        router = f"{tensor_prefix}{expert_names.prefix}{expert_names.router}.weight"
        yield Slot(router, "whole", names["router"])
        return  # the experts are cut over other ranks than the rest of the layer
    for kind_of_tensor in ("weight", "bias") if a.mlp_bias else ("weight",):
        down: Cut = "columns" if kind_of_tensor == "weight" else "whole"
        gate_up = f"{names['gate_up']}.{kind_of_tensor}"
        if not a.plain_mlp:
            yield Slot(f"{tensor_prefix}mlp.gate_proj.{kind_of_tensor}", "gate", gate_up)
        yield Slot(f"{tensor_prefix}mlp.up_proj.{kind_of_tensor}", "rows" if a.plain_mlp else "up", gate_up)
        yield Slot(f"{tensor_prefix}mlp.down_proj.{kind_of_tensor}", down, f"{names['down']}.{kind_of_tensor}")


def input_slots(a: Architecture, layout: Layout) -> Iterator[Slot]:
    """Yield the slots of what Megatron's first pipeline stage has before its layers."""
    module = chunk_prefix(layout, 0) + "embedding."
    if a.head == "prediction":
        for tensor in _PREDICTION_INPUT:
            yield Slot(f"model.layers.{a.first_layer}.{tensor}", "whole", module + tensor)
        return
    yield Slot("model.embed_tokens.weight", "vocabulary", module + "word_embeddings.weight")


def head_slots(a: Architecture, layout: Layout) -> Iterator[Slot]:
    """Yield the slots of what Megatron's last pipeline stage has behind its layers."""
    last = chunk_prefix(layout, layout.virtual_pipeline - 1)
    yield Slot(_last_norm(a), "whole", last + "decoder.final_layernorm.weight")
    if a.head == "prediction":
        return
    if a.head == "scalar":
        yield Slot(SCORE, "whole", last + "output_layer.weight")
    elif not a.tied_embeddings:
        yield Slot("lm_head.weight", "vocabulary", last + "output_layer.weight")
    elif layout.pipeline > 1:  # the last stage has a copy of its own; its gradients are added to the first's
        yield Slot("model.embed_tokens.weight", "vocabulary", last + "output_layer.weight")


def megatron_names(a: Architecture, prefix: str, kind: LayerKind, implementation: Implementation) -> dict[str, str]:
    """Return Megatron's parameter of each part of a layer whose parameters' names begin with ``prefix``."""
    input_norm, mlp_norm = _MEGATRON_NORMS[implementation]
    if a.latent or kind.attention == "delta":  # several matrices are behind the norm, which is fused with none of them
        input_norm = _MEGATRON_NORMS["local"][0]
    if a.experts and kind.feed_forward == "experts":
        mlp_norm = _DENSE_NORM if a.experts.beside_dense else _ROUTER_NORM
    return {
        "attention": prefix + "self_attention.",
        "input_norm": prefix + input_norm,
        "qkv": prefix + "self_attention.linear_qkv",
        "query_norm": prefix + "self_attention.q_layernorm.weight",
        "key_norm": prefix + "self_attention.k_layernorm.weight",
        "output": prefix + "self_attention.linear_proj",
        "sinks": prefix + "self_attention.core_attention.softmax_offset",
        "layer_scalar": prefix + "layer_scalar",
        "attention_norm": prefix + "self_attn_bda.norm.weight",
        "output_norm": prefix + "mlp_bda.norm.weight",
        "mlp_norm": prefix + mlp_norm,
        "router": prefix + "mlp.router.weight",
        "gate_up": prefix + "mlp.linear_fc1",
        "down": prefix + "mlp.linear_fc2",
    }


def rollout_names(prefix: str, expert_names: mixture.ExpertNames) -> dict[str, str]:
    """Return vLLM's parameter of each part of a layer whose parameters' names begin with ``prefix``."""
    return {
        "input_norm": prefix + "input_layernorm.weight",
        "qkv": prefix + "self_attn.qkv_proj",
        "query_norm": prefix + "self_attn.q_norm.weight",
        "key_norm": prefix + "self_attn.k_norm.weight",
        "output": prefix + "self_attn.o_proj",
        "mlp_norm": prefix + "post_attention_layernorm.weight",
        "router": f"{prefix}{expert_names.prefix}gate.weight",
        "gate_up": prefix + "mlp.gate_up_proj",
        "down": prefix + "mlp.down_proj",
    }
