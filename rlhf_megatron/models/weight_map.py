"""Where every weight lives: one table from Hugging Face tensors to Megatron's shards and to vLLM's.

A ``Block`` says that a rectangle of one Hugging Face tensor is stored at an offset of one local parameter. The blocks
of a rank, in either framework's layout, follow from the architecture and the rank's place alone; loading, export and
regathering are all made from them. Nothing here touches a tensor.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Literal

from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.topology.layout import Layout

Region = tuple[tuple[int, int], ...]  # (start, stop) in each dimension of a Hugging Face tensor
Implementation = Literal["local", "transformer_engine"]


@dataclasses.dataclass(frozen=True)
class Block:
    """``parameter[offset : offset + extent]`` holds ``tensor[region]``; extents are the region's."""

    tensor: str
    region: Region
    parameter: str
    offset: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Slot:
    """The place of one Hugging Face tensor in a fused parameter, cut by rows or columns over the tensor ranks.

    ``cut``: "columns", "whole" (replicated), "vocabulary" (rows, padded), "gate" and "up" (rows, one behind the other)
    or a role in attention ("query", "key", "value"), whose order inside the fused parameter is the framework's own.
    """

    tensor: str
    cut: str
    parameter: str


SCORE = "score.weight"  # the scalar head, as in Hugging Face's sequence classification

# Megatron's names, which differ where Transformer Engine fuses a norm with the linear layer after it.
_MEGATRON_NORMS: dict[Implementation, tuple[str, str]] = {
    "local": ("input_layernorm.weight", "pre_mlp_layernorm.weight"),
    "transformer_engine": ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"),
}


@functools.cache
def tensor_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor of the Hugging Face checkpoint and its shape; tied embeddings are listed once."""
    a = architecture
    query, key_value = a.heads * a.head_dim, a.key_value_heads * a.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (a.vocabulary, a.hidden)}
    for index in range(a.layers):
        layer = f"model.layers.{index}."
        shapes[layer + "input_layernorm.weight"] = (a.hidden,)
        for part, rows in (("q", query), ("k", key_value), ("v", key_value)):
            shapes[f"{layer}self_attn.{part}_proj.weight"] = (rows, a.hidden)
            if a.qkv_bias:
                shapes[f"{layer}self_attn.{part}_proj.bias"] = (rows,)
            if a.query_key_norm and part != "v":
                shapes[f"{layer}self_attn.{part}_norm.weight"] = (a.head_dim,)
        shapes[layer + "self_attn.o_proj.weight"] = (a.hidden, query)
        shapes[layer + "post_attention_layernorm.weight"] = (a.hidden,)
        shapes[layer + "mlp.gate_proj.weight"] = (a.feed_forward, a.hidden)
        shapes[layer + "mlp.up_proj.weight"] = (a.feed_forward, a.hidden)
        shapes[layer + "mlp.down_proj.weight"] = (a.hidden, a.feed_forward)
    shapes["model.norm.weight"] = (a.hidden,)
    if a.head == "scalar":
        shapes[SCORE] = (1, a.hidden)
    elif not a.tied_embeddings:
        shapes["lm_head.weight"] = (a.vocabulary, a.hidden)
    return shapes


def _layer_slots(a: Architecture, tensor_prefix: str, names: dict[str, str]) -> Iterator[_Slot]:
    """The slots of one decoder layer; ``names`` gives the parameter of each part, in either framework."""
    yield _Slot(tensor_prefix + "input_layernorm.weight", "whole", names["input_norm"])
    for part, cut in (("q", "query"), ("k", "key"), ("v", "value")):
        yield _Slot(f"{tensor_prefix}self_attn.{part}_proj.weight", cut, names["qkv"] + ".weight")
        if a.qkv_bias:
            yield _Slot(f"{tensor_prefix}self_attn.{part}_proj.bias", cut, names["qkv"] + ".bias")
    if a.query_key_norm:
        yield _Slot(tensor_prefix + "self_attn.q_norm.weight", "whole", names["query_norm"])
        yield _Slot(tensor_prefix + "self_attn.k_norm.weight", "whole", names["key_norm"])
    yield _Slot(tensor_prefix + "self_attn.o_proj.weight", "columns", names["output"])
    yield _Slot(tensor_prefix + "post_attention_layernorm.weight", "whole", names["mlp_norm"])
    yield _Slot(tensor_prefix + "mlp.gate_proj.weight", "gate", names["gate_up"])
    yield _Slot(tensor_prefix + "mlp.up_proj.weight", "up", names["gate_up"])
    yield _Slot(tensor_prefix + "mlp.down_proj.weight", "columns", names["down"])


def _split(size: int, parts: int, part: int) -> tuple[int, int]:
    return size // parts * part, size // parts * (part + 1)


def _attention_blocks(
    a: Architecture, cut: str, parts: int, part: int, grouped: bool
) -> Iterator[tuple[int, int, int]]:
    """(start row, stop row, offset) of the pieces of q, k or v on tensor rank ``part`` of ``parts``.

    Megatron interleaves by group (``grouped``): the queries of a group, its key, its value, the next group. vLLM puts
    all queries first, then all keys, then all values; with fewer key-value heads than ranks it repeats them.
    """
    d, per_group = a.head_dim, a.heads // a.key_value_heads
    if grouped:
        first, last = _split(a.key_value_heads, parts, part)
        for local, group in enumerate(range(first, last)):
            base = local * (per_group + 2) * d
            if cut == "query":
                yield group * per_group * d, (group + 1) * per_group * d, base
            else:
                yield group * d, (group + 1) * d, base + (per_group + (cut == "value")) * d
        return
    queries = a.heads // parts * d
    if cut == "query":
        yield part * queries, (part + 1) * queries, 0
        return
    kept = max(1, a.key_value_heads // parts)
    first = part * a.key_value_heads // parts
    yield first * d, (first + kept) * d, queries + (kept * d if cut == "value" else 0)


def _blocks_of(a: Architecture, slot: _Slot, parts: int, part: int, grouped: bool) -> Iterator[Block]:
    """The blocks of one Hugging Face tensor on tensor rank ``part`` of ``parts``."""
    shape = tensor_shapes(a)[slot.tensor]
    rest: Region = tuple((0, size) for size in shape[1:])
    tail = (0,) * len(rest)
    match slot.cut:
        case "whole":
            yield Block(slot.tensor, ((0, shape[0]), *rest), slot.parameter, (0, *tail))
        case "columns":
            yield Block(slot.tensor, ((0, shape[0]), _split(shape[1], parts, part)), slot.parameter, (0, 0))
        case "gate" | "up":
            offset = a.feed_forward // parts if slot.cut == "up" else 0
            yield Block(slot.tensor, (_split(shape[0], parts, part), *rest), slot.parameter, (offset, *tail))
        case "vocabulary":
            start, stop = _split(a.padded_vocabulary(parts), parts, part)
            if start < a.vocabulary:
                rows = (start, min(stop, a.vocabulary))
                yield Block(slot.tensor, (rows, *rest), slot.parameter, (0, *tail))
        case _:
            for start, stop, offset in _attention_blocks(a, slot.cut, parts, part, grouped):
                yield Block(slot.tensor, ((start, stop), *rest), slot.parameter, (offset, *tail))


def megatron_blocks(
    architecture: Architecture, layout: Layout, position: int, implementation: Implementation
) -> list[Block]:
    """What the rank at ``position`` of a Megatron layout holds. Data-parallel ranks hold the same."""
    a, place = architecture, layout.coordinates(position)
    stage = layout.stage_layers(a.layers)[place.pipeline]
    input_norm, mlp_norm = _MEGATRON_NORMS[implementation]
    slots: list[_Slot] = []
    if place.pipeline == 0:
        slots.append(_Slot("model.embed_tokens.weight", "vocabulary", "embedding.word_embeddings.weight"))
    for local, index in enumerate(stage):
        prefix = f"decoder.layers.{local}."
        names = {
            "input_norm": prefix + input_norm,
            "qkv": prefix + "self_attention.linear_qkv",
            "query_norm": prefix + "self_attention.q_layernorm.weight",
            "key_norm": prefix + "self_attention.k_layernorm.weight",
            "output": prefix + "self_attention.linear_proj.weight",
            "mlp_norm": prefix + mlp_norm,
            "gate_up": prefix + "mlp.linear_fc1.weight",
            "down": prefix + "mlp.linear_fc2.weight",
        }
        slots.extend(_layer_slots(a, f"model.layers.{index}.", names))
    if place.pipeline == layout.pipeline - 1:
        slots.append(_Slot("model.norm.weight", "whole", "decoder.final_layernorm.weight"))
        if a.head == "scalar":
            slots.append(_Slot(SCORE, "whole", "output_layer.weight"))
        elif not a.tied_embeddings:
            slots.append(_Slot("lm_head.weight", "vocabulary", "output_layer.weight"))
        elif layout.pipeline > 1:  # the last stage has a copy of its own; its gradients are added to the first's
            slots.append(_Slot("model.embed_tokens.weight", "vocabulary", "output_layer.weight"))
    return [block for slot in slots for block in _blocks_of(a, slot, layout.tensor, place.tensor, grouped=True)]


def rollout_blocks(architecture: Architecture, tensor: int, tensor_rank: int) -> list[Block]:
    """What tensor rank ``tensor_rank`` of ``tensor`` of one vLLM replica holds, always with a language head."""
    a = architecture
    slots = [_Slot("model.embed_tokens.weight", "vocabulary", "model.embed_tokens.weight")]
    for index in range(a.layers):
        prefix = f"model.layers.{index}."
        names = {
            "input_norm": prefix + "input_layernorm.weight",
            "qkv": prefix + "self_attn.qkv_proj",
            "query_norm": prefix + "self_attn.q_norm.weight",
            "key_norm": prefix + "self_attn.k_norm.weight",
            "output": prefix + "self_attn.o_proj.weight",
            "mlp_norm": prefix + "post_attention_layernorm.weight",
            "gate_up": prefix + "mlp.gate_up_proj.weight",
            "down": prefix + "mlp.down_proj.weight",
        }
        slots.extend(_layer_slots(a, prefix, names))
    slots.append(_Slot("model.norm.weight", "whole", "model.norm.weight"))
    if not a.tied_embeddings:
        slots.append(_Slot("lm_head.weight", "vocabulary", "lm_head.weight"))
    return [block for slot in slots for block in _blocks_of(a, slot, tensor, tensor_rank, grouped=False)]


def whole_blocks(architecture: Architecture) -> list[Block]:
    """Every Hugging Face tensor whole, under its own name: the destination of an export."""
    return [
        Block(name, tuple((0, size) for size in shape), name, (0,) * len(shape))
        for name, shape in tensor_shapes(architecture).items()
    ]
